"""The tutorial's import path of `PromptDataset`."""

from __future__ import annotations

from verl.data.datasets import PromptDataset, PromptText

__all__ = ["PromptDataset", "PromptText"]
