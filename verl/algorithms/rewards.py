"""From one score per response to one reward per token.

In: raw scores (B,), per-token KL and mask (B, T), finish flags, lengths. Out: shaped scores (B,)
or token rewards (B, T); nothing is written in place, so the raw score and KL stay loggable.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from verl.algorithms.masked import as_float, select


def token_rewards(
    score: Tensor, kl: Tensor, mask: Tensor, beta: float, score_clip: float | None = None
) -> Tensor:
    """Return -beta * kl per valid token, with the score added once, at the last valid token.

    Args:
        score: (B,) score of each response.
        kl: (B, T) per-token KL estimate.
        mask: (B, T) response mask; a row without valid tokens gets no reward anywhere.
        beta: KL coefficient.
        score_clip: bound on |score|, applied to the score alone, before the KL is subtracted.

    Returns:
        (B, T), at least float32, 0 outside the mask.
    """
    valid = mask.bool()
    remaining = valid.flip(-1).cumsum(-1).flip(-1)
    is_last = valid & (remaining == 1)
    score = as_float(score)
    if score_clip is not None:
        score = score.clamp(-score_clip, score_clip)
    return torch.where(is_last, score.unsqueeze(-1), 0.0) - beta * select(kl, mask)


def missing_eos_penalty(
    score: Tensor,
    finished: Tensor,
    penalty: float,
    mode: Literal["subtract", "replace"] = "subtract",
) -> Tensor:
    """Penalise responses that did not end by themselves.

    Args:
        score: (B,).
        finished: (B,) bool, from the engine's finish reason.
        penalty: >= 0. `subtract`: score - penalty; `replace`: the score becomes -penalty.
        mode: see `penalty`.

    Returns:
        (B,) scores; those of finished responses are unchanged.

    Raises:
        ValueError: negative penalty or unknown mode.
    """
    if penalty < 0:
        raise ValueError(
            f"missing-EOS penalty is {penalty}; give it as a number >= 0, "
            "it is subtracted from the score"
        )
    score = as_float(score)
    if mode == "subtract":
        penalised = score - penalty
    elif mode == "replace":
        penalised = torch.full_like(score, -penalty)
    else:
        raise ValueError(f"unknown missing-EOS mode {mode!r}; use 'subtract' or 'replace'")
    return torch.where(finished.bool(), score, penalised)


def overlong_penalty(
    score: Tensor, lengths: Tensor, max_length: int, buffer: int, penalty: float
) -> Tensor:
    """Subtract a penalty that grows linearly over the last `buffer` tokens before `max_length`.

    Soft overlong punishment, DAPO (Yu et al. 2025) eq. 13, scaled by `penalty`: 0 up to
    max_length - buffer tokens, the whole of it from max_length on.

    Args:
        score: (B,).
        lengths: (B,) response lengths in tokens.
        max_length: response length limit.
        buffer: 1..max_length tokens.
        penalty: >= 0.

    Raises:
        ValueError: buffer outside 1..max_length, or a negative penalty.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(
            f"overlong buffer is {buffer}; it must be between 1 and the response "
            f"length {max_length}"
        )
    if penalty < 0:
        raise ValueError(f"overlong penalty is {penalty}; give it as a number >= 0")
    excess = as_float(lengths) - (max_length - buffer)
    return as_float(score) - penalty * (excess / buffer).clamp(0.0, 1.0)


def normalize_scores(score: Tensor, mean: float, std: float) -> Tensor:
    """Return (score - mean) / std; a std of 0 only centres.

    Raises:
        ValueError: mean or std is not finite, or std is negative.
    """
    if not (math.isfinite(mean) and math.isfinite(std)) or std < 0:
        raise ValueError(
            f"scores cannot be normalised with mean {mean} and std {std}; "
            "both must be finite and std >= 0"
        )
    centred = as_float(score) - mean
    return centred / std if std > 0 else centred


class RunningMoments:
    """Count, mean and variance of everything seen so far, in float64.

    Parallel update of Chan, Golub & LeVeque (1979); the order of batches changes the result only
    by rounding. `std` is unbiased, and 0 until two values were seen.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    @property
    def std(self) -> float:
        """Unbiased standard deviation of the values seen."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values: Tensor) -> None:
        """Add `values` (any shape).

        Raises:
            ValueError: a value is NaN or infinite; the moments are unchanged.
        """
        batch = values.detach().to(torch.float64).flatten()
        if batch.numel() == 0:
            return
        bad = int((~batch.isfinite()).sum())
        if bad:
            raise ValueError(
                f"{bad} of {batch.numel()} scores are NaN or infinite; they would "
                "stay in the running statistics for ever: check the reward source"
            )
        size = batch.numel()
        batch_mean = float(batch.mean())
        total = self.count + size
        shift = batch_mean - self.mean
        self._squares += float((batch - batch_mean).square().sum())
        self._squares += shift * shift * self.count * size / total
        self.mean += shift * size / total
        self.count = total

    def state_dict(self) -> dict[str, float]:
        """Return the moments as plain numbers, for a JSON checkpoint."""
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            KeyError: an entry is missing.
        """
        self.count = int(state["count"])
        self.mean = float(state["mean"])
        self._squares = float(state["squares"])
