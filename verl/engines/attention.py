"""Attention over packed sequences: several rows in one line of tokens, no padding computed.

Registered with transformers under the name `verl_packed`. Called with `packed_lengths`, it runs
each sequence by itself, so nothing of size (tokens x tokens) over the pack is made. Called without,
as in generation, it is transformers' sdpa attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "verl_packed"

# transformers builds masks before the layers see their keyword arguments, so the mask function
# learns by this variable that a pack needs none.
_packing: ContextVar[bool] = ContextVar("verl_packing", default=False)


@contextmanager
def packing() -> Iterator[None]:
    """While active, no attention mask is made: `packed_lengths` says which tokens belong together."""
    token = _packing.set(True)
    try:
        yield
    finally:
        _packing.reset(token)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packed_lengths: Sequence[int] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of a pack.

    Args:
        query: (1, heads, S, head size); `key` and `value` may have fewer heads.
        packed_lengths: lengths of the sequences, summing to S; None for ordinary sdpa.

    Returns:
        (1, S, heads, head size) and None.
    """
    if packed_lengths is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for q, k, v in zip(
        query.split(packed_lengths, dim=2),
        key.split(packed_lengths, dim=2),
        value.split(packed_lengths, dim=2),
        strict=True,
    ):
        window = _window_mask(q.shape[2], sliding_window, q.device)
        outputs.append(
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=window,
                is_causal=window is None,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Causal band for sliding-window layers; None when the window covers the whole sequence."""
    if window is None or length <= window:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)


def _packed_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return None if _packing.get() else sdpa_mask(*args, **kwargs)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _packed_mask)
