"""The reward role: a source of scores behind one registered method."""

from __future__ import annotations

from typing import Any

import torch

from verl.batch import Batch
from verl.cluster.dispatch import register
from verl.errors import TrainingStopped
from verl.rewards.base import RewardSource


class RewardWorker:
    """Scores finished responses."""

    def __init__(self, source: RewardSource, device: torch.device) -> None:
        self.source, self.device = source, device

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the reward model."""
        return self.source.tokenizer

    @register(transfer_mode="DP_COMPUTE")
    def score(self, batch: Batch) -> Batch:
        """Add `score` (B,) float32, raw from the source.

        Reads columns `prompt` (messages or text) and `response` (text).

        Raises:
            TrainingStopped: a score is not finite; a failed score is never replaced by a number.
        """
        batch.require(["prompt", "response"], "score")
        scores = self.source.score(batch["prompt"], batch["response"])
        bad = (~torch.isfinite(scores)).nonzero()[:, 0].tolist()
        if bad:
            raise TrainingStopped(
                f"reward source {self.source.name!r} gave {scores[bad[0]]} for sample {bad[0]} "
                f"({len(bad)} of {len(scores)} are not finite): {batch['response'][bad[0]][:80]!r}"
            )
        return batch.with_columns(score=scores)
