"""Synthetic run directories: healthy and degenerate PPO, SFT, reward model."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from verl.monitor.log import MetricLog

Write = Callable[..., Path]

CONFIG = """\
run_dir: runs/example
model:
  actor: {pretrained_path: models/sft-policy}
  reward_model: {pretrained_path: models/reward-model}
data: {train: data/rl/train.parquet, eval: data/rl/test.parquet, batch_size: 32, seq_length: 256}
train:
  seed: 0
  num_epochs: 1
  total_steps: 40
  ppo: {actor_lr: 1.0e-05, critic_lr: null, epochs: 4, clip_epsilon: 0.2, kl_coef: 0.05}
monitor:
  alerts: {sequence_kl: {limit: 12.0, action: warn}}
"""

QUESTIONS = [
    "How do I keep basil alive on a windowsill?",
    "Can you explain compound interest to a teenager?",
    "My train was cancelled. What are my options?",
    "怎么给朋友写一封道歉信？",
    "What does `git rebase` do, and when should I avoid it?",
    "Give me a packing list for three rainy days in Bergen.",
]


def ppo_train(step: int, total: int, degenerate: bool, draw: random.Random) -> dict[str, float]:
    """Metrics of one PPO step: saturating score and KL, or a policy that runs away."""
    share = step / total
    score = 0.2 + 1.9 * (1 - math.exp(-3 * share)) + draw.gauss(0, 0.12)
    kl = 6.5 * (1 - math.exp(-2.5 * share)) + draw.gauss(0, 0.25)
    if degenerate:
        score, kl = 0.2 + 5.5 * share**1.5 + draw.gauss(0, 0.12), 24 * share**1.6
    return {
        "score/mean": score, "score/std": 0.9 - 0.35 * share, "score/min": score - 2.1,
        "score/max": score + 1.8, "reward/mean": score - 0.05, "reward/std": 0.9,
        "reward/shaped_return_mean": score - 0.05 - 0.05 * kl, "kl/token_mean": kl / 60,
        "kl/token_k3_mean": kl / 55, "kl/sequence_mean": kl, "kl/coef": 0.05,
        "policy/loss": -0.01 + draw.gauss(0, 0.004),
        "policy/entropy": 2.1 - 0.6 * share - (1.2 * share if degenerate else 0),
        "policy/clip_fraction": 0.03 + 0.05 * share + abs(draw.gauss(0, 0.01)),
        "policy/dual_clip_fraction": 0.0, "policy/ratio_mean": 1.0003, "policy/ratio_max": 1.9,
        "policy/first_ratio_deviation": 2.4e-7, "policy/approx_kl": 0.006,
        "policy/grad_norm": 0.7 + abs(draw.gauss(0, 0.2)), "policy/lr": 1e-5 * (1 - share),
        "policy/skipped_steps": 0, "value/loss": 0.5 * math.exp(-2 * share) + 0.08,
        "value/clip_fraction": 0.1, "value/explained_variance": 0.75 - 0.8 * math.exp(-4 * share),
        "value/mean": score, "value/grad_norm": 2.2 + abs(draw.gauss(0, 0.5)),
        "value/lr": 1e-4 * (1 - share), "value/skipped_steps": 0, "returns/mean": score,
        "returns/std": 0.9, "advantages/mean": 0.01, "advantages/std": 0.6,
        "response/length_mean": 60 + (70 * share if degenerate else 8 * share),
        "response/length_max": 128, "response/empty_count": 0,
        "response/finished_fraction": 0.96 - (0.7 * share if degenerate else -0.02 * share),
        "rollout/logprob_gap_mean": 1e-7, "rollout/logprob_gap_max": 3e-6,
        "time/rollout": 4.1 + draw.gauss(0, 0.3), "time/score": 2.0, "time/old_logprobs": 1.1,
        "time/reference": 1.0, "time/values": 0.9, "time/advantages": 0.02,
        "time/update_critic": 5.1, "time/update_actor": 7.2 + draw.gauss(0, 0.4),
        "time/evaluate": 6.0 if step % 10 == 0 else 0.0, "time/save": 1.0 if step % 20 == 0 else 0,
        "time/step": 21.6, "throughput/samples_per_second": 1.48,
        "throughput/tokens_per_second": 128.5, "memory/peak_gib": 3.2, "data/epoch": share,
    }  # fmt: skip


def ppo_eval(step: int, total: int, degenerate: bool) -> dict[str, float]:
    """Metrics of a held-out evaluation that matches `ppo_train`."""
    share = step / total
    score = 0.2 + (5.3 * share**1.5 if degenerate else 1.7 * (1 - math.exp(-3 * share)))
    kl = 24 * share**1.6 if degenerate else 6.3 * (1 - math.exp(-2.5 * share))
    return {
        "eval/score_greedy_mean": score + 0.25, "eval/score_greedy_ci95": 0.2,
        "eval/score_sampled_mean": score, "eval/score_sampled_ci95": 0.22,
        "eval/score_sampled_std": 0.9, "eval/win_rate": 0.5 + 0.42 * (1 - math.exp(-3 * share)),
        "eval/win_rate_ci95": 0.09, "eval/kl_sequence_mean": kl,
        "eval/length_mean": 60 + (70 * share if degenerate else 8 * share),
        "eval/finished_fraction": 0.96 - (0.7 * share if degenerate else -0.02 * share),
        "eval/distinct_1": 0.42 - (0.3 * share if degenerate else 0.03 * share),
        "eval/distinct_2": 0.81 - (0.6 * share if degenerate else 0.05 * share),
        "eval/same_opening": 0.05 + (0.6 * share if degenerate else 0.05 * share),
    }  # fmt: skip


def sample_rows(count: int, degenerate: bool) -> list[dict[str, object]]:
    """Greedy and sampled rows for `count` prompts."""
    rows: list[dict[str, object]] = []
    for index in range(count):
        question = QUESTIONS[index % len(QUESTIONS)] + ("" if index < 6 else f" (variant {index})")
        good = (
            f"Of course! Here is what works ({index}):\n\n1. Start small.\n2. Check after a week."
        )
        bad = "I would be delighted to help! " * 30
        for mode in ("sampled", "greedy"):
            rows.append({
                "index": index, "mode": mode,
                "prompt": [
                    {"role": "user", "content": "Hello!"},
                    {"role": "assistant", "content": "Hello, what can I do for you?"},
                    {"role": "user", "content": question},
                ],
                "response": bad if degenerate else good,
                "score": 4.9 if degenerate else 1.9, "length": 128 if degenerate else 31,
                "finish_reason": "length" if degenerate else "stop",
                "baseline_response": "Just google it.", "baseline_score": 0.2 + 0.01 * index,
            })  # fmt: skip
    return rows[::-1]


def write_samples(run_dir: Path, step: int, rows: list[dict[str, object]]) -> None:
    """Write a samples file in its documented format."""
    folder = run_dir / "samples"
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / f"step_{step:06d}.jsonl").write_text(lines, encoding="utf-8")


@pytest.fixture
def ppo_run(tmp_path: Path) -> Write:
    """A function that writes a PPO run directory and returns it."""

    def write(name: str = "ppo-run", steps: int = 40, degenerate: bool = False) -> Path:
        run_dir = tmp_path / name
        draw = random.Random(name)
        with MetricLog(run_dir) as log:
            log.log(0, "eval", ppo_eval(0, steps, degenerate))
            for step in range(1, steps + 1):
                log.log(step, "train", ppo_train(step, steps, degenerate, draw))
                if step % 10 == 0:
                    log.log(step, "eval", ppo_eval(step, steps, degenerate))
        (run_dir / "config.yaml").write_text(CONFIG, encoding="utf-8")
        write_samples(run_dir, 0, sample_rows(12, False))
        write_samples(run_dir, steps, sample_rows(12, degenerate))
        return run_dir

    return write


@pytest.fixture
def supervised_run(tmp_path: Path) -> Write:
    """A function that writes a run directory from functions of the step."""

    def write(
        name: str,
        train: Callable[[int], Mapping[str, float]],
        evaluate: Callable[[int], Mapping[str, float]],
        steps: int = 20,
    ) -> Path:
        run_dir = tmp_path / name
        with MetricLog(run_dir) as log:
            log.log(0, "eval", evaluate(0))
            for step in range(1, steps + 1):
                log.log(step, "train", train(step))
                if step % 5 == 0:
                    log.log(step, "eval", evaluate(step))
        return run_dir

    return write


def sft_train(step: int) -> dict[str, float]:
    """A falling SFT loss."""
    loss = 1.2 + 2.0 * math.exp(-step / 6)
    return {
        "sft/loss": loss, "sft/perplexity": math.exp(loss), "sft/tokens": 4000 + 37 * step,
        "sft/grad_norm": 1.3, "sft/lr": 2e-5 * (1 - step / 20), "time/step": 3.2,
        "throughput/samples_per_second": 10.0, "memory/peak_gib": 2.0, "data/epoch": step / 20,
    }  # fmt: skip


def sft_eval(step: int) -> dict[str, float]:
    """Held-out loss that follows it."""
    loss = 1.35 + 1.9 * math.exp(-step / 6)
    return {"eval/loss": loss, "eval/perplexity": math.exp(loss)}


def rm_train(step: int) -> dict[str, float]:
    """A reward model that learns."""
    gap = 2.2 * (1 - math.exp(-step / 7))
    return {
        "rm/loss": 0.25 + 0.443 * math.exp(-step / 7), "rm/accuracy": 0.5 + 0.19 * gap,
        "rm/margin_mean": gap, "rm/chosen_mean": gap / 2, "rm/rejected_mean": -gap / 2,
        "rm/grad_norm": 4.0, "rm/lr": 1e-5, "time/step": 5.0,
    }  # fmt: skip


def rm_eval(step: int) -> dict[str, float]:
    """Held-out accuracy that rises to 0.88."""
    accuracy = 0.5 + 0.38 * (1 - math.exp(-step / 5)) / (1 - math.exp(-4))
    return {
        "eval/accuracy": accuracy, "eval/accuracy_ci_low": accuracy - 0.06,
        "eval/accuracy_ci_high": min(1.0, accuracy + 0.05), "eval/score_mean": 0.1,
        "eval/score_std": 1.2, "eval/length_bias": 0.22, "eval/accuracy_small_margin": 0.62,
        "eval/accuracy_medium_margin": accuracy, "eval/accuracy_large_margin": 0.97,
    }  # fmt: skip


@pytest.fixture
def sft_run(supervised_run: Write) -> Path:
    """An SFT run of 20 steps."""
    return supervised_run("sft-run", sft_train, sft_eval)


@pytest.fixture
def rm_run(supervised_run: Write) -> Path:
    """A reward-model run of 20 steps."""
    return supervised_run("rm-run", rm_train, rm_eval)
