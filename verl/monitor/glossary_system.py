"""Glossary entries of timings, throughput, memory and data position."""

from __future__ import annotations

from verl.monitor.metric import Metric

_PPO = ("ppo",)
_ALL = ("ppo", "sft", "rm")


def _stage_time(name: str, meaning: str, stages: tuple[str, ...], advice: str) -> Metric:
    return Metric(
        f"time/{name}",
        "s",
        meaning,
        "wall-clock seconds in the step",
        "steady from step to step",
        advice,
        stages,
    )


TIME = (
    _stage_time(
        "rollout",
        "Sampling the responses.",
        _PPO,
        "Dominates: shorter response_length, larger rollout.max_rows.",
    ),
    _stage_time(
        "score",
        "Scoring by the reward model.",
        _PPO,
        "Dominates: a smaller reward model, larger tokens_per_microbatch.",
    ),
    _stage_time(
        "old_logprobs",
        "Log-probs of the policy before its update.",
        _PPO,
        "Larger than time/reference: see tokens_per_microbatch.",
    ),
    _stage_time(
        "reference",
        "Log-probs of the reference policy.",
        _PPO,
        "Try model.ref_policy.inference_dtype=bfloat16.",
    ),
    _stage_time(
        "values", "Values of the critic.", _PPO, "A smaller critic, or larger micro-batches."
    ),
    _stage_time(
        "advantages",
        "Rewards, advantages and returns.",
        _PPO,
        "More than a second is not expected; report it.",
    ),
    _stage_time(
        "update_critic",
        "Optimiser steps of the critic.",
        _PPO,
        "Fewer train.ppo.epochs, fewer model.critic.train_layers.",
    ),
    _stage_time(
        "update_actor",
        "Optimiser steps of the actor.",
        _PPO,
        "Fewer train.ppo.epochs, lora or train_layers for the actor.",
    ),
    _stage_time(
        "evaluate", "Held-out evaluation.", _ALL, "Raise eval.every or lower eval.num_prompts."
    ),
    _stage_time(
        "save",
        "Writing the checkpoint that came before this step.",
        _ALL,
        "Raise checkpoint.every.",
    ),
    _stage_time(
        "step",
        "The whole training step, without evaluation and saving.",
        _ALL,
        "See which stage takes it.",
    ),
)

SYSTEM = (
    Metric(
        "throughput/samples_per_second",
        "1/s",
        "Samples (rows, pairs) per second.",
        "samples of the step / time/step",
        "steady",
        "Falls: responses grow, or memory swaps.",
        _ALL,
    ),
    Metric(
        "throughput/tokens_per_second",
        "tokens/s",
        "Tokens per second.",
        "tokens of the step (prompt and response) / time/step",
        "steady",
        "Falls: memory swaps, or another process competes.",
        _ALL,
    ),
    Metric(
        "memory/peak_gib",
        "GiB",
        "Highest memory use so far.",
        "peak resident memory of the process, or of the GPU where one is used",
        "level after the first steps",
        "Grows step by step: a leak, report it. Near the limit: lower tokens_per_microbatch.",
        _ALL,
    ),
    Metric(
        "data/epoch",
        "epochs",
        "Passes over the training file that were complete before this step.",
        "0 in the first pass, 1 in the second, ...",
        "rises by 1 per pass, below train.num_epochs",
        "Not rising: the data does not advance.",
        _ALL,
    ),
)

ENTRIES = TIME + SYSTEM
