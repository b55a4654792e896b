"""Score shaping and running moments: literal values and refusals."""

from __future__ import annotations

import json

import pytest
import torch

from verl.algorithms.rewards import (
    RunningMoments,
    missing_eos_penalty,
    normalize_scores,
    overlong_penalty,
    token_rewards,
)


def test_score_lands_on_the_last_valid_token_of_each_row() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0]])
    got = token_rewards(torch.tensor([2.0, 3.0, torch.nan]), torch.zeros(3, 4), mask, beta=0.1)
    assert got.tolist() == [[0, 2, 0, 0], [0, 0, 0, 3], [0, 0, 0, 0]]


def test_missing_eos_subtracts_by_default_and_can_replace() -> None:
    score, finished = torch.tensor([2.0, 2.0]), torch.tensor([False, True])
    assert missing_eos_penalty(score, finished, 1.0).tolist() == [1.0, 2.0]
    assert missing_eos_penalty(score, finished, 1.0, mode="replace").tolist() == [-1.0, 2.0]
    with pytest.raises(ValueError, match=">= 0"):
        missing_eos_penalty(score, finished, -1.0)
    with pytest.raises(ValueError, match="'add'"):
        missing_eos_penalty(score, finished, 1.0, mode="add")  # type: ignore[arg-type]


def test_overlong_penalty_grows_over_the_buffer() -> None:
    lengths = torch.tensor([10, 80, 90, 100, 120])
    got = overlong_penalty(torch.ones(5), lengths, max_length=100, buffer=20, penalty=2.0)
    assert got.tolist() == pytest.approx([1.0, 1.0, 0.0, -1.0, -1.0])
    with pytest.raises(ValueError, match=r"buffer is 101.*100"):
        overlong_penalty(torch.ones(1), torch.ones(1), 100, 101, 1.0)
    with pytest.raises(ValueError, match="penalty is -1"):
        overlong_penalty(torch.ones(1), torch.ones(1), 100, 20, -1.0)


def test_normalize_scores_centres_only_when_the_std_is_zero() -> None:
    score = torch.tensor([1.0, 3.0])
    assert normalize_scores(score, 2.0, 0.5).tolist() == [-2.0, 2.0]
    assert normalize_scores(score, 2.0, 0.0).tolist() == [-1.0, 1.0]
    with pytest.raises(ValueError, match="nan"):
        normalize_scores(score, 2.0, float("nan"))


def test_running_moments_survive_json_between_batches() -> None:
    values = torch.tensor([1e4 + x for x in (0.0, 1.0, 5.0, 2.0, 2.5)])
    first = RunningMoments()
    first.update(values[:2])
    second = RunningMoments()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.update(values[2:].reshape(1, 3))
    second.update(torch.zeros(0))
    assert second.count == 5
    assert second.mean == pytest.approx(values.double().mean().item(), rel=1e-12)
    assert second.std == pytest.approx(values.double().std().item(), rel=1e-9)


def test_running_moments_refuse_non_finite_scores_and_keep_their_state() -> None:
    moments = RunningMoments()
    moments.update(torch.tensor([1.0, 3.0]))
    with pytest.raises(ValueError, match="1 of 2"):
        moments.update(torch.tensor([1.0, torch.nan]))
    assert (moments.count, moments.mean, moments.std) == (2, 2.0, pytest.approx(2.0**0.5))
