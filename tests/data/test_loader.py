from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data.loader import LoaderBatch, ResumableLoader
from verl.errors import CheckpointError, DataError


def batches(loader):
    return list(loader)


def test_b19_three_rows_with_batch_four_are_one_batch_of_three():
    assert batches(ResumableLoader(3, 4, seed=0, shuffle=False)) == [LoaderBatch(1, 0, [0, 1, 2])]


def test_last_incomplete_batch_is_kept():
    got = batches(ResumableLoader(5, 2, seed=0, shuffle=False, num_epochs=2))
    assert [b.indices for b in got] == [[0, 1], [2, 3], [4]] * 2
    assert [b.step for b in got] == [1, 2, 3, 4, 5, 6]
    assert [b.epoch for b in got] == [0, 0, 0, 1, 1, 1]


def test_b19_no_rows_names_the_filter_counts():
    with pytest.raises(
        DataError, match="data.train: no rows left: 5 read, 5 taken away by filters"
    ):
        ResumableLoader(0, 4, seed=0, dropped=5)


def test_d09_resume_meets_the_unseen_prompts_in_order():
    straight = batches(ResumableLoader(8, 2, seed=3))
    first = ResumableLoader(8, 2, seed=3)
    seen = [next(first), next(first)]
    resumed = ResumableLoader(8, 2, seed=3)
    resumed.load_state(first.state())
    rest = batches(resumed)
    assert seen + rest == straight
    assert [b.step for b in rest] == [3, 4]
    assert sorted(i for b in straight for i in b.indices) == list(range(8))


def test_d10_resume_at_an_epoch_boundary_continues():
    first = ResumableLoader(4, 2, seed=1, num_epochs=2)
    next(first), next(first)
    assert first.state() == {"epoch": 1, "index": 0, "seed": 1}
    resumed = ResumableLoader(4, 2, seed=1, num_epochs=2)
    resumed.load_state(first.state())
    assert [b.step for b in resumed] == [3, 4]


def test_d12_batches_are_skipped_once():
    resumed = ResumableLoader(8, 2, seed=0, num_epochs=3)
    resumed.load_state({"epoch": 0, "index": 4, "seed": 0})
    epochs = [b.epoch for b in resumed]
    assert [epochs.count(e) for e in range(3)] == [2, 4, 4]


def test_a_finished_run_has_nothing_left():
    done = ResumableLoader(4, 2, seed=0)
    batches(done)
    again = ResumableLoader(4, 2, seed=0)
    again.load_state(done.state())
    assert batches(again) == [] and again.step == again.total_steps == 2 and len(again) == 0


def test_total_steps_stops_inside_an_epoch_and_adds_none():
    assert len(batches(ResumableLoader(8, 2, seed=0, num_epochs=3, total_steps=5))) == 5
    long = ResumableLoader(5, 1, seed=0, total_steps=100)
    assert long.total_steps == 5 and len(batches(long)) == 5


def test_order_depends_on_seed_and_epoch_only():
    loader = ResumableLoader(100, 7, seed=0, num_epochs=2)
    other = ResumableLoader(100, 10, seed=0, num_epochs=2)
    assert loader.epoch_order(1).tolist() == other.epoch_order(1).tolist()
    assert loader.epoch_order(0).tolist() != loader.epoch_order(1).tolist()
    seed = ResumableLoader(100, 7, seed=1)
    assert loader.epoch_order(0).tolist() != seed.epoch_order(0).tolist()
    # The order of existing runs must not change between versions.
    assert ResumableLoader(8, 2, seed=3).epoch_order(0).tolist() == [2, 3, 7, 4, 6, 0, 1, 5]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"epoch": 0, "index": 0, "seed": 9}, "the checkpoint's seed is 9, train.seed is 0"),
        ({"epoch": 0, "index": 3, "seed": 0}, "index 3 does not fit 8 rows in batches of 2"),
        ({"epoch": 0, "index": 8, "seed": 0}, "index 8 does not fit 8 rows"),
        ({"epoch": -1, "index": 0, "seed": 0}, "epoch -1"),
        ({"epoch": 0, "seed": 0}, "must have the integers epoch, index and seed"),
    ],
)
def test_foreign_position_is_refused(state, reason):
    with pytest.raises(CheckpointError, match=reason):
        ResumableLoader(8, 2, seed=0).load_state(state)


@settings(max_examples=50)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 3), st.integers(0, 60), st.booleans())
def test_resume_anywhere_equals_straight(rows, batch, epochs, cut, shuffle):
    straight = batches(ResumableLoader(rows, batch, 5, shuffle, epochs))
    first = ResumableLoader(rows, batch, 5, shuffle, epochs)
    head = [b for _, b in zip(range(min(cut, len(straight))), first, strict=False)]
    resumed = ResumableLoader(rows, batch, 5, shuffle, epochs)
    resumed.load_state(first.state())
    assert head + batches(resumed) == straight
    for epoch in range(epochs):
        seen = sorted(i for b in straight if b.epoch == epoch for i in b.indices)
        assert seen == list(range(rows))


def test_millions_of_rows_are_cheap():
    start = time.perf_counter()
    next(ResumableLoader(2_000_000, 32, seed=0))
    assert time.perf_counter() - start < 5
