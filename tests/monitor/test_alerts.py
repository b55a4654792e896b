"""Limits on metrics."""

from __future__ import annotations

import math

import pytest

from verl.config.schema import Alert, Alerts
from verl.monitor.alerts import ALERT_METRICS, check_alerts
from verl.monitor.glossary import GLOSSARY


def test_nothing_fires_at_or_below_the_limits() -> None:
    metrics = {"kl/sequence_mean": 30.0, "policy/first_ratio_deviation": 0.0}
    assert check_alerts(metrics, Alerts()) == []


def test_metric_that_was_not_measured_does_not_fire() -> None:
    assert check_alerts({"score/mean": 1.0}, Alerts()) == []


def test_passed_limit_says_what_and_what_to_do() -> None:
    alerts = Alerts(sequence_kl=Alert(limit=5.0, action="stop"))
    (event,) = check_alerts({"kl/sequence_mean": 7.25}, alerts)
    assert (event.name, event.metric, event.value, event.limit, event.action) == (
        "sequence_kl", "kl/sequence_mean", 7.25, 5.0, "stop",
    )  # fmt: skip
    assert event.advice == GLOSSARY["kl/sequence_mean"].advice
    assert event.message().startswith(
        "alert sequence_kl: kl/sequence_mean is 7.25, limit 5 (monitor.alerts.sequence_kl). "
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_value_that_is_not_finite_fires(value: float) -> None:
    (event,) = check_alerts({"policy/first_ratio_deviation": value}, Alerts())
    assert event.name == "first_ratio" and event.action == "warn"


def test_every_configured_alert_watches_a_known_metric() -> None:
    assert set(ALERT_METRICS) == set(Alerts.model_fields)
    assert set(ALERT_METRICS.values()) <= set(GLOSSARY)
