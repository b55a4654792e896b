"""From per-token losses to one loss, and from per-batch metrics to one number.

In: a mask and the counts of the WHOLE optimiser batch. Out: a weight per token, so that the loss
is sum(loss * weight) however the batch is cut into micro-batches or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from verl.algorithms.masked import masked_count, select

Count = int | float | Tensor
WeightFunction = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
AGGREGATIONS: dict[str, WeightFunction] = {}


def aggregation(name: str) -> Callable[[WeightFunction], WeightFunction]:
    """Register a function (mask, total_tokens, total_sequences, max_length) -> weights (B, T)."""

    def register(function: WeightFunction) -> WeightFunction:
        AGGREGATIONS[name] = function
        return function

    return register


@aggregation("token-mean")
def _token_mean(mask: Tensor, tokens: Tensor, sequences: Tensor, max_length: int | None) -> Tensor:
    return mask / tokens


@aggregation("seq-mean-token-sum")
def _seq_mean_token_sum(
    mask: Tensor, tokens: Tensor, sequences: Tensor, max_length: int | None
) -> Tensor:
    return mask / sequences


@aggregation("seq-mean-token-mean")
def _seq_mean_token_mean(
    mask: Tensor, tokens: Tensor, sequences: Tensor, max_length: int | None
) -> Tensor:
    return mask / (mask.sum(-1, keepdim=True).clamp(min=1) * sequences)


@aggregation("seq-mean-token-sum-norm")
def _seq_mean_token_sum_norm(
    mask: Tensor, tokens: Tensor, sequences: Tensor, max_length: int | None
) -> Tensor:
    if max_length is None or max_length < 1:
        raise ValueError(
            f"seq-mean-token-sum-norm got max_length {max_length}; give the "
            "configured response length (>= 1), it is the divisor"
        )
    return mask / (sequences * max_length)


def token_weights(
    mask: Tensor,
    mode: str,
    total_tokens: Count | None = None,
    total_sequences: Count | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Return the weight of every token in the loss of the whole optimiser batch.

    Args:
        mask: (B, T) response mask of the rows at hand. seq-mean-token-mean needs whole rows.
        mode: a key of `AGGREGATIONS`.
        total_tokens: valid tokens in the optimiser batch, over all micro-batches and ranks; those
            of `mask` when None.
        total_sequences: rows with at least one valid token, counted likewise.
        max_length: configured response length, for seq-mean-token-sum-norm only.

    Returns:
        (B, T) float32, 0 at masked positions; all 0 when the optimiser batch is empty.

    Raises:
        ValueError: unknown mode, or max_length missing where the mode needs it.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown loss aggregation {mode!r}; use one of {sorted(AGGREGATIONS)}")
    tokens = masked_count(mask) if total_tokens is None else total_tokens
    sequences = mask.bool().any(-1).sum() if total_sequences is None else total_sequences
    # At least 1: an empty batch has only zero weights, and 0 / 0 must not make them NaN.
    token_count = torch.as_tensor(tokens, device=mask.device).clamp(min=1)
    sequence_count = torch.as_tensor(sequences, device=mask.device).clamp(min=1)
    weights = AGGREGATIONS[mode]
    return weights(mask.bool().to(torch.float32), token_count, sequence_count, max_length)


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    total_tokens: Count | None = None,
    total_sequences: Count | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Return the share of `loss` (B, T) in the loss of the whole optimiser batch, a scalar.

    Shares of micro-batches and ranks add up to the loss of the batch when the totals are given
    (where ranks AVERAGE their gradients, multiply the share by their number). A batch that is all
    masked gives 0 with a gradient of exactly 0, still part of the graph. Arguments and errors as
    for `token_weights`.
    """
    weights = token_weights(mask, mode, total_tokens, total_sequences, max_length)
    return (select(loss, mask) * weights).sum()


def pool(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean of metrics taken over parts of a batch.

    Args:
        values: mean of the metric in each part (micro-batch, rank).
        weights: what each was taken over, usually valid tokens. A part of weight 0 is left out,
            whatever its value (the mean of nothing may be NaN).

    Returns:
        The mean over everything, 0.0 when all weights are 0.

    Raises:
        ValueError: unequal lengths or a negative weight.
    """
    if len(values) != len(weights):
        raise ValueError(
            f"{len(values)} metric values but {len(weights)} weights; each part needs one of both"
        )
    if any(weight < 0 for weight in weights):
        raise ValueError(f"metric weights {list(weights)} contain a negative count")
    total = sum(weights)
    parts = (v * w for v, w in zip(values, weights, strict=True) if w > 0)
    return sum(parts) / total if total > 0 else 0.0
