"""Mini-batches, pooled statistics and the arithmetic of steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.workers.updates import StepLog, TokenStats, minibatches, optimizer_steps


@settings(max_examples=50)
@given(count=st.integers(1, 20), size=st.integers(1, 25), epochs=st.integers(1, 3))
def test_every_epoch_sees_every_sample_once(count: int, size: int, epochs: int) -> None:
    parts = list(minibatches(count, size, epochs, seed=1, step=2))
    assert len(parts) == optimizer_steps(count, size, epochs)
    assert all(0 < len(part) <= size and part == sorted(part) for part in parts)
    each = len(parts) // epochs
    for epoch in range(epochs):
        seen = [i for part in parts[epoch * each : (epoch + 1) * each] for i in part]
        assert sorted(seen) == list(range(count))


def test_order_depends_on_seed_step_and_epoch_only() -> None:
    def draw(seed: int, step: int) -> list[list[int]]:
        return list(minibatches(8, 2, 2, seed, step))

    assert draw(1, 2) == draw(1, 2)
    assert draw(1, 2) != draw(1, 3)
    assert draw(1, 2) != draw(2, 2)
    assert draw(1, 2)[:4] != draw(1, 2)[4:]


def test_h04_means_are_weighted_by_tokens_not_by_chunks() -> None:
    stats = TokenStats()
    stats.add(3, clipped=torch.tensor([0.0, 0.0, 0.0]))
    stats.add(1, clipped=torch.tensor([1.0]))
    assert stats.mean("clipped") == 0.25
    assert stats.mean("never seen") == 0.0
    assert TokenStats().mean("clipped") == 0.0


def test_peaks_ignore_empty_tensors() -> None:
    stats = TokenStats()
    stats.peak("ratio", torch.tensor([1.5, 2.0]))
    stats.peak("ratio", torch.empty(0))
    stats.peak("ratio", torch.tensor([0.5]))
    assert stats.maxima == {"ratio": 2.0}


def test_log_without_steps_has_no_invented_numbers() -> None:
    metrics = StepLog("actor", 3).metrics("policy")
    assert metrics["policy/loss"] != metrics["policy/loss"]  # NaN
    assert metrics["policy/lr"] == 0.0
    assert metrics["policy/skipped_steps"] == pytest.approx(0)
