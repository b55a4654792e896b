"""The PPO step: its stages, what each metric is, and which settings change what."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from verl.batch import Batch
from verl.config.check import check
from verl.config.schema import Config
from verl.errors import ConfigError, DataError, TrainingStopped
from verl.monitor.glossary import GLOSSARY
from verl.trainer.ppo import PPOTrainer
from verl.workers.create import create_llm_model


def test_a_step_reports_every_stage_under_names_of_the_glossary(
    config: Config, trainer_of: Any, prompts: list[str]
) -> None:
    trainer = trainer_of(config)
    stages: list[str] = []
    trainer.on_stage = stages.append
    metrics = trainer.step(prompts)
    assert stages == [
        "rollout", "score", "old_logprobs", "reference", "values", "advantages",
        "update_critic", "update_actor",
    ]  # fmt: skip
    assert set(metrics) <= set(GLOSSARY)
    assert {f"time/{stage}" for stage in stages} <= set(metrics)
    assert trainer.steps_done == 1


# --- KL: in the reward, in the loss, in both, in neither ------------------------------------------


def seven_tokens(config: Config) -> None:
    config.rollout.ignore_eos = True
    config.data.response_length = 7


@pytest.mark.parametrize(("in_reward", "in_loss"), [(0.1, 0), (0, 0.5), (0.1, 0.5), (0, 0)])
def test_kl_goes_where_its_coefficients_say_and_nowhere_else(
    in_reward: float, in_loss: float, config: Config, trainer_of: Any, prompts: list[str],
    tiny_qwen2: Any,
) -> None:  # fmt: skip
    seven_tokens(config)
    config.train.ppo.kl_coef, config.train.ppo.kl_loss_coef = in_reward, in_loss
    config.model.ref_policy.pretrained_path = str(tiny_qwen2)
    trainer = trainer_of(config)
    batch = trainer.compute_rewards(trainer.rollout(prompts))
    assert ("ref_logprobs" in batch) == bool(in_reward or in_loss)
    penalties = batch["token_rewards"].clone()
    penalties[:, -1] -= batch["score"]
    if in_reward:
        expected = -in_reward * (batch["old_logprobs"] - batch["ref_logprobs"])
        assert expected.abs().min() > 1e-4
        torch.testing.assert_close(penalties, expected, atol=1e-6, rtol=1e-5)
    else:
        assert penalties.abs().max() == 0
    metrics = trainer.update(trainer.compute_advantages(batch))
    assert ("policy/kl_loss" in metrics) == bool(in_loss)
    assert ("kl/sequence_mean" in metrics) == bool(in_reward or in_loss)


def test_a_kl_loss_moves_the_actor_and_a_coefficient_of_zero_does_not(
    config: Config, trainer_of: Any, prompts: list[str], tiny_qwen2: Any, weights: Any,
    same_weights: Any,
) -> None:  # fmt: skip
    config.model.ref_policy.pretrained_path = str(tiny_qwen2)
    config.train.ppo.kl_coef = 0
    after = []
    for coefficient in (0.0, 1.0):
        config.train.ppo.kl_loss_coef = coefficient
        trainer = trainer_of(config)
        trainer.step(prompts)
        after.append(weights(trainer.actor))
    assert not same_weights(*after)


def test_kl_in_both_places_and_in_neither_are_warned_about(config: Config) -> None:
    config.data.train = config.data.eval = "rows.jsonl"
    config.train.ppo.kl_coef, config.train.ppo.kl_loss_coef = 0.1, 0.1
    assert any("penalised twice" in warning for warning in check(config, "ppo"))
    config.train.ppo.kl_coef = config.train.ppo.kl_loss_coef = 0
    assert any("no reference model is loaded" in warning for warning in check(config, "ppo"))


@pytest.fixture
def two_tokens(config: Config) -> Config:
    """Responses of exactly two tokens, one per step."""
    config.rollout.ignore_eos = True
    config.data.response_length, config.data.batch_size = 2, 1
    config.train.ppo.kl_coef = 0.1
    return config


def test_score_shaped_return_and_kl_are_three_numbers_under_three_names(
    two_tokens: Config, trainer_of: Any, scores_of: Any, reference_at: Any
) -> None:
    trainer = trainer_of(
        two_tokens, reward_model=scores_of(2.0), ref_policy=reference_at([[0.2, 0.4]])
    )
    batch = trainer.compute_rewards(trainer.rollout(["Hi"]))
    assert batch["score"].tolist() == [2.0]
    assert batch["rewards"].tolist() == [2.0]
    assert batch["kl"][0].tolist() == pytest.approx([0.2, 0.4], abs=1e-5)
    assert batch["token_rewards"][0].tolist() == pytest.approx([-0.02, 1.96], abs=1e-5)
    metrics = trainer.metrics
    assert metrics["score/mean"] == 2.0
    assert metrics["reward/mean"] == 2.0
    assert metrics["reward/shaped_return_mean"] == pytest.approx(1.94, abs=1e-5)
    assert metrics["kl/token_mean"] == pytest.approx(0.3, abs=1e-5)
    assert metrics["kl/sequence_mean"] == pytest.approx(0.6, abs=1e-5)
    assert metrics["kl/coef"] == 0.1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_the_controller_is_fed_the_sequence_kl_that_is_logged(
    estimator: Any, two_tokens: Config, trainer_of: Any, scores_of: Any, reference_at: Any
) -> None:
    ppo = two_tokens.train.ppo
    ppo.kl_controller, ppo.kl_target, ppo.kl_horizon = "adaptive", 10.0, 4
    ppo.kl_estimator = estimator
    trainer = trainer_of(
        two_tokens, reward_model=scores_of(1.0), ref_policy=reference_at([[5.0, 6.0]])
    )
    metrics = trainer.step(["Hi"])
    assert metrics["kl/sequence_mean"] == pytest.approx(11.0, abs=1e-4)
    # 11 / 10 - 1 = 0.1, and one sample is a quarter of the horizon.
    assert trainer.kl_controller.value == pytest.approx(0.1 * 1.025, abs=1e-6)
    assert metrics["kl/coef"] == 0.1


def test_the_coefficient_rises_while_the_kl_is_above_its_target(
    two_tokens: Config, trainer_of: Any, scores_of: Any, reference_at: Any
) -> None:
    ppo = two_tokens.train.ppo
    ppo.kl_controller, ppo.kl_target, ppo.kl_horizon = "adaptive", 6.0, 1
    trainer = trainer_of(
        two_tokens, reward_model=scores_of(1.0), ref_policy=reference_at([[4.0, 8.0]])
    )
    assert [trainer.step(["Hi"])["kl/coef"] for _ in range(3)] == pytest.approx([0.1, 0.12, 0.144])


# --- from scores to shaped scores -----------------------------------------------------------------


@pytest.mark.parametrize(("mode", "expected"), [("subtract", 1.0), ("replace", -1.0)])
def test_a_missing_eos_is_subtracted_or_replaces_the_score(
    mode: Any, expected: float, two_tokens: Config, trainer_of: Any, scores_of: Any
) -> None:
    two_tokens.train.ppo.missing_eos_penalty = 1.0
    two_tokens.train.ppo.missing_eos_mode = mode
    trainer = trainer_of(two_tokens, reward_model=scores_of(2.0))
    batch = trainer.compute_rewards(trainer.rollout(["Hi"]))
    assert batch["finish_reason"] == ["length"]
    assert batch["shaped_score"].tolist() == [expected]
    assert trainer.metrics["score/mean"] == 2.0
    assert trainer.metrics["reward/mean"] == expected


def shaped(trainer: PPOTrainer, *steps: list[str]) -> list[list[float]]:
    return [trainer.compute_rewards(trainer.rollout(p))["shaped_score"].tolist() for p in steps]


def test_scores_are_normalised_within_the_batch_over_the_run_or_by_given_moments(
    config: Config, trainer_of: Any, scores_of: Any
) -> None:
    two, ppo = ["Hi", "Ho"], config.train.ppo
    ppo.kl_coef = 0
    source = scores_of(1.0, 3.0)
    assert shaped(trainer_of(config, reward_model=source), two) == [[1.0, 3.0]]
    ppo.normalize_reward = "batch"
    root = 0.5**0.5
    assert shaped(trainer_of(config, reward_model=source), two)[0] == pytest.approx([-root, root])
    ppo.normalize_reward = "running"
    trainer = trainer_of(config, reward_model=source)
    first, second = shaped(trainer, two, two)
    assert first == pytest.approx([-root, root])
    # 1, 3, 1, 3: mean 2, variance 4/3 with n - 1.
    assert second == pytest.approx([-(0.75**0.5), 0.75**0.5])
    ppo.normalize_reward = "reference"
    trainer = trainer_of(config, reward_model=source)
    with pytest.raises(ConfigError, match=r"score_statistics\.json"):
        shaped(trainer, two)
    trainer.reference_moments = (1.0, 4.0)
    assert shaped(trainer, two) == [[0.0, 0.5]]
    ppo.reward_clip = 0.25
    trainer = trainer_of(config, reward_model=source)
    trainer.reference_moments = (1.0, 4.0)
    assert shaped(trainer, two) == [[0.0, 0.25]]
    assert trainer.metrics["score/max"] == 3.0


def test_the_overlong_penalty_grows_to_the_length_limit(
    two_tokens: Config, trainer_of: Any, scores_of: Any
) -> None:
    two_tokens.train.ppo.overlong_buffer, two_tokens.train.ppo.overlong_penalty = 1, 0.5
    assert shaped(trainer_of(two_tokens, reward_model=scores_of(2.0)), ["Hi"]) == [[1.5]]


def test_a_score_that_is_no_number_is_an_error_that_names_the_sample(
    config: Config, trainer_of: Any, scores_of: Any
) -> None:
    trainer = trainer_of(config, reward_model=scores_of(1.0, float("nan")))
    with pytest.raises(TrainingStopped, match=r"'given' gave nan for sample 1"):
        trainer.step(["Hi", "Ho"])
    assert trainer.steps_done == 0


# --- advantages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bootstrap", [False, True])
def test_only_responses_that_the_engine_cut_go_on_with_the_critic_s_value(bootstrap: bool) -> None:
    ppo = {"bootstrap_truncated": bootstrap, "whiten_advantage": False, "lam": 1.0}
    trainer = PPOTrainer(config={"train": {"ppo": ppo}})
    batch = Batch(
        {
            "token_rewards": torch.zeros(2, 5),
            "values": torch.zeros(2, 5),
            "response_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool(),
            "last_value": torch.tensor([7.0, 9.0]),
        },
        {"finish_reason": ["length", "stop"]},
    )
    returns = trainer.compute_advantages(batch)["returns"]
    seven = 7.0 if bootstrap else 0.0
    assert returns.tolist() == [[seven, seven, seven, 0, 0], [0, 0, 0, 0, 0]]


def test_whitened_advantages_have_mean_zero_and_variance_one_where_the_mask_is() -> None:
    trainer = PPOTrainer(config={})
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    columns = {"token_rewards": torch.randn(2, 3), "values": torch.randn(2, 3)}
    batch = Batch({**columns, "response_mask": mask}, {"finish_reason": ["stop", "stop"]})
    valid = trainer.compute_advantages(batch)["advantages"][mask]
    assert float(valid.mean()) == pytest.approx(0, abs=1e-6)
    assert float(valid.var()) == pytest.approx(1, abs=1e-5)
    assert trainer.metrics["advantages/std"] != pytest.approx(1, abs=1e-3)


# --- updates --------------------------------------------------------------------------------------


def test_one_on_policy_optimiser_step_needs_no_old_logprobs(
    config: Config, trainer_of: Any, prompts: list[str]
) -> None:
    config.train.ppo.epochs, config.rollout.temperature = 1, 0.7
    trainer = trainer_of(config)
    stages: list[str] = []
    trainer.on_stage = stages.append
    metrics = trainer.step(prompts)
    assert "old_logprobs" not in stages
    assert metrics["policy/first_ratio_deviation"] == 0
    assert metrics["policy/ratio_mean"] == 1
    assert metrics["policy/entropy"] > 0
    assert metrics["kl/sequence_mean"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("minibatch", [None, 2])
def test_with_several_optimiser_steps_the_first_ratio_is_one(
    minibatch: int | None, config: Config, trainer_of: Any, prompts: list[str]
) -> None:
    config.train.ppo.minibatch_size, config.rollout.temperature = minibatch, 0.7
    trainer = trainer_of(config)
    stages: list[str] = []
    trainer.on_stage = stages.append
    metrics = trainer.step(prompts)
    assert "old_logprobs" in stages
    assert metrics["policy/first_ratio_deviation"] < 1e-4
    assert metrics["policy/ratio_max"] > 1.001
    assert metrics["rollout/logprob_gap_max"] < 1e-4


def test_trusted_logprobs_are_the_samplers_and_are_not_computed_again(
    config: Config, trainer_of: Any, prompts: list[str]
) -> None:
    config.train.ppo.minibatch_size, config.rollout.temperature = 2, 0.7
    config.rollout.trust_logprobs = True
    trainer = trainer_of(config)
    stages: list[str] = []
    trainer.on_stage = stages.append
    batch = trainer.compute_rewards(trainer.rollout(prompts))
    assert "old_logprobs" not in stages
    assert torch.equal(batch["old_logprobs"], batch["rollout_logprobs"])
    trainer.update(trainer.compute_advantages(batch))
    assert 0 < trainer.metrics["policy/first_ratio_deviation"] < 1e-4
    assert trainer.metrics["policy/entropy"] > 0
    assert "rollout/logprob_gap_max" not in trainer.metrics


def test_one_epoch_in_two_minibatches_is_not_a_single_on_policy_step(
    config: Config, trainer_of: Any, prompts: list[str]
) -> None:
    config.train.ppo.epochs, config.train.ppo.minibatch_size = 1, 2
    trainer = trainer_of(config)
    batch = trainer.compute_rewards(trainer.rollout(prompts))
    assert "old_logprobs" in batch


def test_during_the_critic_warm_up_the_actor_stays_bitwise_the_same(
    config: Config, trainer_of: Any, prompts: list[str], weights: Any, same_weights: Any
) -> None:
    config.train.ppo.critic_warmup_steps = 1
    trainer = trainer_of(config, total_steps=2)
    actor, critic = weights(trainer.actor), weights(trainer.critic)
    metrics = trainer.step(prompts)
    assert same_weights(actor, weights(trainer.actor))
    assert not same_weights(critic, weights(trainer.critic))
    assert "policy/loss" not in metrics and "value/loss" in metrics
    metrics = trainer.step(prompts)
    assert not same_weights(actor, weights(trainer.actor))
    # The actor's schedule starts when its training does: 2 optimiser steps, the last at half.
    assert metrics["policy/lr"] == pytest.approx(0.5e-3)
    assert metrics["value/lr"] == pytest.approx(1e-2 / 4)


@pytest.mark.parametrize(("given", "rate"), [(None, 1e-2), (5e-4, 5e-4)])
def test_the_critic_has_a_learning_rate_of_its_own(
    given: float | None, rate: float, config: Config, trainer_of: Any, prompts: list[str]
) -> None:
    config.train.ppo.critic_lr = given
    metrics = trainer_of(config).step(prompts)
    assert metrics["policy/lr"] == 1e-3
    assert metrics["value/lr"] == pytest.approx(rate)


def test_the_learning_rate_ends_with_the_run_though_epochs_end_with_a_smaller_batch(
    config: Config, trainer_of: Any, prompts: list[str]
) -> None:
    config.train.ppo.minibatch_size = 2
    trainer = trainer_of(config)
    trainer = PPOTrainer(
        trainer.actor, trainer.critic, trainer.ref_policy, trainer.reward_model, config,
        total_steps=3, step_samples=[4, 4, 2],
    )  # fmt: skip
    rates = [trainer.step(prompts[:n])["policy/lr"] for n in (4, 4, 2)]
    # 4 + 4 + 2 optimiser steps; the rate of the last is a tenth of the peak.
    assert rates == pytest.approx([0.7e-3, 0.3e-3, 0.1e-3])


def test_a_single_bad_gradient_is_skipped_and_counted(
    config: Config, trainer_of: Any, prompts: list[str], weights: Any, same_weights: Any
) -> None:
    config.train.ppo.epochs = 1
    trainer = trainer_of(config)
    parameter = trainer.actor.workers[0].engine.trainable()[0][1]
    hook = parameter.register_hook(lambda gradient: gradient * float("nan"))
    before = weights(trainer.actor)
    assert trainer.step(prompts)["policy/skipped_steps"] == 1
    assert same_weights(before, weights(trainer.actor))
    hook.remove()
    assert trainer.step(prompts)["policy/skipped_steps"] == 0
    assert not same_weights(before, weights(trainer.actor))
    assert all(torch.isfinite(tensor).all() for tensor in weights(trainer.actor).values())


# --- roles ----------------------------------------------------------------------------------------


def test_missing_roles_are_named() -> None:
    trainer = PPOTrainer(config={})
    with pytest.raises(ConfigError, match="has no actor; make it with create_llm_model"):
        trainer.rollout(["Hi"])
    with pytest.raises(ConfigError, match="has no actor, critic, reward_model"):
        trainer.compute_rewards(Batch({}, {"prompt": ["Hi"]}))


def test_a_kl_term_without_a_reference_is_an_error(
    config: Config, trainer_of: Any, prompts: list[str]
) -> None:
    trainer = trainer_of(config, ref_policy=None)
    with pytest.raises(ConfigError, match="has no ref_policy"):
        trainer.step(prompts)


def test_a_trained_model_cannot_be_its_own_reference(config: Config) -> None:
    config.train.ppo.kl_coef = 0.1
    actor = create_llm_model("actor", config.model.actor)
    critic = create_llm_model("critic", config.model.critic)
    for reference in (actor, critic):
        with pytest.raises(ConfigError, match="same object"):
            PPOTrainer(actor, critic, reference, config=config)


@pytest.mark.parametrize("train_layers", [None, 1])
def test_the_reference_stays_where_it_was_while_the_actor_leaves(
    train_layers: int | None, config: Config, trainer_of: Any, prompts: list[str], weights: Any,
    same_weights: Any,
) -> None:  # fmt: skip
    from verl.cluster.worker_group import WorkerGroup
    from verl.workers.build import build_reference

    config.model.actor.train_layers = train_layers
    actor = create_llm_model("actor", config.model.actor)
    worker = build_reference(config, torch.device("cpu"), actor.workers[0])
    reference = WorkerGroup("ref_policy", [worker])
    before = weights(reference)
    trainer = trainer_of(config, actor=actor, ref_policy=reference)
    first, _, third = [trainer.step(prompts)["kl/sequence_mean"] for _ in range(3)]
    assert first == pytest.approx(0, abs=1e-3)
    assert abs(third) > 1e-2
    assert same_weights(before, weights(reference))


# --- prompts --------------------------------------------------------------------------------------


def test_prompts_longer_than_the_limit_are_refused_dropped_or_cut(
    config: Config, trainer_of: Any
) -> None:
    prompts = ["Hi", "x" * 80, "Ho"]
    trainer = PPOTrainer(actor=create_llm_model("actor", config.model.actor), config=config)
    with pytest.raises(DataError, match=r"prompt 1 of this batch \(\d+ tokens\)"):
        trainer.rollout(prompts)
    data = trainer.config.data
    data.overlong = "drop"
    batch = trainer.rollout(prompts)
    assert batch["prompt"] == ["Hi", "Ho"]
    data.overlong = "truncate_left"
    cut = trainer.prompt_batch(prompts, "rollout", 0)
    assert len(cut["prompt_ids"][1]) == data.prompt_limit
    whole = trainer.actor.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompts[1]}], add_generation_prompt=True, return_dict=False
    )
    assert cut["prompt_ids"][1] == whole[-data.prompt_limit :]
    assert (
        trainer.rollout(prompts)["input_ids"][1, : data.prompt_limit].tolist()
        == (cut["prompt_ids"][1])
    )


def test_a_sample_s_seed_depends_on_step_and_place_and_on_nothing_else(config: Config) -> None:
    trainer = PPOTrainer(actor=create_llm_model("actor", config.model.actor), config=config)
    seeds = trainer.prompt_batch(["a", "b", "c"], "rollout", 5)["seed"]
    assert trainer.prompt_batch(["z", "b"], "rollout", 5)["seed"] == seeds[:2]
    assert len({*seeds, *trainer.prompt_batch(["a", "b", "c"], "rollout", 6)["seed"]}) == 6
