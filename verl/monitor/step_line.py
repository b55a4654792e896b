"""One readable line per training step, from the metrics of that step.

In: step, planned steps, metrics of PPO, SFT or the reward model. Out: text; what was not measured
is left out. "step 12/40  score 1.23±0.80  KL 3.1  entropy 1.90  clip 4 %  len 31  ..."
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

Metrics = Mapping[str, float]

#: Stages named in the line's parentheses -> metrics summed for them.
STAGES: dict[str, tuple[str, ...]] = {
    "rollout": ("time/rollout",),
    "score": ("time/score",),
    "forward": ("time/old_logprobs", "time/reference", "time/values", "time/advantages"),
    "update": ("time/update_critic", "time/update_actor"),
    "evaluate": ("time/evaluate",),
    "save": ("time/save",),
}


def step_line(
    step: int, total: int, metrics: Metrics, *, seconds_per_step: float | None = None
) -> str:
    """Describe one step.

    Args:
        step: number of the step just finished.
        total: planned steps.
        metrics: its metrics by glossary name.
        seconds_per_step: pace for the remaining time; default: this step's duration.
    """
    parts = [f"step {step}/{total}"]
    parts.extend(text for text in (part(metrics) for part in _PARTS) if text)
    if (seconds := metrics.get("time/step")) is not None:
        parts.append(f"{seconds:.1f} s{_stages(metrics)}")
    pace = seconds_per_step if seconds_per_step is not None else metrics.get("time/step")
    if pace is not None and total > step:
        parts.append(f"eta {duration(pace * (total - step))}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as `42s`, `9m`, `1h05m` or `2d03h`; `?` when not finite."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes}m"
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def _plain(label: str, name: str, form: str = ".2f") -> Callable[[Metrics], str]:
    def part(metrics: Metrics) -> str:
        value = metrics.get(name)
        return "" if value is None else f"{label} {value:{form}}"

    return part


def _percent(label: str, name: str) -> Callable[[Metrics], str]:
    def part(metrics: Metrics) -> str:
        value = metrics.get(name)
        if value is None:
            return ""
        return f"{label} {100 * value:.0f} %" if math.isfinite(value) else f"{label} {value}"

    return part


def _spread(label: str, mean: str, deviation: str) -> Callable[[Metrics], str]:
    def part(metrics: Metrics) -> str:
        if mean not in metrics:
            return ""
        spread = f"±{metrics[deviation]:.2f}" if deviation in metrics else ""
        return f"{label} {metrics[mean]:.2f}{spread}"

    return part


def _skipped(metrics: Metrics) -> str:
    count = metrics.get("policy/skipped_steps", 0) + metrics.get("value/skipped_steps", 0)
    return f"SKIPPED {count:.0f}" if count else ""


def _stages(metrics: Metrics) -> str:
    shown = []
    for label, names in STAGES.items():
        present = [metrics[name] for name in names if name in metrics]
        if present and sum(present) >= 0.05:
            shown.append(f"{label} {sum(present):.1f}")
    return f" ({' '.join(shown)})" if shown else ""


_PARTS: tuple[Callable[[Metrics], str], ...] = (
    _plain("loss", "sft/loss", ".4f"),
    _plain("perplexity", "sft/perplexity"),
    _plain("tokens", "sft/tokens", ".0f"),
    _plain("loss", "rm/loss", ".4f"),
    _percent("accuracy", "rm/accuracy"),
    _plain("margin", "rm/margin_mean"),
    _spread("score", "score/mean", "score/std"),
    _plain("KL", "kl/sequence_mean"),
    _plain("entropy", "policy/entropy"),
    _percent("clip", "policy/clip_fraction"),
    _plain("len", "response/length_mean", ".0f"),
    _percent("finished", "response/finished_fraction"),
    _plain("EV", "value/explained_variance"),
    _skipped,
    _plain("grad", "sft/grad_norm"),
    _plain("grad", "rm/grad_norm"),
    _plain("lr", "sft/lr", ".2g"),
    _plain("lr", "rm/lr", ".2g"),
    _spread("held-out greedy", "eval/score_greedy_mean", "eval/score_greedy_ci95"),
    _spread("sampled", "eval/score_sampled_mean", "eval/score_sampled_ci95"),
    _percent("win rate", "eval/win_rate"),
    _plain("held-out loss", "eval/loss", ".4f"),
    _percent("held-out accuracy", "eval/accuracy"),
)
