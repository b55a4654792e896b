"""The numbers of the plan, against numbers counted by hand and models counted by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl.config.schema import ActorModel, Config, Lora
from verl.errors import DataError, ModelError, PlacementError
from verl.models.loading import load_causal_lm
from verl.trainer.plan import _trained_parameters, plan_lines, step_sizes


@pytest.mark.parametrize(
    ("rows", "batch", "steps", "sizes"),
    [
        (10, 4, 6, [4, 4, 2, 4, 4, 2]),
        (10, 4, 4, [4, 4, 2, 4]),
        (8, 4, 3, [4, 4, 4]),
        (3, 4, 2, [3, 3]),
        (5, 1, 5, [1, 1, 1, 1, 1]),
    ],
)
def test_the_samples_of_each_step(rows: int, batch: int, steps: int, sizes: list[int]) -> None:
    assert step_sizes(rows, batch, steps) == sizes


@pytest.fixture
def planned(config: Config, write_rows: Any) -> Config:
    """Ten prompts in batches of 4, three times, and three held out."""
    config.data.train = write_rows("train", [{"prompt": f"{n}?"} for n in range(10)])
    config.data.eval = write_rows("eval", [{"prompt": f"{n}!"} for n in range(3)])
    config.train.num_epochs, config.train.ppo.minibatch_size = 3, 2
    config.eval.every = 4
    return config


def test_the_arithmetic_of_ppo(planned: Config) -> None:
    text = "\n".join(plan_lines(planned, "ppo"))
    assert f"{planned.data.train}: 10 rows, 4 prompts per step, 3 steps per epoch" in text
    # At steps 0, 4, 8 and 9.
    assert f"{planned.data.eval}: 3 rows, 4 times" in text
    # 2 epochs of (2, 2, 1) mini-batches make 10 optimiser steps per pass over the rows.
    assert "9 PPO steps = 30 samples, 4 optimiser steps each" in text
    assert "(2 epochs in mini-batches of 2) = 30 for the critic" in text
    assert "at most 240 sampled (response_length 8), prompts up to 88" in text


def test_the_number_of_evaluations_without_the_one_at_the_start(planned: Config) -> None:
    planned.eval.at_start = False
    assert "3 rows, 3 times" in "\n".join(plan_lines(planned, "ppo"))
    planned.eval.every = 0
    assert "3 rows, 1 time\n" in "\n".join(plan_lines(planned, "ppo"))


def test_the_steps_of_the_actor_after_the_critic_warm_up(planned: Config) -> None:
    planned.train.ppo.critic_warmup_steps = 3
    text = "\n".join(plan_lines(planned, "ppo"))
    assert "the actor takes 20, after 3 steps of critic warm-up" in text


def test_total_steps_end_a_run_inside_an_epoch_and_never_lengthen_it(planned: Config) -> None:
    planned.train.total_steps = 4
    assert "4 PPO steps = 14 samples" in "\n".join(plan_lines(planned, "ppo"))
    planned.train.total_steps = 100
    assert "9 PPO steps = 30 samples" in "\n".join(plan_lines(planned, "ppo"))


def line_of(lines: list[str], role: str) -> str:
    return next(line for line in lines if line.startswith(f"  {role} "))


def test_parameters_are_those_of_the_loaded_models(planned: Config, tiny_llama: Path) -> None:
    from verl.trainer import plan

    loaded = load_causal_lm(planned.model.actor, "actor").model
    counted = sum(parameter.numel() for parameter in loaded.parameters())
    roles = {role.role: role for role in plan._roles(planned, "ppo")}
    assert roles["actor"].parameters == roles["actor"].trained == counted
    assert roles["critic"].parameters == counted - loaded.lm_head.weight.numel()
    # Weights, gradients and two moments, 4 bytes each.
    assert roles["actor"].bytes == 16 * counted
    assert roles["reward_model"].bytes == 4 * roles["reward_model"].parameters
    # Every weight of the actor is trained, so the reference shares none.
    assert roles["ref_policy"].bytes == 4 * counted
    planned.model.actor.train_layers = 1
    roles = {role.role: role for role in plan._roles(planned, "ppo")}
    block = sum(p.numel() for p in loaded.model.layers[0].parameters())
    assert roles["actor"].trained == pytest.approx(block, rel=0.01)
    assert roles["ref_policy"].bytes == 4 * roles["actor"].trained


def test_adapters_of_the_top_blocks_count_by_blocks() -> None:
    # 30 blocks of 12 x 4 x 4 weights under 100 of embeddings: 96 per block with rank 1.
    total, block, outside = 30 * 192 + 100, 192, 100
    every = _trained_parameters(ActorModel(lora=Lora(rank=1)), total, block, outside)
    assert every == 30 * 96
    top = ActorModel(lora=Lora(rank=1), train_layers=6)
    assert _trained_parameters(top, total, block, outside) == 6 * 96
    assert _trained_parameters(ActorModel(train_layers=6), total, block, outside) == 6 * block
    assert _trained_parameters(ActorModel(), total, block, outside) == total


def test_each_stage_plans_its_own_roles(planned: Config) -> None:
    names = ("actor", "critic", "ref_policy", "reward_model")
    planned.train.ppo.kl_coef = 0
    lines = plan_lines(planned, "ppo")
    planned_roles = [name for name in names if any(x.startswith(f"  {name} ") for x in lines)]
    assert planned_roles == ["actor", "critic", "reward_model"]


def test_sft_and_reward_model_count_tokens_per_conversation(
    planned: Config, write_rows: Any, tiny_llama: Path
) -> None:
    said, reply = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    planned.data.train = write_rows("sft", [{"messages": said + reply}] * 10)
    planned.data.eval = None
    text = "\n".join(plan_lines(planned, "sft"))
    assert "9 optimiser steps" in text and "at most 2,880 (seq_length 96)" in text
    row = {"prompt": said, "chosen": reply, "rejected": [{"role": "assistant", "content": "c"}]}
    planned.data.train = write_rows("rm", [row] * 10)
    text = "\n".join(plan_lines(planned, "rm"))
    assert "10 rows, 4 pairs per step" in text and "at most 5,760" in text


def test_what_would_stop_the_run_stops_the_plan(planned: Config, tmp_path: Path) -> None:
    planned.data.eval = str(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match=r"data\.eval: .*nowhere\.jsonl"):
        plan_lines(planned, "ppo")
    planned.model.critic.pretrained_path = str(tmp_path / "no-model")
    with pytest.raises(ModelError, match=r"no-model.*no such folder"):
        plan_lines(planned, "ppo")
    planned.resource.actor = {"gpu": [97]}
    with pytest.raises(PlacementError, match=r"actor gpu\[97\]"):
        plan_lines(planned, "ppo")
