"""Put the page together: verdict, figures, settings, plots, answers, table.

In: one or several runs. Out: the HTML text. It holds no script and loads nothing; a content
security policy says so to the browser as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.monitor.glossary import GLOSSARY
from verl.monitor.report import draw
from verl.monitor.report.load import RunData
from verl.monitor.report.plots import Plot, plots_for
from verl.monitor.report.samples import samples_section
from verl.monitor.report.style import stylesheet
from verl.monitor.report.text import escape, metric_name, number
from verl.monitor.report.verdict import Verdict, judge
from verl.monitor.step_line import duration

STAGE_TITLES = {"ppo": "PPO", "sft": "Supervised fine-tuning", "rm": "Reward model"}
LEVEL_WORDS = {"good": "good", "warning": "check", "bad": "problem", "info": "note"}

_SHARED = (
    "model.actor.pretrained_path", "data.train", "data.eval", "data.batch_size",
    "data.seq_length", "train.seed", "train.num_epochs", "train.total_steps",
)  # fmt: skip
#: Settings shown in the summary, per stage.
SETTINGS = {
    "ppo": (
        *_SHARED, "model.reward_model.pretrained_path", "model.critic.pretrained_path",
        "data.response_length", "rollout.temperature", "train.ppo.actor_lr",
        "train.ppo.critic_lr", "train.ppo.epochs", "train.ppo.minibatch_size",
        "train.ppo.clip_epsilon", "train.ppo.kl_coef", "train.ppo.kl_controller",
        "train.ppo.kl_estimator", "train.ppo.gamma", "train.ppo.lam",
        "train.ppo.normalize_reward", "train.ppo.missing_eos_penalty", "eval.num_prompts",
    ),
    "sft": (*_SHARED, "train.sft.lr", "train.sft.lr_schedule", "train.sft.train_on"),
    "rm": (
        "model.reward_model.pretrained_path", *_SHARED[1:], "train.reward_model.lr",
        "train.reward_model.lr_schedule", "train.reward_model.centering_coef",
    ),
}  # fmt: skip


def render_page(runs: Sequence[RunData]) -> str:
    """The whole document."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    if len(runs) == 1:
        body = _run(runs[0], "r0")
    else:
        body = _comparison(runs) + "".join(
            f'<details class="block"><summary>{escape(run.name)} in full</summary>'
            f"{_run(run, f'r{index}')}</details>"
            for index, run in enumerate(runs)
        )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} – verl report</title><style>{stylesheet()}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _run(run: RunData, identifier: str) -> str:
    return (
        _header(run)
        + _verdict(judge(run))
        + _tiles(run)
        + _settings(run)
        + _plots(run, identifier)
        + (samples_section(run.samples, run.samples_step) if _has_answers(run) else "")
        + _table(run)
    )


def _has_answers(run: RunData) -> bool:
    return run.stage == "ppo" or run.samples_step is not None


def _header(run: RunData) -> str:
    total = run.setting("train.total_steps")
    of = f" of {total}" if isinstance(total, int) else ""
    resumes = run.resumes()
    resumed = f"; resumed before step {', '.join(map(str, resumes))}" if resumes else ""
    notes = "".join(f'<p class="sub small">{escape(note)}</p>' for note in run.notes)
    return (
        f"<h1>{escape(run.name)}</h1><p class='sub'>{STAGE_TITLES[run.stage]} · "
        f"{run.last_step}{escape(of)} steps logged{escape(resumed)}</p>{notes}"
    )


def _verdict(verdict: Verdict) -> str:
    items = "".join(
        f'<li><span class="level {finding.level}">{LEVEL_WORDS[finding.level]}</span>'
        f"<span>{escape(finding.text)}</span></li>"
        for finding in verdict.findings
    )
    findings = f"<ul>{items}</ul>" if items else ""
    return (
        f'<section class="card verdict {verdict.level}">'
        f'<p class="headline">{escape(verdict.headline)}</p>{findings}</section>'
    )


#: Figures on top of the page, per stage: label, metric.
TILES = {
    "ppo": (
        ("held-out score, sampled", "eval/score_sampled_mean"),
        ("win rate vs. start policy", "eval/win_rate"),
        ("KL per response [nats]", "kl/sequence_mean"),
        ("entropy [nats / token]", "policy/entropy"),
        ("explained variance", "value/explained_variance"),
        ("response length [tokens]", "response/length_mean"),
    ),
    "sft": (
        ("training loss", "sft/loss"),
        ("held-out loss", "eval/loss"),
        ("held-out perplexity", "eval/perplexity"),
    ),
    "rm": (
        ("held-out accuracy", "eval/accuracy"),
        ("training accuracy", "rm/accuracy"),
        ("training loss", "rm/loss"),
        ("length bias", "eval/length_bias"),
    ),
}


def _tiles(run: RunData) -> str:
    tiles = []
    for label, name in TILES[run.stage]:
        values = run.series(name)[1]
        if values:
            start = f'<span class="from">{number(values[0])} →</span> ' if len(values) > 1 else ""
            tiles.append((metric_name(name, label), start + number(values[-1])))
    seconds = [value for value in run.series("time/step", "train")[1] if value == value]
    if seconds:
        tiles.append(
            (metric_name("time/step", "mean step"), f"{number(sum(seconds) / len(seconds))} s")
        )
        tiles.append(("all steps", duration(sum(seconds))))
    cells = "".join(
        f'<div class="card tile"><div class="value">{value}</div>'
        f'<div class="label">{label}</div></div>'
        for label, value in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def _settings(run: RunData) -> str:
    if not run.config_text:
        return ""
    shown = [(key, run.setting(key)) for key in SETTINGS[run.stage]]
    rows = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>"
        for key, value in shown
        if value is not None
    )
    return (
        f'<h2>Settings</h2><section class="card"><dl class="settings">{rows}</dl>'
        '<details class="block"><summary>The whole configuration</summary>'
        f"<pre>{escape(run.config_text)}</pre></details></section>"
    )


def _plots(run: RunData, identifier: str) -> str:
    figures = [
        _figure(
            plot.title,
            plot.caption,
            _logged(plot, [run]),
            draw.svg(plot, [run], f"{identifier}-{plot.key}"),
        )
        for plot in plots_for(run)
    ]
    if draw.has_timings(run):
        metrics = [name for name in GLOSSARY if name.startswith("time/") and run.series(name)[0]]
        figures.append(
            _figure("Seconds per step", "Where the time goes, stage by stage.", metrics,
                    draw.timings_svg(run, f"{identifier}-timings"))
        )  # fmt: skip
    return f'<h2>Curves</h2><section class="plots">{"".join(figures)}</section>' if figures else ""


def _logged(plot: Plot, runs: Sequence[RunData]) -> list[str]:
    return [name for name in plot.metrics() if any(run.series(name)[0] for run in runs)]


def _figure(title: str, caption: str, metrics: Sequence[str], image: str) -> str:
    chips = "".join(metric_name(name) for name in metrics)
    return (
        f'<figure class="card"><figcaption><h3>{escape(title)}</h3>'
        f'<p class="sub">{escape(caption)}</p></figcaption>{image}'
        f'<div class="chips">{chips}</div></figure>'
    )


def _last_values(run: RunData) -> dict[str, tuple[Any, int]]:
    """Each metric of the last train and eval record, with the step it is from."""
    values: dict[str, tuple[Any, int]] = {}
    for records in (run.train, run.eval):
        if not records:
            continue
        record = records[-1]
        non_finite = record.get("non_finite", [])
        for name, value in record.items():
            if "/" in name:
                shown = "not finite" if name in non_finite else value
                values[name] = (shown, record["step"])
    return values


def _table(run: RunData) -> str:
    values = _last_values(run)
    order = {name: index for index, name in enumerate(GLOSSARY)}
    rows = "".join(
        _table_row(name, *values[name])
        for name in sorted(values, key=lambda name: (order.get(name, len(order)), name))
    )
    return (
        '<h2>All metrics of the last step</h2><section class="card scroll"><table><thead><tr>'
        "<th>metric</th><th style='text-align:right'>value</th><th>unit</th><th>step</th>"
        f"<th>healthy</th></tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _table_row(name: str, value: Any, step: int) -> str:
    entry = GLOSSARY.get(name)
    unit, healthy = (entry.unit, entry.healthy) if entry else ("", "")
    shown = value if isinstance(value, str) else number(value)
    return (
        f'<tr><td class="name">{metric_name(name)}</td><td class="number">{escape(shown)}</td>'
        f"<td>{escape(unit)}</td><td>{step}</td><td>{escape(healthy)}</td></tr>"
    )


def _comparison(runs: Sequence[RunData]) -> str:
    verdicts = "".join(f"<h2>{escape(run.name)}</h2>{_verdict(judge(run))}" for run in runs)
    figures = "".join(
        _figure(
            plot.title, plot.caption, _logged(plot, runs), draw.svg(plot, runs, f"all-{plot.key}")
        )
        for plot in shared_plots(runs)
    )
    return (
        f"<h1>{len(runs)} runs compared</h1>{verdicts}"
        f'<h2>Curves</h2><section class="plots">{figures}</section>'
    )


def shared_plots(runs: Sequence[RunData]) -> list[Plot]:
    """Plots that at least one of the runs can fill, each once."""
    found = {
        plot.key: plot for run in runs if run.stage == runs[0].stage for plot in plots_for(run)
    }
    return list(found.values())
