"""Attention for generation on a CPU: grouped-query heads without copies of keys and values.

transformers repeats keys and values for every query head when there is a mask, which at each
token copies the whole cache several times. The CPU kernel takes grouped heads and a mask as they
are. Results are bit-identical to transformers' `sdpa`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "verl_grouped_sdpa"


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with query (B, heads, Q, D) to key and value (B, groups, K, D).

    Returns (B, Q, heads, D) and None, as transformers expects. Anything that is not plain masked
    attention on a CPU is left to transformers' own function.
    """
    plain = kwargs.get("position_bias") is None and kwargs.get("cache") is None
    if attention_mask is None or not plain or query.device.type != "cpu":
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_sdpa)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


@contextmanager
def grouped_attention(model: nn.Module) -> Iterator[None]:
    """Use `grouped_sdpa` in place of masked `sdpa` within the context, where that is safe.

    A model that asked for another kind of attention (eager, flash, flex), one that has no sdpa,
    and one made of several configurations keep what they have.
    """
    config = model.config
    before = config._attn_implementation
    switch = (
        (before == "sdpa" or str(before).startswith("verl_"))
        and getattr(model, "_supports_sdpa", False)
        and not config.sub_configs
        and model.device.type == "cpu"
    )
    if not switch:
        yield
        return
    model.set_attn_implementation(GROUPED)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
