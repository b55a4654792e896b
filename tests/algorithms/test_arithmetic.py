"""Steps and batch sizes that the numeric cases do not reach."""

from __future__ import annotations

import pytest

from verl.algorithms.arithmetic import StepCounts, batch_arithmetic, step_counts, validate_batches


def test_the_last_incomplete_batch_is_a_step_of_its_own() -> None:
    # Batches of 4, 4 and 2 prompts: 2 + 2 + 1 mini-batches, twice each, in 3 epochs.
    assert step_counts(10, 4, False, 3, 2, 2) == StepCounts(3, 9, 30)
    assert step_counts(3, 4, False, 1, 4, 1) == StepCounts(1, 1, 1)


def test_dropping_the_only_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 rows are fewer than batch_size 4"):
        step_counts(3, 4, True, 1, 4, 1)


def test_numbers_below_one_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="epochs is 0"):
        step_counts(10, 4, True, 0, 2, 2)
    with pytest.raises(ValueError, match="microbatch_size is 0"):
        batch_arithmetic(4, 1, 4, 0)


def test_sizes_that_fit_are_accepted() -> None:
    validate_batches(8, batch_size=32, microbatch_size=2, ranks=4)
