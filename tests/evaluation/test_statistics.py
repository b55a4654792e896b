"""Literal cases of the small statistics, and what must hold for any numbers."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.evaluation.statistics import (
    correlation,
    distinct_n,
    mean_ci95,
    same_opening,
    standard_deviation,
    wilson_interval,
    wins,
)


def test_mean_and_interval_of_one_to_five() -> None:
    # Variance 2.5, standard error sqrt(0.5), times 1.96.
    mean, half = mean_ci95([1, 2, 3, 4, 5])
    assert mean == 3
    assert half == pytest.approx(1.959964 * math.sqrt(0.5), rel=1e-6)
    assert mean_ci95([7.0]) == (7.0, 0.0)
    with pytest.raises(ValueError, match="held-out set is empty"):
        mean_ci95([])


def test_standard_deviation_divides_by_n_minus_one() -> None:
    assert standard_deviation([2, 4, 4, 4, 5, 5, 7, 9]) == pytest.approx(math.sqrt(32 / 7))
    assert standard_deviation([3.0]) == 0.0


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (0, 0, 0.0, 1.0),
        # Newcombe 1998, table I, method 3 (the score interval).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_wilson_intervals(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(n=st.integers(1, 200), data=st.data())
@settings(max_examples=50)
def test_a_wilson_interval_holds_the_share_and_stays_inside_zero_and_one(
    n: int, data: st.DataObject
) -> None:
    successes = data.draw(st.integers(0, n))
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n + 1e-12
    assert successes / n - 1e-12 <= high <= 1
    assert low < high


def test_wins_count_a_tie_as_half() -> None:
    assert wins([2, 1, 0.5], [1, 2, 0.5]) == [1.0, 0.0, 0.5]
    with pytest.raises(ValueError, match="argument 2 is longer"):
        wins([1], [1, 2])


def test_distinct_n_counts_word_ngrams_over_all_texts() -> None:
    texts = ["a b a b", "a b"]
    assert distinct_n(texts, 1) == 2 / 6
    assert distinct_n(texts, 2) == 2 / 4  # ab ba ab, ab
    assert distinct_n(["a"], 2) == 0.0
    assert distinct_n(["", " "], 1) == 0.0


def test_same_opening_is_the_share_of_the_most_frequent_first_three_words() -> None:
    texts = ["One simple tip is", "One  simple tip: no", "One simple tip", "Why?", "One simple way"]
    assert same_opening(texts) == 2 / 5
    assert same_opening(texts, words=2) == 4 / 5
    assert same_opening(["", ""]) == 1.0
    assert same_opening([]) == 0.0


def test_correlation() -> None:
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert correlation([1, 2, 3], [5, 5, 5]) == 0.0
    assert correlation([1], [2]) == 0.0


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30))
@settings(max_examples=50)
def test_mean_and_deviation_are_those_of_the_standard_library(values: list[float]) -> None:
    assert mean_ci95(values)[0] == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert standard_deviation(values) == pytest.approx(statistics.stdev(values), abs=1e-6)
