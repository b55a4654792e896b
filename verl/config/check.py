"""Checks between settings, per stage, before any model is loaded.

In: a resolved tree and the stage that is to run. Out: warnings about settings that do nothing or
rarely do what was meant; conflicts raise `ConfigError` naming both keys. Files and devices are
checked where they are opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, get_args

from verl.config.schema import Config, PretrainedModel
from verl.config.section import Section
from verl.errors import ConfigError

Stage = Literal["sft", "rm", "ppo"]
#: Yields one message per finding.
Rule = Callable[[Config], Iterator[str]]


def check(config: Config, stage: str) -> list[str]:
    """Return warnings for `stage`, one line each.

    Raises:
        ConfigError: one line per conflict, each naming the settings that do not go together.
        ValueError: `stage` is not `sft`, `rm` or `ppo`.
    """
    if stage not in get_args(Stage):
        raise ValueError(f"unknown stage {stage!r}; stages are {', '.join(get_args(Stage))}")
    problems = list(_missing(config, stage))
    warnings = list(_held_out(config))
    if stage == "ppo":
        for find_problems in (_batches, _lengths, _sampling, _baseline):
            problems += find_problems(config)
        for find_warnings in (_kl, _penalties, _sampling_without_effect, _steps, _old_logprobs):
            warnings += find_warnings(config)
    if problems:
        raise ConfigError("\n".join(problems))
    return warnings


def _missing(config: Config, stage: str) -> Iterator[str]:
    if config.data.train is None:
        yield "data.train is not set; name the file that `verl prepare` wrote for this stage"
    needed = {"sft": ("actor",), "rm": ("reward_model",), "ppo": ("actor", "reward_model")}[stage]
    for role in needed:
        model: PretrainedModel = getattr(config.model, role)
        if model.pretrained_path is None:
            yield (
                f"model.{role}.pretrained_path is not set; `verl {stage}` needs a hub id or a local "
                "folder there"
            )
    for role in ("actor", "critic", "ref_policy", "reward_model"):
        model = getattr(config.model, role)
        if model.gguf_file is not None and model.pretrained_path is None:
            yield (
                f"model.{role}.gguf_file needs model.{role}.pretrained_path, the folder or hub id that "
                "holds the file"
            )


def _batches(config: Config) -> Iterator[str]:
    size, batch = config.train.ppo.minibatch_size, config.data.batch_size
    if size is None:
        return
    if size > batch:
        yield (
            f"train.ppo.minibatch_size={size} is larger than data.batch_size={batch}; a step has only "
            f"{batch} samples, so use at most that"
        )
    elif batch % size:
        yield (
            f"data.batch_size={batch} is not a multiple of train.ppo.minibatch_size={size}: "
            f"{batch % size} samples would make an optimiser step of another size; change one of them"
        )


def _lengths(config: Config) -> Iterator[str]:
    data, ppo, rollout = config.data, config.train.ppo, config.rollout
    if data.response_length >= data.seq_length:
        yield (
            f"data.response_length={data.response_length} leaves no room for a prompt in "
            f"data.seq_length={data.seq_length}; raise seq_length or lower response_length"
        )
    elif data.prompt_length and data.prompt_length + data.response_length > data.seq_length:
        yield (
            f"data.prompt_length={data.prompt_length} + data.response_length={data.response_length} "
            f"is more than data.seq_length={data.seq_length}; lower one of the first two or raise the last"
        )
    if rollout.min_tokens > data.response_length:
        yield (
            f"rollout.min_tokens={rollout.min_tokens} is more than "
            f"data.response_length={data.response_length}; no response could satisfy both"
        )
    if ppo.overlong_buffer >= data.response_length:
        yield (
            f"train.ppo.overlong_buffer={ppo.overlong_buffer} must be smaller than "
            f"data.response_length={data.response_length}; otherwise every response is penalised"
        )


def _sampling(config: Config) -> Iterator[str]:
    if config.rollout.temperature == 0:
        yield (
            "rollout.temperature=0 is greedy: its log-probabilities are not those of a sampling policy, "
            "so PPO cannot learn from it; use a temperature above 0 (evaluation has greedy answers anyway)"
        )


def _baseline(config: Config) -> Iterator[str]:
    if not config.eval.at_start:
        yield (
            "eval.at_start=false, but PPO compares with the answers of the start policy; leave it out"
        )


def _held_out(config: Config) -> Iterator[str]:
    if config.data.eval is None:
        yield "data.eval is not set: nothing is evaluated on held-out rows"
        if any(_chosen(config.eval, name) for name in ("every", "at_start", "num_prompts")):
            yield "eval.every, eval.at_start and eval.num_prompts have no effect without data.eval"
    elif config.data.eval == config.data.train:
        yield "data.eval is the same file as data.train: the evaluation is not held out"


def _kl(config: Config) -> Iterator[str]:
    ppo = config.train.ppo
    if ppo.kl_coef > 0 and ppo.kl_loss_coef > 0:
        yield (
            f"train.ppo.kl_coef={ppo.kl_coef} and train.ppo.kl_loss_coef={ppo.kl_loss_coef} are both "
            "above 0: the KL to the reference is penalised twice, in the reward and in the loss"
        )
    if not ppo.needs_reference:
        yield (
            "train.ppo.kl_coef and train.ppo.kl_loss_coef are both 0: nothing holds the policy near the "
            "reference, and no reference model is loaded"
        )
        if config.model.ref_policy.pretrained_path is not None:
            yield (
                "model.ref_policy.pretrained_path has no effect while train.ppo.kl_coef and "
                "train.ppo.kl_loss_coef are 0"
            )
    if ppo.kl_controller == "fixed":
        for name in ("kl_target", "kl_horizon"):
            if _chosen(ppo, name):
                yield f"train.ppo.{name} has no effect with train.ppo.kl_controller=fixed"
    elif ppo.kl_coef == 0:
        yield "train.ppo.kl_controller=adaptive has no effect: it scales train.ppo.kl_coef, which is 0"
    for coefficient, estimator in (
        ("kl_coef", "kl_estimator"),
        ("kl_loss_coef", "kl_loss_estimator"),
    ):
        if getattr(ppo, coefficient) == 0 and _chosen(ppo, estimator):
            yield f"train.ppo.{estimator} has no effect while train.ppo.{coefficient} is 0"


def _penalties(config: Config) -> Iterator[str]:
    ppo = config.train.ppo
    if ppo.missing_eos_penalty == 0 and _chosen(ppo, "missing_eos_mode"):
        if ppo.missing_eos_mode == "subtract":
            yield "train.ppo.missing_eos_mode has no effect while train.ppo.missing_eos_penalty is 0"
        else:
            yield (
                "train.ppo.missing_eos_mode=replace with train.ppo.missing_eos_penalty=0 gives every "
                "cut response a score of 0"
            )
    if (ppo.overlong_buffer > 0) != (ppo.overlong_penalty > 0):
        yield (
            f"train.ppo.overlong_buffer={ppo.overlong_buffer} and "
            f"train.ppo.overlong_penalty={ppo.overlong_penalty} only act together: both above 0, or neither"
        )
    if ppo.normalize_reward == "batch" and config.data.batch_size == 1:
        yield (
            "train.ppo.normalize_reward=batch with data.batch_size=1 makes every score 0; use `running` "
            "or `reference`"
        )


def _sampling_without_effect(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if not rollout.ignore_eos:
        return
    for name in ("min_tokens", "stop_token_ids"):
        if _chosen(rollout, name):
            yield f"rollout.{name} has no effect with rollout.ignore_eos=true"
    if config.train.ppo.missing_eos_penalty > 0:
        yield (
            "rollout.ignore_eos=true cuts every response at data.response_length, so every one pays "
            "train.ppo.missing_eos_penalty"
        )


def _steps(config: Config) -> Iterator[str]:
    warmup, total = config.train.ppo.critic_warmup_steps, config.train.total_steps
    if total is not None and warmup >= total:
        yield (
            f"train.ppo.critic_warmup_steps={warmup} reaches train.total_steps={total}: the actor is never "
            "trained"
        )


def _old_logprobs(config: Config) -> Iterator[str]:
    ppo = config.train.ppo
    size = ppo.minibatch_size or config.data.batch_size
    if config.rollout.trust_logprobs and ppo.epochs == 1 and size == config.data.batch_size:
        yield (
            "rollout.trust_logprobs has no effect: with train.ppo.epochs=1 and one mini-batch a step "
            "needs no old log-probs"
        )


def _chosen(section: Section, name: str) -> bool:
    """Whether somebody set `name` on purpose.

    A section in which every key is set comes from a resolved file, where only a value that differs
    from the default tells.
    """
    if name not in section.model_fields_set:
        return False
    fields = type(section).model_fields
    whole = len(section.model_fields_set) == len(fields)
    return not whole or getattr(section, name) != fields[name].get_default(
        call_default_factory=True
    )
