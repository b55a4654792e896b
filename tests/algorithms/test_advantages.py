"""GAE bootstrap, groups, the registry, and refusals."""

from __future__ import annotations

import pytest
import torch

from verl.algorithms.advantages import ADVANTAGES, gae, grpo, rloo


def test_bootstrap_is_the_value_after_the_last_valid_token() -> None:
    rewards, values = torch.zeros(2, 3), torch.zeros(2, 3)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    advantages, returns = gae(rewards, values, mask, 0.5, 1.0, torch.tensor([4.0, 0.0]))
    assert advantages.tolist() == [[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]
    assert returns.tolist() == advantages.tolist()


def test_gae_is_a_constant_and_leaves_its_inputs_alone() -> None:
    values = torch.ones(1, 2, requires_grad=True)
    advantages, returns = gae(torch.ones(1, 2), values, torch.ones(1, 2), 1.0, 0.95)
    assert not advantages.requires_grad
    assert not returns.requires_grad
    assert values.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(("gamma", "lam", "name"), [(1.1, 1.0, "gamma"), (1.0, -0.1, "lam")])
def test_factors_outside_the_unit_interval_are_refused(gamma: float, lam: float, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        gae(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), gamma, lam)


def test_groups_are_by_key_not_by_position() -> None:
    scores, mask = torch.tensor([0.0, 5.0, 1.0, 9.0]), torch.ones(4, 1)
    assert rloo(scores, ["a", "b", "a", "b"], mask)[0][:, 0].tolist() == [-1.0, -4.0, 1.0, 4.0]
    got = grpo(scores, ["a", "b", "a", "b"], mask)[0][:, 0].tolist()
    assert got == pytest.approx([-0.7071, -0.7071, 0.7071, 0.7071], abs=1e-4)


def test_equal_scores_of_a_group_give_exact_zeros() -> None:
    # The float32 mean of 7 times 0.7, or of 3 such large scores, is not the score itself.
    scores = torch.tensor([0.7] * 7 + [1e6 + 0.1] * 3)
    got = grpo(scores, ["a"] * 7 + ["b"] * 3, torch.ones(10, 1))[0]
    assert (got == 0).all()


def test_the_odd_one_out_of_a_group_keeps_its_advantage() -> None:
    for scores in ([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]):
        got = grpo(torch.tensor(scores), ["a"] * 4, torch.ones(4, 1))[0]
        assert (got != 0).all()


def test_registry_states_the_columns_each_estimator_reads() -> None:
    assert ADVANTAGES["gae"].function is gae
    assert ADVANTAGES["gae"].needs == ("token_rewards", "values", "response_mask")
    assert set(ADVANTAGES) == {"gae", "grpo", "rloo", "remax"}
