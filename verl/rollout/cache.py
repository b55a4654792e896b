"""A key-value cache of fixed capacity that is written in place.

The cache that transformers grows by concatenation copies all keys and values at every token.
This one allocates once, fills a window of rows and columns at a time (so that prompts of
different lengths can be prefilled in batches of similar length) and drops finished rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


class WindowLayer(DynamicLayer):
    """Keys and values (rows, heads, capacity, head size) of one layer.

    Only the window is visible to the model: rows `rows`, columns from `start`, of which the first
    `length` are filled. Columns outside it hold zeros, not garbage: attention multiplies masked
    columns by 0, and 0 times NaN is NaN.
    """

    def __init__(self, row_count: int, capacity: int) -> None:
        super().__init__()
        self.row_count, self.capacity = row_count, capacity
        self.rows = slice(0, row_count)
        self.start = self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            state.new_zeros((self.row_count, state.shape[1], self.capacity, state.shape[3]))
            for state in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append (rows of the window, heads, n, head size) and return all that is filled."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.start + self.length
        end = begin + key_states.shape[2]
        self.keys[self.rows, :, begin:end] = key_states
        self.values[self.rows, :, begin:end] = value_states
        self.length = end - self.start
        return (
            self.keys[self.rows, :, self.start : end],
            self.values[self.rows, :, self.start : end],
        )

    def get_seq_length(self) -> int:
        return self.length

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`; only what is filled is copied."""
        end = self.start + self.length
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((len(indices), *old.shape[1:]))
            torch.index_select(old[:, :, :end], 0, indices, out=new[:, :, :end])
            setattr(self, name, new)
        self.row_count = len(indices)
        self.rows = slice(0, self.row_count)


class WindowCache(DynamicCache):
    """One `WindowLayer` per attention layer; layers with recurrent state stay as they are.

    Sliding-window layers keep all their columns: the model's mask hides the old ones, so results
    are the same and only memory differs.
    """

    def __init__(self, config: PreTrainedConfig, row_count: int, capacity: int) -> None:
        super().__init__(config=config)
        self.layers = [
            WindowLayer(row_count, capacity)
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
            else layer
            for layer in self.layers
        ]

    @property
    def has_windows(self) -> bool:
        """Whether every layer can be filled row range by row range."""
        return all(isinstance(layer, WindowLayer) for layer in self.layers)

    def show(self, rows: slice, start: int, length: int) -> None:
        """Make rows `rows` and columns from `start`, `length` of them filled, the window."""
        for layer in self.layers:
            if isinstance(layer, WindowLayer):
                layer.rows, layer.start, layer.length = rows, start, length
