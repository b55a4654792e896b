"""Supervised fine-tuning: maximise the likelihood of the assistant's turns.

In: rows of `messages`. Out: a policy that answers in the manner of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.config.schema import SFT
from verl.data.datasets import RowDataset
from verl.data.loader import LoaderBatch
from verl.engines.microbatch import Rows
from verl.models.chat import conversation_ids
from verl.trainer.supervised import SupervisedTask


class SFTTask(SupervisedTask):
    """One optimiser step per batch of conversations; loss is the mean over trained tokens."""

    stage, role, kind = "sft", "actor", "sft"
    best_metric = ("eval/loss", False)

    def _section(self) -> SFT:
        return self.config.train.sft

    def _lr(self) -> float:
        return self.config.train.sft.lr

    def _length(self, row: Mapping[str, Any], where: str) -> int:
        return len(conversation_ids(self.tokenizer, row["messages"])[0])

    def _encode(self, rows: RowDataset, indices: Sequence[int]) -> Rows:
        ids, reads, labels = [], [], []
        limit = self.config.data.seq_length
        for index in indices:
            tokens, mask = conversation_ids(
                self.tokenizer, rows[index]["messages"], self.config.train.sft.train_on
            )
            row = torch.tensor(tokens[-limit:])
            positions = torch.tensor(mask[-limit:]).nonzero()[:, 0]
            positions = positions[positions > 0]
            ids.append(row)
            reads.append(positions - 1)
            labels.append(row[positions])
        return Rows(ids, reads, labels)

    def step(self, batch: LoaderBatch, on_stage: Callable[[str], None]) -> dict[str, float]:
        """Train on one batch of conversations."""
        self._last = [self.kept[i] for i in batch.indices]
        rows = self._encode(self.rows, self._last)
        tokens = sum(rows.read_counts)

        def loss(outputs: dict[str, Tensor], index: Tensor) -> Tensor:
            return -outputs["logprobs"].sum() / max(tokens, 1)

        log = self.new_log()
        total = self.engine.backward(rows, loss)
        log.take(self.engine, total, lambda: f"step {batch.step}, rows {self._last[:8]}")
        metrics = self.close_log(log, "sft")
        value = metrics["sft/loss"]
        return {**metrics, "sft/perplexity": _perplexity(value), "sft/tokens": float(tokens)}

    def evaluate(self, step: int, samples: Path) -> dict[str, float]:
        """Token-weighted loss on the held-out conversations."""
        if self.eval_rows is None:
            return {}
        rows = self._encode(self.eval_rows, self.eval_indices)
        logprobs, _ = self.engine.logprobs(rows, temperature=1.0)
        loss = -float(logprobs.mean())
        return {"eval/loss": loss, "eval/perplexity": _perplexity(loss)}


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
