"""Losses of a reward model trained on pairs of answers.

In: scores of the chosen and of the rejected answers. Out: one loss per pair, float32.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from verl.algorithms.masked import as_float


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Return -log sigmoid(chosen - rejected - margin) per pair.

    Bradley & Terry (1952); margin as in Llama 2 (Touvron et al. 2023, eq. 2). Finite with a
    gradient of at most 1 for any gap.

    Args:
        chosen: (N,) scores.
        rejected: (N,) scores.
        margin: (N,) gap the chosen answer should win by; 0 when None.

    Returns:
        (N,), at least float32.
    """
    gap = as_float(chosen) - as_float(rejected)
    return -F.logsigmoid(gap if margin is None else gap - margin.to(gap))


def centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return (chosen + rejected)^2 per pair, (N,) -> (N,).

    The Bradley-Terry loss leaves the zero of the scores free; this regulariser, times a small
    coefficient, fixes it near the mean score (Eisenstein et al. 2023).
    """
    return (as_float(chosen) + as_float(rejected)).square()
