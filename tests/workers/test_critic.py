"""The critic: values per response token and their update."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engines.conftest import value_model
from tests.workers.conftest import critic_of, draw_batch, update_critic
from verl.algorithms.aggregation import AGGREGATIONS
from verl.batch import Batch
from verl.workers.critic import CriticWorker
from verl.workers.layout import response_rows

Spread = Callable[[str], Path]


def test_values_fill_the_mask_and_nothing_else(spread: Spread) -> None:
    critic = critic_of(spread("llama"))
    batch = critic.values(draw_batch().with_columns(values=torch.zeros(5, 6)), bootstrap=True)
    mask = batch["response_mask"]
    assert (batch["values"][~mask] == 0).all()
    assert (batch["values"][mask] != 0).all()
    assert torch.allclose(critic.values(draw_batch())["values"], batch["values"], atol=1e-5)
    for i in range(5):
        p, r = int(batch["prompt_length"][i]), int(batch["response_length"][i])
        hidden = critic.engine.model.model(batch["input_ids"][i : i + 1, : p + r])
        whole = critic.engine.model.score(hidden.last_hidden_state)[0, :, 0]
        assert torch.allclose(batch["values"][i, :r], whole[p - 1 : p + r - 1], atol=1e-4)
        assert batch["last_value"][i].item() == pytest.approx(whole[-1].item(), abs=1e-4)


def test_last_value_of_a_row_without_valid_tokens(spread: Spread) -> None:
    batch = draw_batch()
    mask = batch["response_mask"].clone()
    mask[1] = False
    masked = critic_of(spread("llama")).values(batch.with_columns(response_mask=mask), True)
    full = critic_of(spread("llama")).values(batch, bootstrap=True)
    assert torch.allclose(masked["last_value"], full["last_value"], atol=1e-5)
    assert (masked["values"][1] == 0).all()


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_a25_parameters_do_not_depend_on_the_micro_batch(mode: str, spread: Spread) -> None:
    results = []
    for budget in (1, 12, 1000):
        critic = critic_of(spread("llama"), budget, lr=0.5e4, adam_eps=1e4)
        before = {n: p.detach().clone() for n, p in critic.engine.trainable()}
        metrics = update_critic(critic, draw_batch(), aggregation=mode)
        results.append(({n: p - before[n] for n, p in critic.engine.trainable()}, metrics))
    (first, metrics), *others = results
    largest = max(float(change.abs().max()) for change in first.values())
    assert largest > 1e-3
    for changes, logged in others:
        assert all(
            torch.allclose(c, first[n], atol=1e-5 * max(1, largest)) for n, c in changes.items()
        )
        assert logged == pytest.approx(metrics, rel=1e-5, abs=1e-5)


def test_a29_value_clip_reaches_the_loss(spread: Spread) -> None:
    critic = critic_of(spread("llama"))
    batch = critic.values(draw_batch())
    mask = batch["response_mask"]
    now = batch["values"]
    # v = old + 1 and R = old + 3: plain 0.5 * 2^2, clipped at old + 0.2 0.5 * 2.8^2.
    batch = batch.with_columns(
        values=torch.where(mask, now - 1, 0.0), returns=torch.where(mask, now + 2, 0.0)
    )
    clipped = update_critic(critic, batch, value_clip=0.2)
    assert clipped["value/loss"] == pytest.approx(3.92, abs=1e-3)
    assert clipped["value/clip_fraction"] == 1.0
    plain = update_critic(critic_of(spread("llama")), batch, value_clip=None)
    assert plain["value/loss"] == pytest.approx(2.0, abs=1e-3)
    assert plain["value/clip_fraction"] == 0.0


def test_h08_bfloat16_critic_is_finite_with_one_token_and_long_responses(spread: Spread) -> None:
    engine = value_model(spread("llama"), dtype=torch.bfloat16)
    assert engine.model.score.weight.dtype == torch.float32
    values = engine.values(response_rows(draw_batch(), with_labels=False))
    assert values.dtype == torch.float32
    assert values.isfinite().all()
    exact = value_model(spread("llama")).values(response_rows(draw_batch(), with_labels=False))
    assert (values - exact).abs().mean() < 0.1 * exact.abs().mean()


def test_missing_columns_name_the_stage(spread: Spread) -> None:
    batch = draw_batch()
    kept = Batch({n: batch[n] for n in batch.names() if n != "returns"})
    with pytest.raises(KeyError, match=r"critic update needs columns \['returns'\]"):
        update_critic(critic_of(spread("llama")), kept)


def test_h06_nan_returns_do_not_touch_the_critic(spread: Spread) -> None:
    critic = critic_of(spread("llama"))
    before = {n: p.detach().clone() for n, p in critic.engine.trainable()}
    bad = draw_batch().with_columns(returns=torch.full((5, 6), math.nan))
    assert update_critic(critic, bad)["value/skipped_steps"] == 1
    assert all(torch.equal(p, before[n]) for n, p in critic.engine.trainable())


def test_state_survives_a_checkpoint(spread: Spread, tmp_path: Path) -> None:
    straight, resumed = critic_of(spread("llama")), critic_of(spread("llama"))
    update_critic(straight, draw_batch())
    straight.save_state(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["critic.safetensors"]
    resumed.load_state(tmp_path)
    for critic in (straight, resumed):
        update_critic(critic, draw_batch())
    mine = dict(resumed.engine.trainable())
    assert all(torch.equal(p, mine[n]) for n, p in straight.engine.trainable())


def test_d08_lost_state_and_wrong_order_are_errors(spread: Spread, tmp_path: Path) -> None:
    from verl.errors import CheckpointError

    with pytest.raises(CheckpointError, match=r"has no critic\.safetensors"):
        critic_of(spread("llama")).load_state(tmp_path)
    bare = CriticWorker(value_model(spread("llama")))
    with pytest.raises(CheckpointError, match="critic has no optimiser yet"):
        bare.save_state(tmp_path)
    (tmp_path / "critic.safetensors").touch()
    with pytest.raises(CheckpointError, match="prepare_training comes before load_state"):
        bare.load_state(tmp_path)
    with pytest.raises(RuntimeError, match="without an optimiser"):
        bare.engine.step()
