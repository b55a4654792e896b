"""Held-out evaluation of a policy: the same draws at every step, and what is compared to what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.cluster.worker_group import WorkerGroup
from verl.config.schema import get_default_config
from verl.evaluation.policy import evaluate_policy, read_baseline, write_samples
from verl.monitor.glossary import GLOSSARY
from verl.trainer.ppo import PPOTrainer
from verl.workers.create import create_llm_model
from verl.workers.reward import RewardWorker

PROMPTS = ["2+2?", [{"role": "user", "content": "Hi"}], "Name a colour."]


class Growing:
    """A reward source whose scores rise with every call: 0 1 2, then 3 4 5, and so on."""

    name, tokenizer = "growing", None

    def __init__(self) -> None:
        self.given = 0

    def score(self, prompts: Sequence[Any], responses: Sequence[str]) -> torch.Tensor:
        """The next numbers."""
        first, self.given = self.given, self.given + len(responses)
        return torch.arange(first, self.given, dtype=torch.float32)


@pytest.fixture
def trainer(tiny_llama: Path) -> PPOTrainer:
    """A trainer that can only evaluate."""
    config = get_default_config()
    config.model.actor.pretrained_path = str(tiny_llama)
    config.data.seq_length, config.data.response_length = 96, 8
    source = RewardWorker(Growing(), torch.device("cpu"))
    return PPOTrainer(
        actor=create_llm_model("actor", config.model.actor),
        ref_policy=create_llm_model("ref_policy", config.model.ref_policy),
        reward_model=WorkerGroup("reward_model", [source]),
        config=config,
    )


def answers(records: list[dict[str, Any]], mode: str) -> list[str]:
    return [record["response"] for record in records if record["mode"] == mode]


def test_the_draws_are_the_same_at_every_step(trainer: PPOTrainer) -> None:
    _, first = evaluate_policy(trainer, PROMPTS, 1.0, None)
    trainer.steps_done = 17
    _, later = evaluate_policy(trainer, PROMPTS, 1.0, None)
    for mode in ("greedy", "sampled"):
        assert answers(first, mode) == answers(later, mode)
    assert answers(first, "sampled") != answers(first, "greedy")
    with torch.no_grad():
        trainer.actor.workers[0].engine.model.get_output_embeddings().weight.neg_()
    _, changed = evaluate_policy(trainer, PROMPTS, 1.0, None)
    assert answers(changed, "greedy") != answers(first, "greedy")


def test_the_start_policy_ties_with_itself(trainer: PPOTrainer) -> None:
    metrics, records = evaluate_policy(trainer, PROMPTS, 1.0, None)
    assert set(metrics) <= set(GLOSSARY)
    assert metrics["eval/win_rate"] == 0.5
    assert metrics["eval/win_rate_ci95"] == 0.0
    assert metrics["eval/kl_sequence_mean"] == pytest.approx(0, abs=1e-4)
    # Greedy got 0 1 2 and sampled 3 4 5.
    assert metrics["eval/score_greedy_mean"] == 1.0
    assert metrics["eval/score_sampled_mean"] == 4.0
    assert metrics["eval/score_sampled_std"] == 1.0
    assert metrics["eval/score_sampled_ci95"] == pytest.approx(1.959964 / 3**0.5)
    assert metrics["eval/length_mean"] <= 8
    assert [record["baseline_response"] for record in records] == [
        record["response"] for record in records
    ]
    assert records[0]["prompt"] == [{"role": "user", "content": "2+2?"}]
    assert records[1]["prompt"] == PROMPTS[1]


def test_later_answers_are_compared_with_those_of_the_start_by_mode_and_prompt(
    trainer: PPOTrainer, tmp_path: Path
) -> None:
    _, records = evaluate_policy(trainer, PROMPTS, 1.0, None)
    for record in records:
        # Against sampled scores of 9, 10, 11: a loss, a tie, a win.
        record["score"] = {0: 99.0, 1: 10.0, 2: -1.0}[record["index"]]
        if record["mode"] == "greedy":
            record["score"] = 50.0
        record["response"] += "\u2028 \u00e9"
    write_samples(tmp_path / "step_000000.jsonl", records)
    baseline = read_baseline(tmp_path / "step_000000.jsonl")
    metrics, later = evaluate_policy(trainer, PROMPTS, 1.0, baseline)
    assert metrics["eval/win_rate"] == pytest.approx(0.5)
    sampled = [record for record in later if record["mode"] == "sampled"]
    assert [record["baseline_score"] for record in sampled] == [99.0, 10.0, -1.0]
    assert sampled[0]["baseline_response"].endswith("\u2028 \u00e9")
    assert metrics["eval/win_rate_ci95"] == pytest.approx(1.959964 * 0.5 / 3**0.5)


def test_without_a_reference_there_is_no_kl(trainer: PPOTrainer) -> None:
    trainer.ref_policy = None
    metrics, _ = evaluate_policy(trainer, PROMPTS, 1.0, None)
    assert "eval/kl_sequence_mean" not in metrics


def test_samples_are_one_json_line_each(tmp_path: Path) -> None:
    records = [{"index": 0, "mode": "greedy", "response": "a\nb\u2028", "score": 0.1}]
    write_samples(tmp_path / "s.jsonl", records)
    lines = (tmp_path / "s.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines if line] == records
    assert read_baseline(tmp_path / "s.jsonl") == {("greedy", 0): ("a\nb\u2028", 0.1)}
