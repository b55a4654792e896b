"""Every metric the product logs, with unit, meaning, formula, healthy range and what to do.

`MetricLog` refuses names that are not here, the report shows these texts as tooltips, and
`docs/metrics.md` is written from them: `python -m verl.monitor.glossary > docs/metrics.md`.
"""

from __future__ import annotations

import difflib
import sys

from verl.monitor import (
    glossary_evaluation,
    glossary_rewards,
    glossary_system,
    glossary_updates,
)
from verl.monitor.metric import Metric

__all__ = ["GLOSSARY", "Metric", "glossary_markdown", "unknown_metric_message"]

GLOSSARY: dict[str, Metric] = {
    entry.name: entry
    for entry in (
        *glossary_rewards.ENTRIES,
        *glossary_updates.ENTRIES,
        *glossary_evaluation.ENTRIES,
        *glossary_system.ENTRIES,
    )
}

_GROUPS = {
    "score": "Scores of the reward model",
    "reward": "Rewards that PPO is paid with",
    "kl": "Distance from the reference policy",
    "returns": "Returns",
    "advantages": "Advantages",
    "response": "Sampled responses",
    "rollout": "Agreement of sampler and trainer",
    "policy": "Actor updates",
    "value": "Critic updates",
    "sft": "Supervised fine-tuning",
    "rm": "Reward-model training",
    "eval": "Held-out evaluation",
    "time": "Seconds per stage",
    "throughput": "Throughput",
    "memory": "Memory",
    "data": "Data",
}

_INTRODUCTION = """\
# Metrics

Written from `verl/monitor/glossary.py`; edit there, then
`python -m verl.monitor.glossary > docs/metrics.md`.

Every line of `metrics.jsonl` in a run directory is one JSON object: `step`, `kind` (`train` or
`eval`), `segment` (0, one more after each resume), `time` (unix seconds), and the metrics below.
A value that was not finite is `null` and its name is listed in `non_finite`. Means over tokens are
weighted by token over the whole batch, whatever the micro-batches were.
"""


def unknown_metric_message(name: str) -> str:
    """Say that `name` has no glossary entry and which one was probably meant."""
    close = difflib.get_close_matches(name, GLOSSARY, n=1)
    guess = f"; did you mean {close[0]!r}?" if close else ""
    return (
        f"metric {name!r} is not in the glossary{guess} "
        "(add an entry in verl/monitor/glossary_*.py)"
    )


def glossary_markdown() -> str:
    """The text of docs/metrics.md: one section per group, one entry per metric."""
    parts = [_INTRODUCTION]
    for group, title in _GROUPS.items():
        parts.append(f"## {title}: `{group}/`\n")
        entries = [entry for entry in GLOSSARY.values() if entry.name.startswith(group + "/")]
        parts.extend(_entry_markdown(entry) for entry in entries)
    return "\n".join(parts)


def _entry_markdown(entry: Metric) -> str:
    unit = f" [{entry.unit}]" if entry.unit else ""
    return (
        f"### `{entry.name}`{unit}\n\n"
        f"{entry.meaning} Logged by: {', '.join(entry.stages)}.\n\n"
        f"- Formula: `{entry.formula}`\n"
        f"- Healthy: {entry.healthy}\n"
        f"- Otherwise: {entry.advice}\n"
    )


if __name__ == "__main__":
    sys.stdout.write(glossary_markdown())
