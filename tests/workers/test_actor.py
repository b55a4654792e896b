"""The actor: rollout and re-scoring agree, and every setting reaches the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.conftest import actor_of, draw_batch, update_actor
from verl.algorithms.aggregation import AGGREGATIONS
from verl.batch import Batch
from verl.errors import TrainingStopped
from verl.rollout.base import SamplingParams
from verl.workers.actor import ActorWorker

Spread = Callable[[str], Path]


def scored(actor: ActorWorker, shift: float = 0.0, advantage: float | None = None) -> Batch:
    """A batch whose ratio is exp(shift) everywhere, with one advantage for all tokens."""
    batch = actor.logprobs(draw_batch(), 0.7)
    mask = batch["response_mask"]
    batch = batch.with_columns(old_logprobs=torch.where(mask, batch["old_logprobs"] - shift, 0.0))
    if advantage is not None:
        batch = batch.with_columns(advantages=torch.where(mask, advantage, 0.0))
    return batch


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a11_ratio_is_one_before_the_first_step(kind: str, spread: Spread) -> None:
    actor = actor_of(spread(kind), budget=8)
    metrics = update_actor(actor, actor.logprobs(draw_batch(), 0.7))
    assert metrics["policy/first_ratio_deviation"] <= 1e-5
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/approx_kl"] == pytest.approx(0.0, abs=1e-5)
    # At another temperature the same batch is off: the check above can fail.
    again = update_actor(actor_of(spread(kind)), actor_of(spread(kind)).logprobs(draw_batch(), 1.0))
    assert again["policy/first_ratio_deviation"] > 0.1


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a14_rollout_logprobs_are_those_of_rescoring(kind: str, spread: Spread) -> None:
    actor = actor_of(spread(kind), rollout=True)
    prompts = Batch({}, {"prompt_ids": [[5, 6], [7, 8, 9, 10, 11], [12]], "seed": [1, 2, 3]})
    params = SamplingParams(max_tokens=7, temperature=0.7, stop_token_ids=(2,))
    batch = actor.logprobs(actor.generate(prompts, params), 0.7)
    mask = batch["response_mask"]
    assert mask.sum() >= 7
    difference = (batch["old_logprobs"] - batch["rollout_logprobs"])[mask]
    assert difference.abs().max() < 1e-4
    assert (batch["old_logprobs"][~mask] == 0).all()
    assert (batch["entropy"][mask] > 0).all()


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_a25_parameters_do_not_depend_on_the_micro_batch(mode: str, spread: Spread) -> None:
    # With a huge eps the first Adam step is lr / eps times the gradient: SGD with rate 0.5.
    results = []
    for budget in (1, 12, 1000):
        actor = actor_of(spread("llama"), budget, lr=0.5e4, adam_eps=1e4)
        before = {n: p.detach().clone() for n, p in actor.engine.trainable()}
        metrics = update_actor(
            actor, scored(actor, shift=0.1), aggregation=mode, minibatch_size=5, entropy_coef=0.1,
            kl_loss_coef=0.0,
        )  # fmt: skip
        results.append(({n: p - before[n] for n, p in actor.engine.trainable()}, metrics))
    (first, metrics), *others = results
    largest = max(float(change.abs().max()) for change in first.values())
    assert largest > 1e-3
    for changes, logged in others:
        assert all(
            torch.allclose(c, first[n], atol=1e-5 * max(1, largest)) for n, c in changes.items()
        )
        assert logged == pytest.approx(metrics, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "settings", "loss", "clipped", "dual"),
    [
        (5.0, -1.0, {"dual_clip": 3.0}, 3.0, 0.0, 1.0),
        (5.0, -1.0, {}, 5.0, 0.0, 0.0),
        (5.0, 1.0, {"dual_clip": 3.0}, -1.2, 1.0, 0.0),
        (1.25, 1.0, {"clip_epsilon": 0.2}, -1.2, 1.0, 0.0),
        (1.25, 1.0, {"clip_epsilon": 0.2, "clip_epsilon_high": 0.28}, -1.25, 0.0, 0.0),
        (0.5, -1.0, {"clip_epsilon": 0.1, "clip_epsilon_high": 0.28}, 0.9, 1.0, 0.0),
    ],
)
def test_a27_clip_settings_reach_the_loss(
    ratio: float,
    advantage: float,
    settings: dict[str, Any],
    loss: float,
    clipped: float,
    dual: float,
    spread: Spread,
) -> None:
    actor = actor_of(spread("llama"))
    metrics = update_actor(actor, scored(actor, math.log(ratio), advantage), **settings)
    assert metrics["policy/loss"] == pytest.approx(loss, abs=1e-4)
    assert metrics["policy/clip_fraction"] == clipped
    assert metrics["policy/dual_clip_fraction"] == dual
    assert metrics["policy/ratio_max"] == pytest.approx(ratio, abs=1e-4)
    assert metrics["policy/approx_kl"] == pytest.approx(-math.log(ratio), abs=1e-5)
    assert metrics["policy/first_ratio_deviation"] == pytest.approx(abs(ratio - 1), abs=1e-4)


def test_entropy_and_kl_terms_reach_the_loss(spread: Spread) -> None:
    actor = actor_of(spread("llama"))
    batch = scored(actor, 0.0, advantage=0.0)
    mask = batch["response_mask"]
    entropy = batch["entropy"][mask].mean().item()
    bonus = update_actor(actor, batch, entropy_coef=0.5)
    assert bonus["policy/loss"] == pytest.approx(-0.5 * entropy, abs=1e-4)
    assert bonus["policy/entropy"] == pytest.approx(entropy, abs=1e-4)

    actor = actor_of(spread("llama"))
    batch = batch.with_columns(ref_logprobs=torch.where(mask, batch["old_logprobs"] - 0.5, 0.0))
    # k3 with ref - logp = -0.5: exp(-0.5) + 0.5 - 1.
    near = update_actor(actor, batch, kl_loss_coef=2.0, kl_loss_estimator="k3")
    assert near["policy/kl_loss"] == pytest.approx(0.106531, abs=1e-4)
    assert near["policy/loss"] == pytest.approx(2 * 0.106531, abs=1e-4)
    assert "policy/kl_loss" not in update_actor(actor, batch)


def test_a_single_on_policy_step_needs_no_old_logprobs(spread: Spread) -> None:
    metrics = update_actor(actor_of(spread("llama")), draw_batch())
    assert metrics["policy/ratio_mean"] == 1.0
    assert metrics["policy/first_ratio_deviation"] == 0.0
    assert metrics["policy/entropy"] > 0


def test_first_ratio_is_that_of_the_first_mini_batch_only(spread: Spread) -> None:
    actor = actor_of(spread("llama"), lr=1e-2)
    batch = actor.logprobs(draw_batch(), 0.7)
    metrics = update_actor(actor, batch, epochs=3, minibatch_size=2)
    # Packed with other rows than before, a log-prob of -64 differs by a few units in the last place.
    rounding = 8 * torch.finfo(torch.float32).eps * float(batch["old_logprobs"].abs().max())
    assert metrics["policy/first_ratio_deviation"] <= rounding < 1e-4
    assert metrics["policy/ratio_max"] > 1.01
    assert actor.engine.optimizer.steps_taken == 9


def test_masked_tokens_have_no_influence(spread: Spread) -> None:
    batch = draw_batch()
    mask = batch["response_mask"].clone()
    mask[0, 1:3] = False
    mask[4] = False
    holes = batch.with_columns(response_mask=mask)
    wild = holes.with_columns(
        advantages=torch.where(mask, holes["advantages"], math.nan),
        old_logprobs=torch.where(mask, -5.0, math.nan),
    )
    calm = holes.with_columns(old_logprobs=torch.where(mask, -5.0, 0.0))
    results = []
    for given in (calm, wild):
        actor = actor_of(spread("llama"))
        metrics = update_actor(actor, given)
        assert metrics["policy/skipped_steps"] == 0
        results.append((metrics, dict(actor.engine.trainable())))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(p, results[1][1][n]) for n, p in results[0][1].items())


def test_h06_bad_steps_are_counted_across_updates(spread: Spread) -> None:
    actor = actor_of(spread("llama"))
    bad = draw_batch().with_columns(advantages=torch.full((5, 6), math.nan))
    assert update_actor(actor, bad, max_bad_steps=2)["policy/skipped_steps"] == 1
    with pytest.raises(TrainingStopped, match=r"actor: 2 optimiser steps in a row.*step 1, samp"):
        update_actor(actor, bad, max_bad_steps=2)


def test_missing_columns_name_the_stage(spread: Spread) -> None:
    actor = actor_of(spread("llama"))
    with pytest.raises(KeyError, match=r"rollout needs columns \['seed'\]"):
        actor.generate(Batch({}, {"prompt_ids": [[1]]}), SamplingParams(max_tokens=1))
    batch = draw_batch()
    with pytest.raises(KeyError, match=r"actor update needs columns \['ref_logprobs'\]"):
        update_actor(actor, batch, kl_loss_coef=0.1)
    kept = {n: batch[n] for n in batch.names() if n != "advantages"}
    with pytest.raises(KeyError, match=r"actor update needs columns \['advantages'\]"):
        update_actor(actor, Batch(kept))
