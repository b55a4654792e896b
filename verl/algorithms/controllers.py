"""The KL coefficient over the run: fixed, or steered towards a target KL.

In: the mean sequence KL of each step and the number of samples it was taken over. Out: the
coefficient, and its state as plain numbers for a checkpoint.
"""

from __future__ import annotations

import math

MAX_ERROR = 0.2


class FixedKLController:
    """A coefficient that never changes; `update` only checks its arguments."""

    def __init__(self, coef: float) -> None:
        """Raises ValueError when `coef` is negative or not finite."""
        if not (math.isfinite(coef) and coef >= 0):
            raise ValueError(f"KL coefficient is {coef}; it must be a finite number >= 0")
        self.value = float(coef)

    def update(self, kl: float, n_samples: int) -> None:
        """Do nothing: the coefficient is fixed."""
        _check_update(kl, n_samples)

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient as {"value": float}."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned; raises KeyError when "value" is missing."""
        self.value = float(state["value"])


class AdaptiveKLController:
    """Proportional control of the log of the coefficient (Ziegler et al. 2019, §2.2).

    coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * min(n_samples / horizon, 1). The bound on
    n / horizon is ours: without it a batch of more than 5 horizons makes the coefficient negative.
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        """Take the first coefficient, the target sequence KL in nats and the horizon in samples.

        Raises:
            ValueError: one of the three is not a finite number > 0 (a coefficient of 0 could
                never move).
        """
        for name, number in (("coefficient", coef), ("target", target), ("horizon", horizon)):
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"adaptive KL {name} is {number}; it must be a finite number > 0")
        self.value = float(coef)
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, kl: float, n_samples: int) -> None:
        """Move the coefficient: up while `kl` is above the target, down while below.

        Args:
            kl: mean over sequences of the summed per-token KL, the one that is logged.
            n_samples: sequences since the last update (samples, not optimiser steps).

        Raises:
            ValueError: kl is not finite or n_samples is negative; the coefficient is unchanged.
        """
        _check_update(kl, n_samples)
        error = min(max(kl / self.target - 1.0, -MAX_ERROR), MAX_ERROR)
        self.value *= 1.0 + error * min(n_samples / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient as {"value": float}; target and horizon are configuration."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned; raises KeyError when "value" is missing."""
        self.value = float(state["value"])


def _check_update(kl: float, n_samples: int) -> None:
    if not math.isfinite(kl):
        raise ValueError(
            f"KL of this step is {kl}; the KL coefficient cannot follow it: "
            "look for non-finite log-probs of the actor or the reference"
        )
    if n_samples < 0:
        raise ValueError(f"KL update over {n_samples} samples; the number must be >= 0")
