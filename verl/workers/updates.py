"""What actor and critic updates share: mini-batches, pooled statistics, the loop of steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl.engines.optimizer import StepResult
from verl.engines.torch_engine import TorchEngine
from verl.errors import TrainingStopped
from verl.seeding import derive_seed

logger = logging.getLogger(__name__)


def minibatches(count: int, size: int, epochs: int, seed: int, step: int) -> Iterator[list[int]]:
    """Sample indices of each optimiser step; every epoch has its own order drawn from the seed."""
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(derive_seed(seed, "minibatches", step, epoch))
        order = torch.randperm(count, generator=generator).tolist()
        for start in range(0, count, size):
            # Ascending within a mini-batch: the order of rows has no meaning, and a mini-batch
            # that is the whole batch is then laid out like the pass that gave the old log-probs.
            yield sorted(order[start : start + size])


def optimizer_steps(samples: int, size: int, epochs: int) -> int:
    """Optimiser steps on `samples` samples; the last mini-batch may be smaller."""
    return -(-samples // size) * epochs


@dataclass
class TokenStats:
    """Sums over tokens and maxima over everything an update saw; means are token-weighted."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    def add(self, count: int, **values: Tensor) -> None:
        """Add per-token values of `count` tokens."""
        self.tokens += count
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value.detach().sum())

    def peak(self, name: str, value: Tensor) -> None:
        """Keep the largest value seen."""
        if value.numel():
            largest = float(value.detach().max())
            self.maxima[name] = max(self.maxima.get(name, float("-inf")), largest)

    def mean(self, name: str) -> float:
        """Token-weighted mean; 0 when no token was seen."""
        return self.sums.get(name, 0.0) / self.tokens if self.tokens else 0.0


@dataclass
class StepLog:
    """Losses and results of the optimiser steps of one update, and the run of bad ones."""

    role: str
    max_bad_steps: int
    losses: list[float] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    bad_in_a_row: int = 0

    def take(self, engine: TorchEngine, loss: float, describe: Callable[[], str]) -> None:
        """Take one optimiser step; raise `TrainingStopped` after too many skipped in a row."""
        result = engine.step()
        self.losses.append(loss)
        self.results.append(result)
        self.bad_in_a_row = self.bad_in_a_row + 1 if result.skipped else 0
        if result.skipped:
            logger.warning(
                "%s: gradient norm %s is not finite (%s); step not taken, %d in a row",
                self.role,
                result.grad_norm,
                describe(),
                self.bad_in_a_row,
            )
        if self.bad_in_a_row >= self.max_bad_steps:
            raise TrainingStopped(
                f"{self.role}: {self.bad_in_a_row} optimiser steps in a row had a gradient that is "
                f"not finite ({describe()}). The weights are those before the first of them. Lower "
                "the learning rate, or look at the data of these steps."
            )

    def metrics(self, prefix: str) -> dict[str, float]:
        """Mean loss and gradient norm, last learning rate, skipped steps."""
        good = [r.grad_norm for r in self.results if not r.skipped]
        finite = [x for x, r in zip(self.losses, self.results, strict=True) if not r.skipped]
        return {
            f"{prefix}/loss": sum(finite) / len(finite) if finite else float("nan"),
            f"{prefix}/grad_norm": sum(good) / len(good) if good else float("nan"),
            f"{prefix}/lr": self.results[-1].lr if self.results else 0.0,
            f"{prefix}/skipped_steps": float(sum(r.skipped for r in self.results)),
        }
