"""Reward-model training: the chosen answer of a pair shall score above the rejected one.

In: rows of `prompt`, `chosen`, `rejected` (and `margin`). Out: a model that gives a conversation
one number, its held-out accuracy with interval, and the score statistics that PPO normalises by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.preference import bradley_terry, centering
from verl.checkpoint.atomic import write_json_atomic
from verl.config.schema import RewardModelTraining
from verl.data.datasets import RowDataset
from verl.data.loader import LoaderBatch
from verl.engines.microbatch import group_plan, token_plan
from verl.engines.torch_engine import TorchEngine
from verl.evaluation.statistics import (
    correlation,
    mean_ci95,
    standard_deviation,
    wilson_interval,
)
from verl.models.chat import RewardInput, reward_input
from verl.rewards.model import reward_rows
from verl.trainer.supervised import SupervisedTask

#: File in a reward model's folder with mean and deviation of its held-out scores.
STATISTICS_FILE = "score_statistics.json"


class RewardModelTask(SupervisedTask):
    """One optimiser step per batch of pairs."""

    stage, role, kind = "rm", "reward_model", "rm"
    best_metric = ("eval/accuracy", True)
    #: Held-out metrics of the model as it is; None once it has been trained on.
    _held_out: dict[str, float] | None = None

    def _section(self) -> RewardModelTraining:
        return self.config.train.reward_model

    def _lr(self) -> float:
        return self.config.train.reward_model.lr

    def _length(self, row: Mapping[str, Any], where: str) -> int:
        sides = (row["chosen"], row["rejected"])
        return max(len(reward_input(self.tokenizer, row["prompt"], side).ids) for side in sides)

    def step(self, batch: LoaderBatch, on_stage: Callable[[str], None]) -> dict[str, float]:
        """Train on one batch of pairs."""
        self._last = [self.kept[i] for i in batch.indices]
        self._held_out = None
        pairs = encode_pairs(self.tokenizer, self.rows, self._last, self._limit())
        section = self.config.train.reward_model
        margins = pairs.margins if section.use_margin else None
        seen = torch.empty(len(pairs.inputs))

        def loss(outputs: dict[str, Tensor], index: Tensor) -> Tensor:
            scores = outputs["values"]
            seen[index] = scores.detach().cpu()
            chosen, rejected = scores[0::2], scores[1::2]
            margin = margins[index[0::2] // 2].to(scores.device) if margins is not None else None
            each = bradley_terry(chosen, rejected, margin)
            if section.centering_coef:
                each = each + section.centering_coef * centering(chosen, rejected)
            return each.sum() / len(self._last)

        log = self.new_log()
        total = self.engine.backward(
            reward_rows(pairs.inputs), loss, plan=pair_plan(self.engine, pairs.inputs)
        )
        log.take(self.engine, total, lambda: f"step {batch.step}, rows {self._last[:8]}")
        chosen, rejected = seen[0::2], seen[1::2]
        return {
            **self.close_log(log, "rm"),
            "rm/accuracy": float((chosen > rejected).float().mean()),
            "rm/margin_mean": float((chosen - rejected).mean()),
            "rm/chosen_mean": float(chosen.mean()),
            "rm/rejected_mean": float(rejected.mean()),
        }

    def _limit(self) -> int:
        model = self.engine.loaded.max_length or self.config.data.seq_length
        return min(model, self.config.data.seq_length)

    def evaluate(self, step: int, samples: Path) -> dict[str, float]:
        """Accuracy and score statistics on the held-out pairs."""
        if self.eval_rows is None:
            return {}
        if self._held_out is None:
            self._held_out = evaluate_pairs(
                self.engine, self.eval_rows, self.eval_indices, self._limit()
            )
        return dict(self._held_out)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self._held_out = None
        super().load(folder)

    def export(self, folder: Path) -> None:
        """Write the model, and beside it the statistics of its held-out scores."""
        super().export(folder)
        metrics = self.evaluate(0, folder)
        if metrics:
            write_statistics(folder, metrics, len(self.eval_indices))


def write_statistics(folder: Path, metrics: Mapping[str, float], pairs: int) -> None:
    """Store mean and deviation of held-out scores beside a model, for `normalize_reward=reference`."""
    write_json_atomic(
        folder / STATISTICS_FILE,
        {
            "mean": metrics["eval/score_mean"],
            "std": metrics["eval/score_std"],
            "pairs": pairs,
            "accuracy": metrics["eval/accuracy"],
        },
    )


@dataclass(frozen=True)
class Pairs:
    """Tokenised pairs: chosen, rejected, chosen, …; `margins` (P,) or None without that column."""

    inputs: list[RewardInput]
    margins: Tensor | None


def encode_pairs(tokenizer: Any, rows: RowDataset, indices: Sequence[int], limit: int) -> Pairs:
    """Tokenise pairs for the reward model; a longer conversation loses its beginning."""
    inputs, margins = [], []
    for index in indices:
        row = rows[index]
        for side in ("chosen", "rejected"):
            inputs.append(reward_input(tokenizer, row["prompt"], row[side], limit))
        margins.append(float(row.get("margin") or 0.0))
    has_margin = "margin" in rows.columns
    return Pairs(inputs, torch.tensor(margins) if has_margin else None)


def pair_plan(engine: TorchEngine, inputs: Sequence[RewardInput]) -> list[list[int]]:
    """Micro-batches that never part the two sides of a pair."""
    lengths = [len(item.ids) for item in inputs]
    sides = list(zip(lengths[0::2], lengths[1::2], strict=True))
    sizes = [a + b if engine.packs else 2 * max(a, b) for a, b in sides]
    return group_plan(token_plan(sizes, engine.tokens_per_microbatch, padded=not engine.packs), 2)


def evaluate_pairs(
    engine: TorchEngine, rows: RowDataset, indices: Sequence[int], limit: int
) -> dict[str, float]:
    """Held-out metrics of a reward model on pairs."""
    pairs = encode_pairs(engine.loaded.tokenizer, rows, indices, limit)
    scores = engine.values(reward_rows(pairs.inputs))
    chosen, rejected = scores[0::2], scores[1::2]
    right = [1.0 if a > b else 0.0 for a, b in zip(chosen.tolist(), rejected.tolist(), strict=True)]
    gaps = (chosen - rejected).tolist()
    lengths = [len(item.ids) for item in pairs.inputs]
    longer = [float(a - b) for a, b in zip(lengths[0::2], lengths[1::2], strict=True)]
    accuracy, _ = mean_ci95(right)
    low, high = wilson_interval(sum(right), len(right))
    return {
        "eval/accuracy": accuracy,
        "eval/accuracy_ci_low": low,
        "eval/accuracy_ci_high": high,
        "eval/score_mean": float(scores.mean()),
        "eval/score_std": standard_deviation(scores.tolist()),
        "eval/length_bias": correlation(gaps, longer),
        "eval/loss": float(bradley_terry(chosen, rejected).mean()),
        **_accuracy_by_margin(gaps, right),
    }


def _accuracy_by_margin(gaps: Sequence[float], right: Sequence[float]) -> dict[str, float]:
    """Accuracy in thirds of the pairs, by how far apart the model puts the two answers."""
    order = sorted(range(len(gaps)), key=lambda i: abs(gaps[i]))
    third = len(order) / 3
    result = {}
    for k, name in enumerate(("small", "medium", "large")):
        part = order[round(k * third) : round((k + 1) * third)]
        if part:
            result[f"eval/accuracy_{name}_margin"] = sum(right[i] for i in part) / len(part)
    return result
