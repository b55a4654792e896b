"""Policy, value and preference losses and their aggregation: refusals, flat chunks, weights."""

from __future__ import annotations

import pytest
import torch

from verl.algorithms.aggregation import aggregate, pool, token_weights
from verl.algorithms.policy_loss import POLICY_LOSSES, clipped
from verl.algorithms.preference import centering
from verl.algorithms.value_loss import value_loss


@pytest.mark.parametrize("dual_clip", [0.2, 1.0, float("nan")])
def test_dual_clip_must_be_above_one(dual_clip: float) -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="dual_clip"):
        clipped(one, one, one, one, 0.2, 0.2, dual_clip)


def test_negative_clip_ranges_are_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="clip range"):
        clipped(one, one, one, one, -0.2, 0.2)
    with pytest.raises(ValueError, match="value clip"):
        value_loss(one, one, one, clip=-1.0)


def test_a_flat_chunk_gives_what_the_batch_gives() -> None:
    torch.manual_seed(0)
    logprobs, old, advantages = torch.randn(3, 4, 5).unbind()[:3]
    mask = torch.ones(4, 5)
    batch = POLICY_LOSSES["clipped"](logprobs, old, advantages, mask, 0.2, 0.28, 3.0)
    flat = clipped(*(x.flatten() for x in (logprobs, old, advantages, mask)), 0.2, 0.28, 3.0)
    assert torch.equal(batch.loss.flatten(), flat.loss)
    assert torch.equal(batch.dual_clipped.flatten(), flat.dual_clipped)


def test_masked_positions_are_neutral() -> None:
    nan = torch.full((1,), torch.nan)
    got = clipped(nan, nan, nan, torch.zeros(1), 0.2, 0.2, 3.0)
    assert (got.loss.item(), got.ratio.item()) == (0.0, 1.0)
    assert not got.clipped.item()
    assert not got.dual_clipped.item()


def test_value_loss_of_bfloat16_is_float32() -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    assert value_loss(x, x, x, 0.2).loss.dtype == torch.float32


def test_weights_of_each_mode() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    weights = {
        "token-mean": [[0.25] * 3, [0.25, 0, 0], [0, 0, 0]],
        "seq-mean-token-sum": [[0.5] * 3, [0.5, 0, 0], [0, 0, 0]],
        "seq-mean-token-mean": [[1 / 6] * 3, [0.5, 0, 0], [0, 0, 0]],
        "seq-mean-token-sum-norm": [[0.05] * 3, [0.05, 0, 0], [0, 0, 0]],
    }
    for mode, want in weights.items():
        got = token_weights(mask, mode, max_length=10)
        assert torch.allclose(got, torch.tensor(want)), mode


def test_aggregation_refuses_what_it_cannot_divide_by() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"'mean'.*token-mean"):
        aggregate(one, one, "mean")
    with pytest.raises(ValueError, match="configured response length"):
        aggregate(one, one, "seq-mean-token-sum-norm")


def test_pool_skips_parts_of_weight_zero() -> None:
    assert pool([2.0, float("nan")], [3.0, 0.0]) == 2.0
    assert pool([], []) == 0.0
    with pytest.raises(ValueError, match="1 metric values but 2 weights"):
        pool([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="negative"):
        pool([1.0], [-1.0])


def test_centering_is_zero_for_opposite_scores() -> None:
    got = centering(torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 1.0]))
    assert got.tolist() == [0.0, 9.0]
