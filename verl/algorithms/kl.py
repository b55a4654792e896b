"""Per-token estimators of KL(policy || reference) from log-probs of sampled tokens.

In: log-probs of the policy and of the reference for the same tokens. Out: one estimate per token.
Source: J. Schulman, "Approximating KL divergence" (2020): k1, k2, k3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from verl.algorithms.masked import as_float, masked_sum, select

MAX_LOG_RATIO = 20.0

KLEstimator = Callable[[Tensor], Tensor]
KL_ESTIMATORS: dict[str, KLEstimator] = {}


def kl_estimator(*names: str) -> Callable[[KLEstimator], KLEstimator]:
    """Register a function of d = logprobs - ref_logprobs under `names`."""

    def register(function: KLEstimator) -> KLEstimator:
        for name in names:
            KL_ESTIMATORS[name] = function
        return function

    return register


@kl_estimator("k1")
def k1(log_ratio: Tensor) -> Tensor:
    """d: unbiased, may be negative."""
    return log_ratio


@kl_estimator("abs")
def absolute(log_ratio: Tensor) -> Tensor:
    """|d|."""
    return log_ratio.abs()


@kl_estimator("k2", "mse")
def k2(log_ratio: Tensor) -> Tensor:
    """d^2 / 2: biased, low variance, never negative."""
    return 0.5 * log_ratio.square()


@kl_estimator("k3")
def k3(log_ratio: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative.

    d is bounded below by -20 before exp: bounding the result would still send 0 * inf through
    the backward pass. No bound above is needed, exp(-d) only goes to 0 there.
    """
    bounded = log_ratio.clamp(min=-MAX_LOG_RATIO)
    # expm1 keeps the digits that exp(-d) - 1 cancels away near d = 0, where the rounded
    # difference could even be negative.
    return torch.expm1(-bounded) + bounded


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, kind: str, mask: Tensor | None = None
) -> Tensor:
    """Return the per-token KL estimate `kind`.

    Args:
        logprobs: (...) log-probs of the sampled tokens under the policy.
        ref_logprobs: (...) the same under the reference.
        kind: a key of `KL_ESTIMATORS`: k1, k2, k3, abs, mse (mse is k2).
        mask: (...) positions at 0 give 0 with gradient 0, whatever the inputs hold there.

    Returns:
        (...), at least float32.

    Raises:
        ValueError: `kind` is not registered.
    """
    if kind not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {kind!r}; use one of {sorted(KL_ESTIMATORS)}")
    if mask is not None:
        logprobs, ref_logprobs = select(logprobs, mask), select(ref_logprobs, mask)
    return KL_ESTIMATORS[kind](as_float(logprobs) - as_float(ref_logprobs))


def sequence_kl(kl: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over sequences of the summed per-token KL, (B, T) -> scalar.

    Rows without a valid token are left out. This is the KL that is logged and the one the
    adaptive controller is updated with.
    """
    rows = mask.bool().any(-1).sum().clamp(min=1)
    return masked_sum(kl, mask) / rows
