"""Sums, means, variances and whitening over the valid entries of a tensor.

In: a tensor and a mask of the same shape. Out: statistics in which a masked entry, whatever it
holds (NaN, inf), takes no part: entries are selected with `where`, never multiplied by the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPS = 1e-8


def as_float(x: Tensor) -> Tensor:
    """Return `x` in at least float32: bf16, fp16 and integers become float32, float64 stays."""
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)


def select(x: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Return `x` (at least float32) where `mask` is non-zero and `fill` elsewhere.

    Filling before any other operation is what keeps NaN out of values and gradients: the
    derivative of a later operation at a NaN would be NaN, and 0 * NaN is NaN too.
    """
    return torch.where(mask.bool(), as_float(x), fill)


def masked_count(mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the number of non-zero entries of `mask`, int64, over all entries or along `dim`."""
    valid = mask.bool()
    return valid.sum() if dim is None else valid.sum(dim)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum of the valid entries of `x` over everything or along `dim`."""
    kept = select(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of the valid entries of `x` over everything or along `dim`.

    An empty mask gives 0, not NaN: a micro-batch without valid tokens must add nothing.
    """
    return masked_sum(x, mask, dim) / masked_count(mask, dim).clamp(min=1)


def masked_var(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the unbiased (n-1) variance of the valid entries; 0 for fewer than two of them."""
    count = masked_count(mask, dim)
    mean = masked_mean(x, mask, dim)
    if dim is not None:
        mean = mean.unsqueeze(dim)
    squares = masked_sum((select(x, mask) - mean).square(), mask, dim)
    return squares / (count - 1).clamp(min=1)


def masked_std(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the unbiased standard deviation of the valid entries; 0 for fewer than two."""
    return masked_var(x, mask, dim).sqrt()


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Return `x` scaled to variance 1 (unbiased) and mean 0 over its valid entries.

    Args:
        x: any shape; give the whole global batch, since the statistics are those of what is given.
        mask: same shape; entries at 0 are left out of the statistics and come back as 0.
        shift_mean: False adds the mean back, so that only the scale changes.

    Returns:
        Tensor of the shape of `x`. One valid entry, or valid entries that are all equal, give
        centred zeros (the mean itself with `shift_mean=False`).
    """
    valid = mask.bool()
    mean = masked_mean(x, mask)
    kept = select(x, mask)
    scaled = (kept - mean) * torch.rsqrt(masked_var(x, mask) + WHITEN_EPS)
    if x.numel() > 0:
        # Equal entries differ from their rounded mean by an ulp, which the small variance would
        # blow up to order one for large entries; comparing the entries themselves is exact.
        highest = torch.where(valid, kept, -torch.inf).amax()
        lowest = torch.where(valid, kept, torch.inf).amin()
        scaled = torch.where(highest > lowest, scaled, 0.0)
    return torch.where(valid, scaled if shift_mean else scaled + mean, 0.0)
