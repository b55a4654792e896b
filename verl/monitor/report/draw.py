"""Draw plots with matplotlib, as inline SVG for the page or as one PNG for sharing.

In: runs and plot declarations. Out: SVG text whose colours are CSS variables, so that one drawing
serves the light and the dark page; or a PNG. The Agg and SVG back ends need no display.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from verl.monitor.report.load import RunData
from verl.monitor.report.plots import TIMINGS, Curve, Panel, Plot
from verl.monitor.report.style import DARK_FOR_LIGHT, INK, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

WIDTH, HEIGHT = 5.6, 3.3
TITLE_HEIGHT = 0.5
TIMINGS_TITLE = "Seconds per step"
#: Fixed margins: matplotlib's layout engines double the time of a report.
MARGINS = {"left": 0.145, "right": 0.985, "bottom": 0.135, "hspace": 0.42}
#: Top margin: legend only, and with the title that a cell of the PNG carries.
TOP, TOP_WITH_TITLE = 0.92, 0.84
TOP_TWO_ROWS = 0.88
#: Lines with fewer points get markers, else a run of one step would show nothing.
MARKER_POINTS = 12
MAX_BARS = 60

_RC = {
    "svg.fonttype": "none",  # Text stays text: searchable, and in the page's font.
    "text.parse_math": False,  # A dollar sign in a run's name is a dollar sign.
    "font.size": 9,
    "axes.edgecolor": INK["axis"],
    "axes.labelcolor": INK["secondary"],
    "text.color": INK["primary"],
    "xtick.color": INK["muted"],
    "ytick.color": INK["muted"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK["grid"],
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
}


def svg(plot: Plot, runs: Sequence[RunData], identifier: str) -> str:
    """One plot as an `<svg>` element; `identifier` keeps its ids apart from other plots'."""
    return _svg(lambda figure: _draw_plot(figure, plot, runs, TOP), plot.title, identifier)


def timings_svg(run: RunData, identifier: str) -> str:
    """Seconds per stage, stacked over steps, as an `<svg>` element."""
    return _svg(lambda figure: _draw_timings(figure, run, TOP_TWO_ROWS), TIMINGS_TITLE, identifier)


def has_timings(run: RunData) -> bool:
    """Whether any stage timing was logged."""
    return any(run.series(name)[0] for names in TIMINGS.values() for name in names)


def png(plots: Sequence[Plot], runs: Sequence[RunData], title: str) -> bytes:
    """All plots in one image on white, `title` above them."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with_timings = len(runs) == 1 and has_timings(runs[0])
    count = max(1, len(plots) + with_timings)
    columns = min(3, count)
    rows = math.ceil(count / columns)
    height = HEIGHT * rows + TITLE_HEIGHT
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(WIDTH * columns, height))
        FigureCanvasAgg(figure)
        figure.text(0.01, 1 - 0.3 * TITLE_HEIGHT / height, title, fontsize=12, va="top")
        ratios = [TITLE_HEIGHT, HEIGHT * rows]
        body = figure.subfigures(2, 1, height_ratios=ratios, squeeze=False)[1, 0]
        cells = body.subfigures(rows, columns, squeeze=False).ravel()
        for plot, cell in zip(plots, cells, strict=False):
            _draw_plot(cell, plot, runs, TOP_WITH_TITLE)
            cell.text(0.02, 0.99, plot.title, fontsize=10, weight="bold", va="top")
        if with_timings:
            cell = cells[len(plots)]
            _draw_timings(cell, runs[0], TOP_WITH_TITLE)
            cell.text(0.02, 0.99, TIMINGS_TITLE, fontsize=10, weight="bold", va="top")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110, facecolor="white")
    return buffer.getvalue()


def _svg(draw: Callable[[Figure], None], title: str, identifier: str) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_RC, "svg.hashsalt": identifier}):
        figure = Figure(figsize=(WIDTH, HEIGHT))
        FigureCanvasSVG(figure)
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), title, identifier)


def _inline(text: str, title: str, identifier: str) -> str:
    """Cut the document down to an element for HTML and make its colours variables."""
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    head = rf'<svg viewBox="\1" role="img" aria-label="{title}">'
    body = re.sub(r"<svg[^>]*?viewBox=\"([^\"]*)\"[^>]*>", head, body, count=1)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{identifier}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{identifier}-\1)", body)
    body = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{identifier}-\1"', body)
    body = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", body)
    for colour, variable in DARK_FOR_LIGHT.items():
        body = body.replace(colour, f"var(--{variable})")
    return body


def _draw_plot(figure: Figure | SubFigure, plot: Plot, runs: Sequence[RunData], top: float) -> None:
    shown = [panel for panel in plot.panels if _has_values(panel, runs)]
    heights = [2.2] + [1.0] * (len(shown) - 1)
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights).ravel()
    for panel, ax in zip(shown, axes, strict=True):
        _draw_panel(ax, panel, runs)
    _step_axis(axes[-1], runs)
    figure.subplots_adjust(**MARGINS, top=top)


def _has_values(panel: Panel, runs: Sequence[RunData]) -> bool:
    return any(run.series(curve.metric, curve.kind)[0] for curve in panel.curves for run in runs)


def _draw_panel(ax: Axes, panel: Panel, runs: Sequence[RunData]) -> None:
    several = len(runs) > 1
    drawn, shown = 0, ""
    for index, run in enumerate(runs):
        # Several runs: a colour per run, the first curve that has data; one run: one per curve.
        curves = _first_with_data(run, panel) if several else panel.curves
        for position, curve in enumerate(curves):
            colour = SERIES[(index if several else position) % len(SERIES)]
            # Legends leave out labels that start with an underscore.
            label = run.name.lstrip("_") if several else curve.label
            shown = curve.label
            drawn += _draw_curve(ax, run, curve, colour, label, band=not several)
    _limit_line(ax, panel, runs)
    ambiguous = several and len(panel.curves) > 1
    _label_y(ax, f"{panel.ylabel}: {shown}" if ambiguous else panel.ylabel)
    if panel.range is not None:
        low, high = panel.range
        margin = 0.04 * (high - low)
        ax.set_ylim(low - margin, high + margin)
    for step in runs[0].resumes() if not several else ():
        ax.axvline(step - 0.5, color=INK["axis"], linewidth=0.8, linestyle=":")
    if drawn > 1:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=min(drawn, 3),
                  borderaxespad=0.1, handlelength=1.4, columnspacing=1.2)  # fmt: skip


def _first_with_data(run: RunData, panel: Panel) -> tuple[Curve, ...]:
    ordered = sorted(panel.curves, key=lambda curve: curve.kind != "eval")
    return tuple(curve for curve in ordered if run.series(curve.metric, curve.kind)[0])[:1]


def _draw_curve(
    ax: Axes, run: RunData, curve: Curve, colour: str, label: str, *, band: bool
) -> int:
    steps, values = run.series(curve.metric, curve.kind)
    if not steps:
        return 0
    held_out = curve.kind == "eval"
    marker = "o" if held_out or len(steps) < MARKER_POINTS else None
    spread = _spread(run, curve, steps, values) if band else None
    if held_out and spread is not None:
        ax.errorbar(steps, values, yerr=spread, color=colour, fmt="none", capsize=2.5,
                    elinewidth=1.0)  # fmt: skip
    elif spread is not None:
        lower = [value - low for value, low in zip(values, spread[0], strict=True)]
        upper = [value + high for value, high in zip(values, spread[1], strict=True)]
        ax.fill_between(steps, lower, upper, color=colour, alpha=0.15, linewidth=0)
    ax.plot(steps, values, color=colour, label=label, marker=marker, markersize=4)
    return 1


def _spread(
    run: RunData, curve: Curve, steps: list[int], values: list[float]
) -> tuple[list[float], list[float]] | None:
    """Distances below and above each value; 0 where they were not logged."""
    if curve.bounds is not None:
        low, high = (dict(zip(*run.series(n, curve.kind), strict=True)) for n in curve.bounds)
        pairs = list(zip(steps, values, strict=True))
        below = [max(0.0, v - low[s]) if s in low else 0.0 for s, v in pairs]
        above = [max(0.0, high[s] - v) if s in high else 0.0 for s, v in pairs]
        return below, above
    if curve.spread is None:
        return None
    widths = dict(zip(*run.series(curve.spread, curve.kind), strict=True))
    found = [widths.get(step, 0.0) for step in steps]
    return found, found


def _limit_line(ax: Axes, panel: Panel, runs: Sequence[RunData]) -> None:
    limit: Any = runs[0].setting(panel.limit_key) if panel.limit_key else None
    # Far above the data the line would only squeeze the curve into the bottom.
    if isinstance(limit, int | float) and ax.get_ylim()[1] > 0.5 * limit:
        ax.axhline(limit, color=INK["alarm"], linestyle="--", linewidth=1.0)
        ax.annotate("alert limit", (0.99, limit), xycoords=("axes fraction", "data"), ha="right",
                    va="top", fontsize=8, color=INK["secondary"])  # fmt: skip


def _label_y(ax: Axes, label: str) -> None:
    ax.set_ylabel(label)
    ax.yaxis.set_label_coords(-0.125, 0.5)


def _step_axis(ax: Axes, runs: Sequence[RunData]) -> None:
    from matplotlib.ticker import MaxNLocator

    last = max(run.last_step for run in runs)
    margin = max(0.5, 0.015 * last)
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    # The same range in every plot, so that a step is found at the same place.
    ax.set_xlim(-margin, last + margin)


def _draw_timings(figure: Figure | SubFigure, run: RunData, top: float) -> None:
    ax = figure.subplots()
    steps = sorted({step for names in TIMINGS.values() for n in names for step in run.series(n)[0]})
    size = math.ceil(len(steps) / MAX_BARS)
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    bottom = [0.0] * len(groups)
    for index, (label, names) in enumerate(TIMINGS.items()):
        totals: dict[int, float] = {}
        for name in names:
            for step, value in zip(*run.series(name), strict=True):
                totals[step] = totals.get(step, 0.0) + (value if math.isfinite(value) else 0.0)
        if not totals:
            continue
        heights = [sum(totals.get(step, 0.0) for step in group) / len(group) for group in groups]
        ax.bar([sum(group) / len(group) for group in groups], heights, bottom=bottom,
               width=0.85 * size, color=SERIES[index % len(SERIES)], label=label)  # fmt: skip
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    _label_y(ax, "seconds / step")
    figure.subplots_adjust(**MARGINS, top=top)
    ax.grid(axis="x", visible=False)
    _step_axis(ax, [run])
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0.1,
              handlelength=1.0, columnspacing=1.0, fontsize=7.5, labelspacing=0.25)  # fmt: skip
