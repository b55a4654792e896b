"""Partitions: sizes, refusals, and the budget of micro-batches."""

from __future__ import annotations

import pytest

from verl.algorithms.partition import karmarkar_karp, plan_microbatches


@pytest.mark.parametrize(("count", "k"), [(206, 4), (3, 4), (0, 2), (7, 3)])
def test_equal_sizes_differ_by_at_most_one(count: int, k: int) -> None:
    sizes = [len(p) for p in karmarkar_karp(list(range(count)), k, equal_size=True)]
    assert len(sizes) == k
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="0 parts"):
        karmarkar_karp([1], 0)
    with pytest.raises(ValueError, match="-1 is negative"):
        karmarkar_karp([-1], 1)
    with pytest.raises(ValueError, match="-1 is negative"):
        plan_microbatches([-1], 4)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        plan_microbatches([1], 0)


def test_a_sequence_over_the_budget_is_alone() -> None:
    assert plan_microbatches([5, 100, 4], 10) == [[0, 2], [1]]


def test_micro_batches_are_balanced_within_the_budget() -> None:
    # First-fit decreasing fills 6+4 and leaves 3+3.
    lengths = [6, 4, 3, 3]
    plan = plan_microbatches(lengths, 10)
    assert sorted(sum(lengths[i] for i in part) for part in plan) == [7, 9]


def test_fewer_samples_than_the_minimum_give_one_each() -> None:
    assert plan_microbatches([3, 3], 100, minimum=5) == [[0], [1]]
    assert plan_microbatches([], 100, minimum=5) == []


def test_budget_holds_where_balancing_would_break_it() -> None:
    # Largest differencing with 2 parts gives 13 + 11 here.
    lengths = [4, 4, 5, 7, 4]
    plan = plan_microbatches(lengths, 12)
    assert [sum(lengths[i] for i in part) for part in plan] == [12, 12]


def test_minimum_is_met_where_balancing_would_leave_a_part_empty() -> None:
    assert plan_microbatches([0, 5, 0], 3, minimum=3) == [[0], [1], [2]]
