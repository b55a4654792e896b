"""Limits on metrics: which are passed, what follows, and what the user can do.

In: the metrics of a step and `config.monitor.alerts`. Out: one event per passed limit; the trainer
prints it or stops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from verl.config.schema import Alerts
from verl.monitor.glossary import GLOSSARY

#: Setting under monitor.alerts -> metric it watches.
ALERT_METRICS: dict[str, str] = {
    "sequence_kl": "kl/sequence_mean",
    "first_ratio": "policy/first_ratio_deviation",
}


@dataclass(frozen=True)
class AlertEvent:
    """A passed limit.

    Attributes:
        name: setting under monitor.alerts.
        metric: the metric that passed it.
        value: its value; may be NaN.
        limit: the configured limit.
        action: `warn` or `stop`.
        advice: what to do, from the glossary.
    """

    name: str
    metric: str
    value: float
    limit: float
    action: Literal["warn", "stop"]
    advice: str

    def message(self) -> str:
        """One line: what, by how much, what to do, and which setting rules it."""
        return (
            f"alert {self.name}: {self.metric} is {self.value:.4g}, limit {self.limit:g} "
            f"(monitor.alerts.{self.name}). {self.advice}"
        )


def check_alerts(metrics: Mapping[str, float], alerts_config: Alerts) -> list[AlertEvent]:
    """Return an event for each watched metric above its limit; a metric that is not there is not.

    NaN counts as above: a limit that cannot be shown to hold does not hold.
    """
    events = []
    for name, metric in ALERT_METRICS.items():
        alert = getattr(alerts_config, name)
        if metric not in metrics or metrics[metric] <= alert.limit:
            continue
        events.append(
            AlertEvent(
                name=name,
                metric=metric,
                value=float(metrics[metric]),
                limit=alert.limit,
                action=alert.action,
                advice=GLOSSARY[metric].advice,
            )
        )
    return events
