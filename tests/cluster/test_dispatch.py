"""Transfer modes and worker groups: arguments split, results joined, errors named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.batch import Batch
from verl.cluster import dispatch
from verl.cluster.dispatch import TransferMode, mode_of, register, transfer_mode
from verl.cluster.worker_group import WorkerGroup
from verl.errors import TrainingStopped


class Worker:
    """A worker that tells its rank."""

    device = torch.device("cpu")
    tokenizer = "the tokenizer"

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.seen: list[Any] = []

    @register(transfer_mode="DP_COMPUTE")
    def double(self, batch: Batch, factor: int = 2) -> Batch:
        self.seen.append(len(batch))
        width = max(batch["length"].tolist(), default=1)
        return batch.with_columns(
            result=factor * batch["x"],
            ragged=torch.ones(len(batch), width),
            rank=[self.rank] * len(batch),
        )

    @register(transfer_mode="DP_COMPUTE")
    def metrics(self, batch: Batch) -> dict[str, float]:
        return {"sum": float(batch["x"].sum())}

    @register(transfer_mode="ONE_TO_ALL")
    def echo(self, value: Any, again: Any = None) -> tuple[Any, ...]:
        return self.rank, value, again

    @register(transfer_mode="ALL_TO_ALL")
    def each(self, value: Any, other: Any) -> tuple[Any, ...]:
        return self.rank, value, other

    @register(transfer_mode="RANK_ZERO")
    def first(self) -> int:
        return self.rank

    @register(transfer_mode="ONE_TO_ALL")
    def fail(self, error: Exception) -> None:
        if self.rank == 1:
            raise error

    def private(self) -> None:
        """Not registered."""


def group(size: int = 2) -> WorkerGroup:
    return WorkerGroup("actor", [Worker(rank) for rank in range(size)])


def samples(count: int) -> Batch:
    numbers = torch.arange(count)
    return Batch(
        {"x": numbers, "length": 1 + numbers % 3}, {"name": [f"s{i}" for i in range(count)]}
    )


@settings(max_examples=30, deadline=None)
@given(count=st.integers(0, 9), size=st.integers(1, 4))
def test_f15_split_and_join_restore_every_sample_in_order(count: int, size: int) -> None:
    workers = group(size)
    result = workers.double(samples(count), factor=3)
    assert result["x"].tolist() == list(range(count))
    assert result["result"].tolist() == [3 * i for i in range(count)]
    assert result["name"] == [f"s{i}" for i in range(count)]
    assert result["rank"] == sorted(result["rank"])
    shares = [worker.seen[0] for worker in workers.workers]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


def test_ranks_that_made_different_widths_are_joined() -> None:
    result = group().double(samples(5))  # longest 2 on the first rank, 3 on the second
    assert result["ragged"].shape == (5, 3)
    assert result["ragged"].sum(-1).tolist() == [2, 2, 3, 3, 3]


def test_results_that_are_no_batches_come_per_rank_or_alone() -> None:
    assert group().metrics(samples(4)) == [{"sum": 1.0}, {"sum": 5.0}]
    assert group(1).metrics(samples(4)) == {"sum": 6.0}


def test_built_in_modes() -> None:
    assert group().echo("v", again="w") == [(0, "v", "w"), (1, "v", "w")]
    assert group().each(["a", "b"], other=("c", "d")) == [(0, "a", "c"), (1, "b", "d")]
    assert group().first() == 0


def test_all_to_all_wants_one_argument_per_worker() -> None:
    with pytest.raises(ValueError, match="lists of length 2"):
        group().each(["a", "b", "c"], ["d", "e"])
    with pytest.raises(ValueError, match="lists of length 2"):
        group().each("ab", ["d", "e"])


@pytest.fixture
def reversed_mode() -> Iterator[TransferMode]:
    def split(size: int, args: Any, kwargs: Any) -> list[Any]:
        return [((rank, *args), kwargs) for rank in range(size)]

    mode = transfer_mode(TransferMode("TEST_REVERSED", split, lambda results: list(results)[::-1]))
    yield mode
    del dispatch.TRANSFER_MODES["TEST_REVERSED"]


def test_user_defined_mode_by_name_and_by_value(reversed_mode: TransferMode) -> None:
    class Own:
        @register(transfer_mode="TEST_REVERSED")
        def named(self, rank: int, value: str) -> str:
            return f"{value}{rank}"

        @register(transfer_mode=reversed_mode)
        def given(self, rank: int) -> int:
            return rank

    workers = WorkerGroup("own", [Own(), Own(), Own()])
    assert workers.named("w") == ["w2", "w1", "w0"]
    assert workers.given() == [2, 1, 0]
    assert mode_of(Own.named) is reversed_mode
    with pytest.raises(ValueError, match="'TEST_REVERSED' exists already"):
        transfer_mode(reversed_mode)


def test_unknown_mode_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'DP'; known: ONE_TO_ALL, ALL_TO_ALL, DP_COMPUTE"):
        register(transfer_mode="DP")


def test_only_registered_methods_are_offered() -> None:
    with pytest.raises(AttributeError, match=r"actor group has no registered method 'private'; it"):
        group().private()
    with pytest.raises(AttributeError, match=r"\['double', 'each', 'echo', 'fail', 'first', 'met"):
        group().generat()


def test_error_carries_role_rank_and_method() -> None:
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        group().fail(RuntimeError("out of memory"))
    assert caught.value.__notes__ == ["in fail of role actor, rank 1"]


def test_errors_raised_on_purpose_pass_as_they_are() -> None:
    with pytest.raises(TrainingStopped) as caught:
        group().fail(TrainingStopped("enough"))
    assert str(caught.value) == "enough"
    assert caught.value.exit_code == 4


def test_group_knows_its_tokenizer_and_receives_batches() -> None:
    assert group().tokenizer == "the tokenizer"
    assert samples(2).send_to(group())["x"].device.type == "cpu"


def test_group_can_be_copied_without_recursion() -> None:
    import copy

    assert copy.copy(group()).role == "actor"
