"""Workers from the configuration: defaults between roles, sharing, messages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import save_tiny
from tests.engines.conftest import CPU
from verl.batch import Batch
from verl.config.schema import Config
from verl.errors import ConfigError, ModelError
from verl.models.chat import prompt_ids, stop_ids
from verl.models.loading import load_value_model, save_model
from verl.rollout.base import SamplingParams
from verl.workers.build import (
    build_actor,
    build_critic,
    build_reference,
    build_reward,
    build_trainable,
    describe_load,
)
from verl.workers.create import create_llm_model


@pytest.fixture
def config(tiny_llama: Path, tiny_reward: Path) -> Config:
    config = Config()
    config.model.actor.pretrained_path = str(tiny_llama)
    config.model.reward_model.pretrained_path = str(tiny_reward)
    for section in (config.model.actor, config.model.critic):
        section.dtype = "float32"
    config.model.ref_policy.inference_dtype = "float32"
    return config


def test_actor_samples_and_scores_with_one_set_of_weights(config: Config) -> None:
    actor = build_actor(config, CPU)
    prompt = prompt_ids(actor.tokenizer, "hi")
    params = SamplingParams(max_tokens=4, stop_token_ids=stop_ids(actor.tokenizer))
    prompts = Batch({}, {"prompt_ids": [prompt], "seed": [1]})
    first = actor.generate(prompts, params)
    with torch.no_grad():
        actor.engine.model.lm_head.weight[7] += 100 * actor.engine.model.lm_head.weight[7].sign()
    again = actor.logprobs(actor.generate(prompts, params), 1.0)
    assert first["input_ids"].tolist() != again["input_ids"].tolist()
    assert torch.allclose(again["old_logprobs"], again["rollout_logprobs"], atol=1e-3)
    assert actor.parameter_count()[0] == actor.parameter_count()[1]


def test_reward_model_of_the_same_trunk_shares_the_actors_rows(
    config: Config, tiny_llama: Path, tmp_path: Path
) -> None:
    section = config.model.reward_model.model_copy(update={"pretrained_path": str(tiny_llama)})
    save_model(load_value_model(section, "reward_model", seed=3), tmp_path / "rm")
    config.model.reward_model.pretrained_path = str(tmp_path / "rm")
    config.model.reward_model.inference_dtype = "float32"
    config.model.actor.train_layers = 1
    actor = build_actor(config, CPU)
    prompt = [{"role": "user", "content": "hi"}]
    batch = Batch({}, {"prompt": [prompt], "prompt_ids": [prompt_ids(actor.tokenizer, prompt)],
                       "seed": [1]})  # fmt: skip
    stop = stop_ids(actor.tokenizer)
    batch = actor.generate(batch, SamplingParams(max_tokens=4, stop_token_ids=stop))
    batch = batch.with_columns(response=["yes"])
    alone = build_reward(config, CPU).score(batch)["score"]
    reward = build_reward(config, CPU, actor)
    assert reward.source.engine.prefix.rows is actor.engine.prefix.rows
    assert torch.allclose(reward.score(batch)["score"], alone, atol=1e-5)
    assert len(actor.engine.prefix.rows) == 1
    actor.generate(batch, SamplingParams(max_tokens=4, stop_token_ids=stop))
    assert len(actor.engine.prefix.rows) == 0


def test_critic_without_path_is_the_reward_model(config: Config, tiny_llama: Path) -> None:
    from verl.models.loading import load_reward_model

    reward = load_reward_model(config.model.reward_model).model
    critic = build_critic(config, CPU)
    assert torch.equal(critic.engine.model.score.weight, reward.score.weight)
    assert config.model.critic.pretrained_path is None  # the configuration itself is not changed
    config.model.critic.pretrained_path = str(tiny_llama)
    assert not torch.equal(build_critic(config, CPU).engine.model.score.weight, reward.score.weight)


def test_value_head_follows_the_run_seed(config: Config, tiny_llama: Path) -> None:
    config.model.critic.pretrained_path = str(tiny_llama)
    first = build_critic(config, CPU).engine.model.score.weight
    assert torch.equal(build_critic(config, CPU).engine.model.score.weight, first)
    config.train.seed = 1
    assert not torch.equal(build_critic(config, CPU).engine.model.score.weight, first)


def test_reference_shares_the_actors_frozen_tensors(config: Config) -> None:
    config.model.actor.train_layers = 1
    actor = build_actor(config, CPU)
    reference = build_reference(config, CPU, actor)
    mine = dict(reference.engine.model.named_parameters())
    for name, parameter in actor.engine.model.named_parameters():
        assert (mine[name] is parameter) == (not parameter.requires_grad)
    assert reference.tokenizer is actor.tokenizer
    assert not any(p.requires_grad for p in mine.values())


def test_reference_with_its_own_path_or_precision_is_loaded(
    config: Config, tmp_path: Path, tiny_qwen2: Path
) -> None:
    actor = build_actor(config, CPU)
    config.model.ref_policy.pretrained_path = str(tiny_qwen2)
    assert type(build_reference(config, CPU, actor).engine.model).__name__ == "Qwen2ForCausalLM"
    config.model.ref_policy.pretrained_path = None
    config.model.ref_policy.inference_dtype = "bfloat16"
    half = build_reference(config, CPU, actor)
    assert half.engine.model.lm_head.weight.dtype == torch.bfloat16
    assert actor.engine.model.lm_head.weight.dtype == torch.float32
    config.model.ref_policy.inference_dtype = "float32"
    alone = build_reference(config, CPU)  # without an actor: the actor's start weights
    assert torch.equal(alone.engine.model.lm_head.weight, actor.engine.model.lm_head.weight)
    assert not any(p.requires_grad for p in alone.engine.model.parameters())


def test_reference_gives_its_column(config: Config) -> None:
    actor = build_actor(config, CPU)
    batch = Batch(
        {
            "input_ids": torch.tensor([[5, 6, 7, 8]]),
            "prompt_length": torch.tensor([2]),
            "response_length": torch.tensor([2]),
            "response_mask": torch.tensor([[True, True]]),
        }
    )
    reference = build_reference(config, CPU, actor).logprobs(batch, 0.7)["ref_logprobs"]
    assert torch.equal(reference, actor.logprobs(batch, 0.7)["old_logprobs"])


def test_trainable_models_of_sft_and_reward_modelling(config: Config, tiny_llama: Path) -> None:
    assert build_trainable(config, "actor", CPU).loaded.kind == "causal"
    config.model.reward_model.pretrained_path = str(tiny_llama)
    engine = build_trainable(config, "reward_model", CPU)
    assert engine.loaded.kind == "value"
    assert dict(engine.trainable())["score.weight"].requires_grad


def test_export_writes_a_model_the_next_stage_loads(config: Config, tmp_path: Path) -> None:
    actor = build_actor(config, CPU)
    actor.export(tmp_path)
    config.model.actor.pretrained_path = str(tmp_path)
    assert torch.equal(
        build_actor(config, CPU).engine.model.lm_head.weight, actor.engine.model.lm_head.weight
    )


def test_load_is_announced_with_the_path_that_is_used(config: Config, tmp_path: Path) -> None:
    actor, reward = config.model.actor.pretrained_path, config.model.reward_model.pretrained_path
    assert describe_load(config, "actor") == f"Loading {actor} for Actor..."
    assert describe_load(config, "critic") == f"Loading {reward} for Critic..."
    assert describe_load(config, "ref_policy") == f"Loading {actor} for Reference policy..."
    with pytest.raises(ModelError, match=r"model\.actor\.pretrained_path is not set"):
        describe_load(Config(), "actor")


def test_role_made_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_tiny(tmp_path)
    group = create_llm_model("actor", {"pretrained_path": str(path), "dtype": "float32"})
    assert group.role == "actor"
    assert capsys.readouterr().out == f"Loading {path} for Actor...\n"
    assert group.parameter_count()[0] > 10_000
    with pytest.raises(ConfigError, match="'judge' is no role; roles are actor, critic"):
        create_llm_model("judge")  # type: ignore[arg-type]
    bare = create_llm_model(model_name="some/model")
    assert bare.model_name == "some/model"
    with pytest.raises(ConfigError, match=r"'some/model' is not loaded: pass model_type \(actor"):
        bare.generate()
