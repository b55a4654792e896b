"""KL controllers: refusals and bounds."""

from __future__ import annotations

import pytest

from verl.algorithms.controllers import AdaptiveKLController, FixedKLController


def test_fixed_coefficient_stays() -> None:
    controller = FixedKLController(0.05)
    controller.update(100.0, 64)
    assert controller.value == 0.05
    restored = FixedKLController(0.0)
    restored.load_state_dict(controller.state_dict())
    assert restored.value == 0.05


@pytest.mark.parametrize("coef", [-0.1, float("nan"), float("inf")])
def test_bad_coefficients_are_refused(coef: float) -> None:
    with pytest.raises(ValueError, match="coefficient"):
        FixedKLController(coef)
    with pytest.raises(ValueError, match="coefficient"):
        AdaptiveKLController(coef, 6.0, 100)


def test_a_batch_longer_than_the_horizon_moves_by_a_fifth_at_most() -> None:
    controller = AdaptiveKLController(1.0, target=6.0, horizon=10)
    controller.update(0.0, n_samples=1000)
    assert controller.value == pytest.approx(0.8)


def test_non_finite_kl_is_refused_and_changes_nothing() -> None:
    controller = AdaptiveKLController(1.0, target=6.0, horizon=10)
    with pytest.raises(ValueError, match="nan"):
        controller.update(float("nan"), 10)
    with pytest.raises(ValueError, match="-1 samples"):
        controller.update(1.0, -1)
    assert controller.value == 1.0
