"""Splitting samples into balanced parts and into micro-batches under a token budget.

In: a list of lengths. Out: lists of indices, every index exactly once, the same for the same
input on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class _State:
    """A partial solution: k parts with their sums, largest sum first."""

    sums: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]

    @property
    def spread(self) -> int:
        return self.sums[0] - self.sums[-1]


def karmarkar_karp(lengths: Sequence[int], k: int, equal_size: bool = False) -> list[list[int]]:
    """Split indices into `k` parts with nearly equal sums by the largest differencing method.

    Karmarkar & Karp (1982): repeatedly merge the two partial solutions of largest spread, the
    large parts of one with the small parts of the other. The spread of the result is at most the
    largest length (free sizes), or the largest range of `k` consecutive sorted lengths
    (equal sizes).

    Args:
        lengths: non-negative numbers of tokens.
        k: number of parts, >= 1.
        equal_size: parts differ by at most one in their number of items.

    Returns:
        `k` lists of ascending indices; some are empty when there are fewer items than parts.

    Raises:
        ValueError: k < 1 or a negative length.
    """
    if k < 1:
        raise ValueError(f"cannot split into {k} parts; k must be at least 1")
    if any(length < 0 for length in lengths):
        raise ValueError(f"length {min(lengths)} is negative; lengths are numbers of tokens")
    if not lengths:
        return [[] for _ in range(k)]
    states = _runs_of(lengths, k) if equal_size else _single_items(lengths, k)
    # The running number breaks ties by age, which keeps the result a function of the input.
    heap = [(-state.spread, number, state) for number, state in enumerate(states)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = _merge(first, second)
        heapq.heappush(heap, (-merged.spread, number, merged))
        number += 1
    return [sorted(part) for part in heap[0][2].parts]


def _single_items(lengths: Sequence[int], k: int) -> list[_State]:
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    zeros, empty = (0,) * (k - 1), ((),) * (k - 1)
    return [_State((lengths[i], *zeros), ((i,), *empty)) for i in order]


def _runs_of(lengths: Sequence[int], k: int) -> list[_State]:
    """Return states of k consecutive items in order of length, so that merging keeps sizes equal.

    The shortest run is filled up with empty places, at most one in each part.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    runs = [order[start : start + k] for start in range(0, len(order), k)]
    return [
        _State(
            tuple(lengths[i] for i in run) + (0,) * (k - len(run)),
            tuple((i,) for i in run) + ((),) * (k - len(run)),
        )
        for run in runs
    ]


def _merge(first: _State, second: _State) -> _State:
    joined = [
        (a + b, left + right)
        for a, b, left, right in zip(
            first.sums, reversed(second.sums), first.parts, reversed(second.parts), strict=True
        )
    ]
    joined.sort(key=lambda pair: (-pair[0], pair[1]))
    return _State(tuple(s for s, _ in joined), tuple(p for _, p in joined))


def plan_microbatches(lengths: Sequence[int], max_tokens: int, minimum: int = 1) -> list[list[int]]:
    """Group samples into micro-batches of at most `max_tokens` tokens each.

    First-fit decreasing fixes how many are needed; they are then balanced by largest
    differencing where that keeps the budget.

    Args:
        lengths: tokens of each sample.
        max_tokens: budget of one micro-batch, >= 1. A sample longer than that gets its own.
        minimum: micro-batches wanted at least, so that ranks can run the same number of passes.
            None is ever empty, so fewer samples than `minimum` give one micro-batch each and the
            caller runs all-masked passes for the rest.

    Returns:
        Lists of ascending indices, ordered by their smallest index.

    Raises:
        ValueError: max_tokens or minimum below 1, or a negative length.
    """
    if max_tokens < 1 or minimum < 1:
        raise ValueError(
            f"max_tokens is {max_tokens} and minimum is {minimum}; both must be at least 1"
        )
    if any(length < 0 for length in lengths):
        raise ValueError(f"length {min(lengths)} is negative; lengths are numbers of tokens")
    if not lengths:
        return []
    plan = _first_fit_decreasing(lengths, max_tokens)
    wanted = max(len(plan), min(minimum, len(lengths)))
    balanced = karmarkar_karp(lengths, wanted)
    if all(_fits(part, lengths, max_tokens) for part in balanced):
        plan = balanced
    while len(plan) < wanted:
        plan = _split_heaviest(plan, lengths)
    return sorted(sorted(part) for part in plan)


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fit = next((b for b, left in enumerate(room) if lengths[i] <= left), None)
        if fit is None:
            bins.append([i])
            room.append(max_tokens - lengths[i])
        else:
            bins[fit].append(i)
            room[fit] -= lengths[i]
    return bins


def _fits(part: Sequence[int], lengths: Sequence[int], max_tokens: int) -> bool:
    return len(part) == 1 or (len(part) > 1 and sum(lengths[i] for i in part) <= max_tokens)


def _split_heaviest(plan: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Return `plan` with its heaviest micro-batch of two or more samples cut in two."""
    splittable = [part for part in plan if len(part) > 1]
    heaviest = max(splittable, key=lambda part: (sum(lengths[i] for i in part), -min(part)))
    halves = karmarkar_karp([lengths[i] for i in heaviest], 2, equal_size=True)
    rest = [part for part in plan if part is not heaviest]
    return rest + [[heaviest[i] for i in half] for half in halves]
