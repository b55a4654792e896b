"""Write the report files of a run, or of several runs compared.

In: run directories. Out: report.html and report.png in the run directory; for several runs
comparison.html and comparison.png in the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl.checkpoint.atomic import write_bytes_atomic, write_text_atomic
from verl.errors import ConfigError
from verl.monitor.report import draw
from verl.monitor.report.load import RunData, load_run
from verl.monitor.report.page import STAGE_TITLES, render_page, shared_plots
from verl.monitor.report.verdict import judge


def build_report(run_dirs: Sequence[Path] | Path) -> Path:
    """Build the report and return the path of its HTML file.

    Args:
        run_dirs: one run directory, or several of the same stage to compare.

    Raises:
        RunDirectoryError: a directory has no (or a damaged or empty) metrics.jsonl.
        ConfigError: none given, or runs of different stages.
    """
    directories = (
        [Path(run_dirs)] if isinstance(run_dirs, str | Path) else list(map(Path, run_dirs))
    )
    if not directories:
        raise ConfigError("no run directory given; name at least one")
    runs = [load_run(directory) for directory in directories]
    _require_one_stage(runs)
    stem = "report" if len(runs) == 1 else "comparison"
    target = runs[0].directory / f"{stem}.html"
    write_text_atomic(target, render_page(runs))
    if len(runs) == 1:
        title = f"{runs[0].name}: {judge(runs[0]).headline}"
    else:
        title = "  ·  ".join(run.name for run in runs)
    image = draw.png(shared_plots(runs), runs, title)
    write_bytes_atomic(target.with_suffix(".png"), image)
    return target


def _require_one_stage(runs: Sequence[RunData]) -> None:
    stages = {run.stage: run for run in runs}
    if len(stages) > 1:
        found = "; ".join(f"{run.directory} is {STAGE_TITLES[s]}" for s, run in stages.items())
        raise ConfigError(f"runs of different stages cannot be compared: {found}")
