"""Held-out evaluation of a policy: greedy and sampled answers, scored and compared to the start.

In: a PPO trainer (for its groups and settings) and held-out prompts. Out: `eval/*` metrics and one
line per answer in a samples file. Seeds do not depend on the step, so two evaluations differ by
the policy alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.algorithms.kl import kl_penalty, sequence_kl
from verl.batch import Batch
from verl.checkpoint.atomic import write_text_atomic
from verl.evaluation.statistics import (
    distinct_n,
    mean_ci95,
    same_opening,
    standard_deviation,
    wins,
)
from verl.models.chat import Prompt

if TYPE_CHECKING:
    from verl.trainer.ppo import PPOTrainer

#: Answers of the start policy by (mode, index): text and score.
Baseline = dict[tuple[str, int], tuple[str, float]]


def evaluate_policy(
    trainer: PPOTrainer, prompts: Sequence[Prompt], temperature: float, baseline: Baseline | None
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Answer, score and compare; returns metrics and one record per answer.

    Args:
        baseline: answers of the start policy; None when this is the start policy itself.
    """
    metrics: dict[str, float] = {}
    records: list[dict[str, Any]] = []
    for mode, heat in (("greedy", 0.0), ("sampled", temperature)):
        batch = _answers(trainer, prompts, heat)
        own = _records(mode, batch, baseline)
        records += own
        scores = [record["score"] for record in own]
        mean, ci = mean_ci95(scores)
        metrics |= {f"eval/score_{mode}_mean": mean, f"eval/score_{mode}_ci95": ci}
        if mode == "sampled":
            metrics["eval/score_sampled_std"] = standard_deviation(scores)
            metrics |= _sampled_metrics(trainer, batch, own, temperature)
    return metrics, records


def _answers(trainer: PPOTrainer, prompts: Sequence[Prompt], temperature: float) -> Batch:
    batch = trainer.prompt_batch(prompts, "evaluate", 0)
    batch = trainer.with_text(trainer.actor.generate(batch, trainer.sampling(temperature)))
    return trainer.reward_model.score(batch.send_to(trainer.reward_model)).to("cpu")


def _records(mode: str, batch: Batch, baseline: Baseline | None) -> list[dict[str, Any]]:
    records = []
    for i in range(len(batch)):
        score, text = float(batch["score"][i]), batch["response"][i]
        before = (baseline or {}).get((mode, i), (text, score))
        prompt = batch["prompt"][i]
        records.append(
            {
                "index": i,
                "mode": mode,
                "prompt": [{"role": "user", "content": prompt}]
                if isinstance(prompt, str)
                else prompt,
                "response": text,
                "score": score,
                "length": int(batch["response_length"][i]),
                "finish_reason": batch["finish_reason"][i],
                "baseline_response": before[0],
                "baseline_score": before[1],
            }
        )
    return records


def _sampled_metrics(
    trainer: PPOTrainer, batch: Batch, records: list[dict[str, Any]], temperature: float
) -> dict[str, float]:
    won = wins([r["score"] for r in records], [r["baseline_score"] for r in records])
    rate, rate_ci = mean_ci95(won)
    texts = [r["response"] for r in records]
    metrics = {
        "eval/win_rate": rate,
        "eval/win_rate_ci95": rate_ci,
        "eval/length_mean": sum(r["length"] for r in records) / len(records),
        "eval/finished_fraction": sum(r["finish_reason"] == "stop" for r in records) / len(records),
        "eval/distinct_1": distinct_n(texts, 1),
        "eval/distinct_2": distinct_n(texts, 2),
        "eval/same_opening": same_opening(texts),
    }
    if trainer.ref_policy is not None:
        batch = trainer.actor.logprobs(batch.send_to(trainer.actor), temperature)
        batch = trainer.ref_policy.logprobs(batch.send_to(trainer.ref_policy), temperature).to(
            "cpu"
        )
        mask = batch["response_mask"]
        kl = kl_penalty(batch["old_logprobs"], batch["ref_logprobs"], "k1", mask)
        metrics["eval/kl_sequence_mean"] = float(sequence_kl(kl, mask))
    return metrics


def write_samples(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write one JSON line per answer, all or nothing."""
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    write_text_atomic(path, "\n".join(lines) + "\n")


def read_baseline(path: Path) -> Baseline:
    """Answers of the start policy from its samples file."""
    found: Baseline = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line:
            record = json.loads(line)
            found[record["mode"], record["index"]] = (record["response"], record["score"])
    return found
