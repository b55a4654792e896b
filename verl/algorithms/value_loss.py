"""Per-token loss of the critic.

In: new values, the values of the rollout and the returns, of any one shape. Out: loss per token
in float32, not yet aggregated, with the flag that is logged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.masked import as_float, select


@dataclass(frozen=True)
class ValueLoss:
    """Result of the value loss; both tensors have the shape of the inputs.

    Attributes:
        loss: per-token loss with gradient.
        clipped: bool, the clipped term was strictly the larger one.
    """

    loss: Tensor
    clipped: Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    clip: float | None = None,
    mask: Tensor | None = None,
) -> ValueLoss:
    """Half the squared error; with `clip`, the larger of the plain and the clipped one.

    0.5 * max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2): pessimistic, so a value that ran
    far from the old one gets no reward for it.

    Args:
        values: (...) values being trained; half precision is raised to float32.
        old_values: (...) values of the rollout; constants.
        returns: (...) targets; constants.
        clip: c >= 0, or None for the plain squared error.
        mask: (...) positions at 0 give loss 0 and gradient 0, whatever the others hold there.

    Raises:
        ValueError: clip is negative.
    """
    if clip is not None and clip < 0:
        raise ValueError(f"value clip range is {clip}; it must be >= 0, or None for off")
    old_values, returns = old_values.detach(), returns.detach()
    if mask is not None:
        values, old_values, returns = (select(x, mask) for x in (values, old_values, returns))
    values, old_values, returns = as_float(values), as_float(old_values), as_float(returns)
    plain = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    near = values.clamp(old_values - clip, old_values + clip)
    bounded = (near - returns).square()
    return ValueLoss(0.5 * torch.maximum(plain, bounded), (bounded > plain).detach())
