"""Gradients of an engine are those of autograd on the whole batch, however rows are cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engines.conftest import draw_rows, gradients, plain_logprobs, policy, value_model
from verl.algorithms.aggregation import AGGREGATIONS, aggregate, token_weights
from verl.algorithms.policy_loss import clipped
from verl.algorithms.preference import bradley_terry
from verl.algorithms.value_loss import value_loss
from verl.engines import torch_engine
from verl.engines.microbatch import Rows
from verl.engines.torch_engine import LossFunction

FolderOf = Callable[[str], Path]
LENGTHS = [(3, 4), (1, 6), (5, 1), (2, 3)]
WIDTH = 6
#: One row at a time, two, all.
PLANS = [[[0], [1], [2], [3]], [[2, 0], [1, 3]], [[0, 1, 2, 3]]]


def mask() -> Tensor:
    return torch.arange(WIDTH) < torch.tensor([[r] for _, r in LENGTHS])


def columns() -> tuple[Tensor, Tensor]:
    """Old log-probs (or values) and advantages (or returns), (B, T)."""
    generator = torch.Generator().manual_seed(11)
    return tuple(torch.randn(4, WIDTH, generator=generator) for _ in range(2))


def to_rows(flat: Tensor) -> Tensor:
    return torch.zeros(4, WIDTH).masked_scatter(mask(), flat)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 1e-3
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-5 * max(1.0, largest)), name


def policy_term(old: Tensor, mode: str, base: Tensor) -> LossFunction:
    """Loss of a chunk as the actor builds it."""
    weights = token_weights(mask(), mode, max_length=WIDTH)[mask()]
    advantages = columns()[1][mask()]

    def loss(outputs: dict[str, Tensor], index: Tensor) -> Tensor:
        new = outputs["logprobs"]
        every = torch.ones_like(new, dtype=torch.bool)
        result = clipped(new, old[index], advantages[index], every, 0.2, 0.2, 3.0)
        return ((result.loss - 0.1 * outputs["entropy"]) * weights[index]).sum()

    return loss


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_policy_loss(mode: str, folder_of: FolderOf) -> None:
    rows = draw_rows(1, LENGTHS)
    engine = policy(folder_of("llama"))
    now, spread = plain_logprobs(engine.model, rows, 0.7)
    old = now.detach() + 0.3 * columns()[0][mask()]
    every = to_rows(now), to_rows(old), columns()[1], mask()
    whole = clipped(*every, 0.2, 0.2, 3.0).loss - 0.1 * to_rows(spread)
    expected_loss = aggregate(whole, mask(), mode, max_length=WIDTH)
    expected_loss.backward()
    expected = gradients(engine)
    for plan in PLANS:
        total = engine.backward(rows, policy_term(old, mode, now), 0.7, entropy=True, plan=plan)
        assert total == pytest.approx(expected_loss.item(), abs=1e-5)
        assert_same(gradients(engine), expected)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "mistral"])
@pytest.mark.parametrize("packs", [True, False])
def test_policy_loss_of_other_architectures(kind: str, packs: bool, folder_of: FolderOf) -> None:
    rows = draw_rows(1, LENGTHS)
    engine = policy(folder_of(kind), budget=16)
    now, spread = plain_logprobs(engine.model, rows, 1.0)
    weights = token_weights(mask(), "token-mean")[mask()]
    ((-now - 0.1 * spread) * weights).sum().backward()
    expected = gradients(engine)
    engine.packs = packs
    engine.backward(
        rows,
        lambda out, i: ((-out["logprobs"] - 0.1 * out["entropy"]) * weights[i]).sum(),
        entropy=True,
    )
    assert_same(gradients(engine), expected)


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_value_loss(mode: str, folder_of: FolderOf) -> None:
    rows = draw_rows(2, LENGTHS, labels=False)
    engine = value_model(folder_of("llama"))
    old, returns = columns()
    trunk, head = engine.model.model, engine.model.score
    now = torch.cat(
        [
            head(trunk(ids[None]).last_hidden_state[0, reads])[:, 0]
            for ids, reads in zip(rows.ids, rows.reads, strict=True)
        ]
    )
    whole = value_loss(to_rows(now), old, returns, 0.2, mask()).loss
    aggregate(whole, mask(), mode, max_length=WIDTH).backward()
    expected = gradients(engine)
    weights = token_weights(mask(), mode, max_length=WIDTH)[mask()]

    def loss(outputs: dict[str, Tensor], index: Tensor) -> Tensor:
        result = value_loss(outputs["values"], old[mask()][index], returns[mask()][index], 0.2)
        return (result.loss * weights[index]).sum()

    for plan in PLANS:
        engine.backward(rows, loss, plan=plan)
        assert_same(gradients(engine), expected)


def test_bradley_terry_pairs(folder_of: FolderOf) -> None:
    rows = draw_rows(3, LENGTHS, labels=False)
    rows = Rows(rows.ids, [torch.tensor([len(ids) - 1]) for ids in rows.ids])
    engine = value_model(folder_of("llama"))
    trunk, head = engine.model.model, engine.model.score
    scores = torch.stack([head(trunk(ids[None]).last_hidden_state[0, -1])[0] for ids in rows.ids])
    (bradley_terry(scores[0::2], scores[1::2]).sum() / 2).backward()
    expected = gradients(engine)

    def loss(outputs: dict[str, Tensor], index: Tensor) -> Tensor:
        pairs = outputs["values"]
        return bradley_terry(pairs[0::2], pairs[1::2]).sum() / 2

    for plan in ([[0, 1], [2, 3]], [[0, 1, 2, 3]]):
        engine.backward(rows, loss, plan=plan)
        assert_same(gradients(engine), expected)


def test_small_head_chunks_give_the_same_gradients(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = draw_rows(4, LENGTHS)
    engine = policy(folder_of("llama"))
    loss = policy_term(columns()[0][mask()], "token-mean", torch.empty(0))
    engine.backward(rows, loss, entropy=True)
    expected = gradients(engine)
    for chunk in (1, 3):
        monkeypatch.setattr(torch_engine, "HEAD_CHUNK", chunk)
        engine.backward(rows, loss, entropy=True)
        assert_same(gradients(engine), expected)


def test_an_entropy_that_is_only_measured_leaves_the_gradients_alone(folder_of: FolderOf) -> None:
    rows, engine = draw_rows(4, LENGTHS), policy(folder_of("llama"))
    seen: list[Tensor] = []

    def loss(outputs: dict[str, Tensor], index: Tensor) -> Tensor:
        seen.append(outputs.get("entropy", torch.zeros(())))
        return -outputs["logprobs"].sum()

    engine.backward(rows, loss)
    expected = gradients(engine)
    engine.backward(rows, loss, entropy=True, detach_entropy=True)
    assert_same(gradients(engine), expected)
    assert not seen[-1].requires_grad
    assert (seen[-1] > 0).all()
    engine.backward(rows, loss, entropy=True)
    assert seen[-1].requires_grad


def test_gradient_checkpointing_gives_the_same_gradients(folder_of: FolderOf) -> None:
    rows = draw_rows(5, LENGTHS)
    loss = policy_term(columns()[0][mask()], "token-mean", torch.empty(0))
    results = []
    for recompute in (False, True):
        engine = policy(folder_of("llama"), gradient_checkpointing=recompute)
        assert engine.model.is_gradient_checkpointing == recompute
        engine.backward(rows, loss, entropy=True)
        results.append(gradients(engine))
    assert_same(results[1], results[0])
