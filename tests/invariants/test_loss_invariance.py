"""What must never change a loss: cutting, padding, and garbage at masked positions.

Properties of verl.algorithms over random batches; every check compares values and gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl.algorithms.advantages import gae, remax
from verl.algorithms.aggregation import AGGREGATIONS, aggregate, token_weights
from verl.algorithms.controllers import AdaptiveKLController
from verl.algorithms.kl import KL_ESTIMATORS, kl_penalty
from verl.algorithms.masked import masked_mean, masked_std, masked_whiten
from verl.algorithms.partition import karmarkar_karp, plan_microbatches
from verl.algorithms.policy_loss import clipped
from verl.algorithms.rewards import token_rewards
from verl.algorithms.value_loss import value_loss

FEW = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
MAX_LENGTH = 16
seeds = st.integers(0, 2**31 - 1)
garbage = st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30, -7.0])


def draw(seed: int, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logprobs, old log-probs, advantages (float64) and a mask with holes and empty rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, rows, width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    holes = torch.rand(rows, width, generator=generator) < 0.2
    mask = (torch.arange(width) < lengths) & ~holes
    mask[0, 0] = True
    return x[0], x[1], x[2], mask


def loss_and_gradient(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    mode: str,
    parts: list[list[int]],
) -> tuple[float, Tensor]:
    """Run the policy loss micro-batch by micro-batch under the counts of the whole batch."""
    logprobs = logprobs.clone().requires_grad_()
    tokens, sequences = int(mask.sum()), int(mask.any(-1).sum())
    total = 0.0
    for part in parts:
        loss = clipped(logprobs[part], old[part], advantages[part], mask[part], 0.2, 0.28, 3.0).loss
        share = aggregate(loss, mask[part], mode, tokens, sequences, MAX_LENGTH)
        share.backward()
        total += share.item()
    assert logprobs.grad is not None
    return total, logprobs.grad


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
@FEW
@given(seed=seeds, rows=st.integers(1, 7), width=st.integers(1, 9), size=st.integers(1, 7))
def test_cutting_into_micro_batches_changes_nothing(
    mode: str, seed: int, rows: int, width: int, size: int
) -> None:
    logprobs, old, advantages, mask = draw(seed, rows, width)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    parts = [order[i : i + size] for i in range(0, rows, size)]
    whole, whole_gradient = loss_and_gradient(
        logprobs, old, advantages, mask, mode, [list(range(rows))]
    )
    cut, cut_gradient = loss_and_gradient(logprobs, old, advantages, mask, mode, parts)
    assert cut == pytest.approx(whole, rel=1e-6, abs=1e-9)
    assert torch.allclose(cut_gradient, whole_gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
@FEW
@given(
    seed=seeds, rows=st.integers(1, 5), width=st.integers(1, 7), pad=st.integers(1, 5), fill=garbage
)
def test_padding_changes_nothing(
    mode: str, seed: int, rows: int, width: int, pad: int, fill: float
) -> None:
    logprobs, old, advantages, mask = draw(seed, rows, width)

    def padded(x: Tensor, value: float) -> Tensor:
        x = torch.nn.functional.pad(x, (0, pad), value=value)
        return torch.nn.functional.pad(x, (0, 0, 0, 1), value=value)

    want, want_gradient = loss_and_gradient(
        logprobs, old, advantages, mask, mode, [list(range(rows))]
    )
    got, got_gradient = loss_and_gradient(
        *(padded(x, fill) for x in (logprobs, old, advantages)),
        padded(mask.int(), 0).bool(),
        mode,
        [list(range(rows + 1))],
    )
    assert got == pytest.approx(want, rel=1e-6, abs=1e-9)
    assert torch.allclose(got_gradient[:rows, :width], want_gradient, rtol=1e-6, atol=1e-9)
    assert (got_gradient[rows:] == 0).all()
    assert (got_gradient[:, width:] == 0).all()


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
@FEW
@given(seed=seeds, rows=st.integers(1, 7), width=st.integers(1, 9))
def test_a_flat_chunk_with_weights_of_the_batch_gives_the_same_loss(
    mode: str, seed: int, rows: int, width: int
) -> None:
    logprobs, old, advantages, mask = draw(seed, rows, width)
    weights = token_weights(mask, mode, max_length=MAX_LENGTH)[mask]
    flat = clipped(
        logprobs[mask], old[mask], advantages[mask], torch.ones_like(weights), 0.2, 0.28, 3.0
    ).loss
    whole, _ = loss_and_gradient(logprobs, old, advantages, mask, mode, [list(range(rows))])
    assert (flat * weights).sum().item() == pytest.approx(whole, rel=1e-6, abs=1e-9)


Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Each takes three (B, T) tensors and a mask; the first carries the gradient.
MASKED_FUNCTIONS: dict[str, Function] = {
    "gae advantages": lambda a, b, c, m: gae(a, b, m, 0.9, 0.8, torch.ones(len(a)))[0],
    "gae returns": lambda a, b, c, m: gae(a, b, m, 0.9, 0.8)[1],
    "remax": lambda a, b, c, m: remax(a, m, torch.ones(len(a)))[0],
    "whiten": lambda a, b, c, m: masked_whiten(a, m),
    "KL mean": lambda a, b, c, m: torch.stack(
        [masked_mean(kl_penalty(a, b, kind, m), m) for kind in KL_ESTIMATORS]
    ),
    "policy loss": lambda a, b, c, m: clipped(a, b, c, m, 0.2, 0.2, 3.0).loss,
    "value loss": lambda a, b, c, m: value_loss(a, b, c, 0.2, m).loss,
    "aggregate": lambda a, b, c, m: aggregate(a, m, "token-mean"),
    "token rewards": lambda a, b, c, m: token_rewards(torch.ones(len(a)), a, m, 0.1),
}


@pytest.mark.parametrize("name", MASKED_FUNCTIONS)
@FEW
@given(seed=seeds, rows=st.integers(1, 5), width=st.integers(1, 7), fill=garbage)
def test_garbage_at_masked_positions_changes_nothing(
    name: str, seed: int, rows: int, width: int, fill: float
) -> None:
    function = MASKED_FUNCTIONS[name]
    *columns, mask = draw(seed, rows, width)

    def run(value: float) -> tuple[Tensor, Tensor | None]:
        a, b, c = (torch.where(mask, x, value) for x in columns)
        a.requires_grad_()
        out = function(a, b, c, mask)
        if not out.requires_grad:
            return out, None
        return out.detach(), torch.autograd.grad(out.sum(), a)[0]

    clean, clean_gradient = run(0.0)
    dirty, dirty_gradient = run(fill)
    assert torch.equal(dirty, clean)
    assert dirty.isfinite().all()
    if clean_gradient is not None and dirty_gradient is not None:
        assert torch.equal(dirty_gradient, clean_gradient)
        assert (dirty_gradient[~mask] == 0).all()


@FEW
@given(seed=seeds, rows=st.integers(1, 5), width=st.integers(1, 7))
def test_gae_of_holes_equals_gae_of_the_row_without_them(seed: int, rows: int, width: int) -> None:
    rewards, values, _, mask = draw(seed, rows, width)
    advantages, returns = gae(rewards, values, mask, 0.9, 0.8)
    for row in range(rows):
        kept = mask[row]
        dense = (
            gae(
                rewards[row, kept][None],
                values[row, kept][None],
                torch.ones(1, int(kept.sum())),
                0.9,
                0.8,
            )
            if kept.any()
            else None
        )
        if dense is not None:
            assert torch.allclose(advantages[row, kept], dense[0][0])
            assert torch.allclose(returns[row, kept], dense[1][0])
        assert (advantages[row, ~kept] == 0).all()


@FEW
@given(st.lists(st.tuples(st.floats(-1e3, 0, width=32), st.floats(-1e3, 0, width=32)), min_size=1))
def test_k3_is_never_negative_and_has_a_finite_gradient(pairs: list[tuple[float, float]]) -> None:
    logprobs, ref = torch.tensor(pairs).unbind(1)
    logprobs = logprobs.clone().requires_grad_()
    kl = kl_penalty(logprobs, ref, "k3")
    kl.sum().backward()
    assert (kl >= 0).all()
    assert kl.isfinite().all()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


@FEW
@given(seed=seeds, rows=st.integers(1, 6), width=st.integers(3, 9), shift=st.floats(-50, 50))
def test_whitened_values_have_mean_zero_and_variance_one(
    seed: int, rows: int, width: int, shift: float
) -> None:
    x, _, _, mask = draw(seed, rows, width)
    mask[0, :3] = True
    white = masked_whiten(x + shift, mask)
    assert masked_mean(white, mask).item() == pytest.approx(0.0, abs=1e-9)
    assert masked_std(white, mask).item() == pytest.approx(1.0, abs=1e-5)


lengths_lists = st.lists(st.integers(0, 500), min_size=1, max_size=40)


@FEW
@given(lengths=lengths_lists, k=st.integers(1, 6), equal_size=st.booleans())
def test_partition_is_complete_and_within_its_bound(
    lengths: list[int], k: int, equal_size: bool
) -> None:
    parts = karmarkar_karp(lengths, k, equal_size)
    assert len(parts) == k
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in part) for part in parts]
    bound = max(lengths)
    if equal_size:
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        ordered = sorted(lengths + [0] * (-len(lengths) % k))
        bound = max(ordered[i + k - 1] - ordered[i] for i in range(0, len(ordered), k))
    assert max(sums) - min(sums) <= bound


@FEW
@given(lengths=lengths_lists, max_tokens=st.integers(1, 600), minimum=st.integers(1, 12))
def test_micro_batches_keep_the_budget_and_the_minimum(
    lengths: list[int], max_tokens: int, minimum: int
) -> None:
    plan = plan_microbatches(lengths, max_tokens, minimum)
    assert sorted(i for part in plan for i in part) == list(range(len(lengths)))
    assert all(part for part in plan)
    assert all(len(p) == 1 or sum(lengths[i] for i in p) <= max_tokens for p in plan)
    assert len(plan) >= min(minimum, len(lengths))
    assert plan == plan_microbatches(lengths, max_tokens, minimum)


@FEW
@given(
    coef=st.floats(1e-4, 10),
    target=st.floats(0.1, 100),
    kl=st.floats(-10, 1e3),
    samples=st.integers(1, 5000),
)
def test_coefficient_moves_towards_the_target(
    coef: float, target: float, kl: float, samples: int
) -> None:
    controller = AdaptiveKLController(coef, target, horizon=1000)
    controller.update(kl, samples)
    assert controller.value > 0
    if kl > target:
        assert controller.value >= coef
    else:
        assert controller.value <= coef
    assert 0.8 * coef - 1e-9 <= controller.value <= 1.2 * coef + 1e-9
