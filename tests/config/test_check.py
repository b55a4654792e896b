"""Conflicts between settings are refused naming both keys; settings without effect are warned of."""

from __future__ import annotations

import pytest

from verl.config.check import check
from verl.config.load import load_config, resolved_text
from verl.errors import ConfigError

PPO = [
    "data.train=train.parquet",
    "data.eval=test.parquet",
    "model.actor.pretrained_path=actor",
    "model.reward_model.pretrained_path=rm",
]


def config(*overrides):
    return load_config(None, [*PPO, *overrides]).config


@pytest.mark.parametrize("stage", ["sft", "rm", "ppo"])
def test_the_defaults_with_paths_are_without_conflict_or_warning(stage):
    assert check(config(), stage) == []


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (
            ["data.batch_size=4", "train.ppo.minibatch_size=8"],
            ["data.batch_size=4", "train.ppo.minibatch_size=8"],
        ),
        (
            ["data.batch_size=10", "train.ppo.minibatch_size=4"],
            ["data.batch_size=10", "train.ppo.minibatch_size=4"],
        ),
        (
            ["data.seq_length=8", "data.response_length=8"],
            ["data.response_length=8", "data.seq_length=8"],
        ),
        (
            ["data.seq_length=8", "data.prompt_length=4", "data.response_length=5"],
            ["data.prompt_length=4", "data.response_length=5", "data.seq_length=8"],
        ),
        (
            ["rollout.min_tokens=9", "data.response_length=8"],
            ["rollout.min_tokens=9", "data.response_length=8"],
        ),
        (
            [
                "train.ppo.overlong_buffer=8",
                "train.ppo.overlong_penalty=1",
                "data.response_length=8",
            ],
            ["train.ppo.overlong_buffer=8", "data.response_length=8"],
        ),
        (["rollout.temperature=0"], ["rollout.temperature=0"]),
        (["model.actor.pretrained_path=null"], ["model.actor.pretrained_path"]),
        (["model.reward_model.pretrained_path=null"], ["model.reward_model.pretrained_path"]),
        (
            ["model.critic.gguf_file=m.gguf"],
            ["model.critic.gguf_file", "model.critic.pretrained_path"],
        ),
        (["data.train=null"], ["data.train"]),
    ],
)
def test_a_conflict_is_refused_naming_its_settings(overrides, keys):
    with pytest.raises(ConfigError) as caught:
        check(config(*overrides), "ppo")
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for key in keys:
        assert key in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.batch_size=8", "train.ppo.minibatch_size=8"],
        ["data.batch_size=8", "train.ppo.minibatch_size=2"],
        ["data.seq_length=9", "data.prompt_length=4", "data.response_length=5"],
        ["rollout.min_tokens=8", "data.response_length=8"],
        [
            "train.ppo.overlong_buffer=7",
            "train.ppo.overlong_penalty=1",
            "data.response_length=8",
        ],
        ["train.ppo.critic_warmup_steps=4", "train.total_steps=5"],
        ["train.ppo.kl_controller=adaptive", "train.ppo.kl_target=3", "train.ppo.kl_horizon=100"],
    ],
)
def test_settings_at_the_very_limit_pass(overrides):
    assert check(config(*overrides), "ppo") == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["train.ppo.kl_loss_coef=0.1"], "both above 0"),
        (["train.ppo.kl_coef=0"], "both 0"),
        (["train.ppo.critic_warmup_steps=5", "train.total_steps=5"], "never trained"),
        (["train.ppo.kl_target=3"], "train.ppo.kl_target has no effect"),
        (["train.ppo.kl_target=6"], "train.ppo.kl_target has no effect"),
        (["train.ppo.kl_horizon=3"], "train.ppo.kl_horizon has no effect"),
        (["train.ppo.kl_loss_estimator=k1"], "train.ppo.kl_loss_estimator has no effect"),
        (["train.ppo.missing_eos_mode=subtract"], "train.ppo.missing_eos_mode has no effect"),
        (["train.ppo.missing_eos_mode=replace"], "score of 0"),
        (["train.ppo.overlong_penalty=1"], "only act together"),
        (["train.ppo.overlong_buffer=3"], "only act together"),
        (["train.ppo.normalize_reward=batch", "data.batch_size=1"], "every score 0"),
        (["rollout.ignore_eos=true", "rollout.min_tokens=3"], "rollout.min_tokens has no effect"),
        (
            ["rollout.ignore_eos=true", "train.ppo.missing_eos_penalty=1"],
            "train.ppo.missing_eos_penalty",
        ),
        (["rollout.trust_logprobs=true", "train.ppo.epochs=1"], "needs no old log-probs"),
        (["data.eval=null"], "data.eval is not set"),
        (["data.eval=train.parquet"], "not held out"),
    ],
)
def test_a_doubtful_setting_gives_one_warning(overrides, says):
    (warning,) = check(config(*overrides), "ppo")
    assert says in warning


def test_all_settings_that_an_unused_reference_makes_idle_are_named():
    warnings = check(
        config("train.ppo.kl_coef=0", "model.ref_policy.pretrained_path=x", "eval.every=5"), "ppo"
    )
    assert len(warnings) == 2
    assert "model.ref_policy.pretrained_path has no effect" in warnings[1]


def test_adaptive_control_of_a_zero_coefficient_is_warned_of():
    warnings = check(
        config(
            "train.ppo.kl_coef=0", "train.ppo.kl_loss_coef=0.1", "train.ppo.kl_controller=adaptive"
        ),
        "ppo",
    )
    assert warnings == [
        "train.ppo.kl_controller=adaptive has no effect: it scales train.ppo.kl_coef, which is 0"
    ]


def test_ppo_needs_the_evaluation_of_the_start_policy():
    settings = config("eval.at_start=false")
    with pytest.raises(ConfigError, match=r"eval.at_start=false.*start policy"):
        check(settings, "ppo")
    assert check(settings, "rm") == []


def test_settings_of_other_stages_do_not_stop_a_stage():
    settings = ["data.seq_length=8", "train.ppo.minibatch_size=7", "rollout.temperature=0"]
    settings += ["model.reward_model.pretrained_path=null"]
    assert check(config(*settings), "sft") == []
    with pytest.raises(ConfigError, match="model.reward_model.pretrained_path"):
        check(config(*settings), "rm")


def test_each_stage_asks_for_its_own_model():
    sft = load_config(None, ["data.train=a", "data.eval=b", "model.actor.pretrained_path=m"]).config
    assert check(sft, "sft") == []
    with pytest.raises(ConfigError, match=r"^model.reward_model.pretrained_path is not set"):
        check(sft, "rm")


def test_all_conflicts_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        check(config("data.train=null", "rollout.temperature=0"), "ppo")
    assert len(str(caught.value).splitlines()) == 2


def test_a_resolved_file_brings_no_new_warnings(tmp_path):
    (tmp_path / "config.yaml").write_text(resolved_text(config()), encoding="utf-8")
    assert check(load_config(str(tmp_path / "config.yaml")).config, "ppo") == []
    (tmp_path / "config.yaml").write_text(resolved_text(config("train.ppo.kl_target=3")), "utf-8")
    assert len(check(load_config(str(tmp_path / "config.yaml")).config, "ppo")) == 1


def test_an_unknown_stage_is_a_programming_error():
    with pytest.raises(ValueError, match="sft, rm, ppo"):
        check(config(), "dpo")
