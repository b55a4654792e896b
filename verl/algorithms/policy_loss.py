"""Per-token policy losses and the registry they are chosen from.

In: new and old log-probs, advantages and mask of any one shape (a batch, or a flat chunk of
response tokens). Out: loss per token, not yet aggregated, with the flags that are logged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.masked import select

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """Result of a policy loss; every tensor has the shape of the inputs.

    Attributes:
        loss: per-token loss with gradient, 0 at masked positions.
        ratio: detached probability ratio new / old, 1 at masked positions.
        clipped: bool, the clipped term was strictly the smaller one.
        dual_clipped: bool, the dual clip bounded the loss.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    dual_clipped: Tensor


PolicyLossFunction = Callable[..., PolicyLoss]
POLICY_LOSSES: dict[str, PolicyLossFunction] = {}


def policy_loss(name: str) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Register a policy loss under `name`."""

    def register(function: PolicyLossFunction) -> PolicyLossFunction:
        POLICY_LOSSES[name] = function
        return function

    return register


@policy_loss("clipped")
def clipped(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), asymmetric, with optional dual clip.

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); where A < 0 the dual clip (Ye et al.
    2020, eq. 5) bounds it by -dual_clip * A.

    Args:
        logprobs: (...) log-probs under the policy being trained.
        old_logprobs: (...) log-probs under the policy that sampled; constants.
        advantages: (...) constants.
        mask: (...) positions at 0 give loss 0 and gradient 0, whatever the others hold there.
        clip_low: >= 0.
        clip_high: >= 0; larger than clip_low is "clip-higher" (DAPO, Yu et al. 2025, eq. 10).
        dual_clip: c > 1, or None for off.

    Raises:
        ValueError: a negative clip range, or dual_clip <= 1 (it would cut normal updates).
    """
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip range is ({clip_low}, {clip_high}); both sides must be >= 0")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip is {dual_clip}; it must be > 1 (3 is usual), or None for off")
    advantages = select(advantages.detach(), mask)
    log_ratio = select(logprobs, mask) - select(old_logprobs.detach(), mask)
    # Bounded before exp: an infinite ratio times the zero gradient of a clipped term is NaN.
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    surrogate = torch.minimum(plain, bounded)
    dual_clipped = torch.zeros_like(surrogate, dtype=torch.bool)
    if dual_clip is not None:
        floor = dual_clip * advantages
        dual_clipped = (advantages < 0) & (surrogate < floor).detach()
        surrogate = torch.where(dual_clipped, floor, surrogate)
    return PolicyLoss(-surrogate, ratio.detach(), (bounded < plain).detach(), dual_clipped)
