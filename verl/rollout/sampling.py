"""Drawing tokens from logits: pure functions of tensors, exact at the edges.

In: next-token logits (B, V) and one uniform number per row. Out: token ids (B,) and their
log-probabilities. B samples, V vocabulary (of the model, which may be padded beyond the
tokenizer's).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl.rollout.base import SamplingParams

# Width of the blocks in which the inverse CDF looks for a token. Summing blocks first needs
# one pass over the vocabulary and float64 cumulative sums of only V / 256 + 256 numbers.
_BLOCK = 256

# How many of the most likely tokens top-p looks at before it sorts the vocabulary.
_NUCLEUS = 1024


class UnusableLogitsError(ValueError):
    """The logits of one row allow no token; `row` is its place in the batch."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


def uniforms(seed: int, n: int) -> np.ndarray:
    """Return draws 0..n-1 of the uniform stream of `seed`, float64 (n,) in [0, 1).

    The stream is Philox (Salmon et al. 2011) keyed by the seed, so draw t does not depend on n.

    Raises:
        ValueError: the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    return np.random.Generator(np.random.Philox(key=seed)).random(n)


def sampling_logits(logits: Tensor, temperature: float, vocab_size: int) -> Tensor:
    """Return float32 logits of the full distribution after temperature, (B, V).

    Ids >= `vocab_size` are rows that pad the embedding beyond the tokenizer: they get -inf, so
    they can neither be drawn nor take probability. At temperature 0 (greedy) the logits are
    left untempered: that is the distribution whose log-probabilities are reported.

    Raises:
        ValueError: the temperature is negative, or `vocab_size` exceeds V.
    """
    if temperature < 0:
        raise ValueError(f"temperature must be >= 0, got {temperature}")
    width = logits.shape[-1]
    if not 0 < vocab_size <= width:
        raise ValueError(f"vocab_size must be in 1..{width} (the logits' width), got {vocab_size}")
    scaled = logits.float()
    if temperature not in (0, 1):
        scaled = scaled / temperature
    if vocab_size < width:
        padding = torch.arange(width, device=scaled.device) >= vocab_size
        scaled = scaled.masked_fill(padding, -torch.inf)
    return scaled


def filter_top_k_top_p(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set all but the most likely tokens to -inf: top-k first, then top-p of what is left.

    Top-k keeps the k most likely tokens. Top-p keeps a token when the probability (renormalised
    after top-k) of all tokens more likely than it is below `top_p`, so at least one (the nucleus
    of Holtzman et al. 2020). Both keep all tokens that are equal to the last one kept: which of
    them goes would otherwise depend on a sort.
    """
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        logits = logits.masked_fill(logits < _nucleus_floor(logits, top_p), -torch.inf)
    return logits


def _nucleus_floor(logits: Tensor, top_p: float) -> Tensor:
    """Return the logit (B, 1) of the least likely token that top-p keeps.

    The nucleus is nearly always among the first few tokens, and finding those costs a quarter of
    sorting the vocabulary, which is done only when they do not suffice.
    """
    log_normaliser = logits.double().logsumexp(dim=-1, keepdim=True)
    for size in (min(_NUCLEUS, logits.shape[-1]), logits.shape[-1]):
        ordered = logits.topk(size, dim=-1).values
        reached = (ordered - log_normaliser).exp().cumsum(dim=-1) >= top_p
        if bool(reached[:, -1].all()):
            break
    # Rounding can leave the whole sum below top_p: then every token stays.
    reached[:, -1] = True
    return ordered.gather(-1, reached.int().argmax(dim=-1, keepdim=True))


def sample_inverse_cdf(probs: Tensor, draws: Tensor) -> Tensor:
    """Return ids (B,) int64: the first id whose cumulative probability exceeds u times the total.

    Args:
        probs: non-negative weights (B, V); they need not sum to one.
        draws: float64 (B,) in [0, 1).

    An id of zero weight is never returned, at u = 0 and at the largest u below 1 neither.

    Raises:
        UnusableLogitsError: a row has no positive finite total.
    """
    batch, width = probs.shape
    padded = torch.nn.functional.pad(probs, (0, -width % _BLOCK))
    blocks = padded.view(batch, -1, _BLOCK)
    block_cdf = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    total = block_cdf[:, -1]
    if not bool(((total > 0) & total.isfinite()).all()):
        row = int((~((total > 0) & total.isfinite())).nonzero()[0])
        raise UnusableLogitsError(row, f"row {row}: probabilities sum to {float(total[row])}")
    target = draws.to(total) * total
    block, rows = _first_above(block_cdf, target), torch.arange(batch, device=total.device)
    below = torch.where(block > 0, block_cdf[rows, (block - 1).clamp(min=0)], 0.0)
    inside_cdf = blocks[rows, block].double().cumsum(dim=-1)
    return block * _BLOCK + _first_above(inside_cdf, target - below)


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """Return the first index where the cumulative sum exceeds the target, and has grown.

    Rounding can put the target at or above the last sum; the last index at which the sum still
    grew is then the answer, so an entry of zero weight is never chosen.
    """
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous()).squeeze(-1)
    index = torch.searchsorted(cdf, target[:, None].clamp(min=0), right=True).squeeze(-1)
    return torch.minimum(index, last)


def draw(
    logits: Tensor,
    params: SamplingParams,
    draws: Tensor,
    vocab_size: int,
    banned_ids: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: raw next-token logits (B, V), any float dtype.
        draws: float64 (B,), one draw per row; unused at temperature 0.
        banned_ids: ids that must not be drawn now (stop ids before `min_tokens`).

    Returns:
        ids (B,) int64 and log-probs (B,) float32. The log-probs are those of the full
        distribution after temperature: banned ids, top-k and top-p change what is drawn,
        never the log-prob, so that training re-scores the same number from ids alone.

    Raises:
        UnusableLogitsError: a row holds NaN or infinity (or, when sampling, only banned ids).
    """
    full = sampling_logits(logits, params.temperature, vocab_size)
    log_normaliser = full.logsumexp(dim=-1)
    if not bool(log_normaliser.isfinite().all()):
        row = int((~log_normaliser.isfinite()).nonzero()[0])
        raise UnusableLogitsError(row, f"row {row}: the logits hold NaN or infinity")
    allowed = full
    if banned_ids:
        columns = torch.tensor(list(banned_ids), device=full.device)
        allowed = full.index_fill(-1, columns, -torch.inf)
    if params.temperature == 0:
        ids = allowed.argmax(dim=-1)
    else:
        allowed = filter_top_k_top_p(allowed, params.top_k, params.top_p)
        ids = sample_inverse_cdf(allowed.softmax(dim=-1), draws)
    chosen = full.gather(-1, ids[:, None]).squeeze(-1)
    return ids, chosen - log_normaliser
