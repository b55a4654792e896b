"""Reward-model training: Bradley-Terry by hand, margins, centring, and what is stored for PPO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from verl.config.schema import Config
from verl.data.loader import LoaderBatch
from verl.errors import DataError
from verl.models.chat import reward_input
from verl.trainer.reward_model import RewardModelTask, encode_pairs, pair_plan


def pair(prompt: str, chosen: str, rejected: str, margin: float | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }
    return row if margin is None else {**row, "margin": margin}


ROWS = [
    pair("2+2?", "It is four.", "No", 0.5),
    pair("Hi", "Hello to you.", "Go", 2.0),
    pair("Why?", "Because it is so.", "Eh", 0.0),
]


@pytest.fixture
def rm(config: Config, write_rows: Any, tiny_reward: Path) -> Config:
    """Three pairs to train on and the same to evaluate."""
    config.data.train = config.data.eval = write_rows("train", ROWS)
    config.data.eval = write_rows("eval", ROWS)
    config.data.batch_size = 3
    return config


def plain_scores(folder: Path, task: RewardModelTask) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of both sides by transformers alone, one conversation at a time."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    sides: list[list[float]] = []
    for side in ("chosen", "rejected"):
        scores = []
        for row in ROWS:
            ids = reward_input(task.tokenizer, row["prompt"], row[side]).ids
            with torch.no_grad():
                hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
                scores.append(float(model.score(hidden)))
        sides.append(scores)
    return torch.tensor(sides[0]), torch.tensor(sides[1])


@pytest.mark.parametrize("use_margin", [True, False])
@pytest.mark.parametrize("centering", [0.0, 0.3])
@pytest.mark.parametrize("tokens_per_microbatch", [32, 1024])
def test_the_loss_is_bradley_terry_with_margin_and_centring(
    use_margin: bool, centering: float, tokens_per_microbatch: int, rm: Config, tiny_reward: Path
) -> None:
    rm.train.reward_model.use_margin = use_margin
    rm.train.reward_model.centering_coef = centering
    rm.train.tokens_per_microbatch = tokens_per_microbatch
    task = RewardModelTask(rm)
    chosen, rejected = plain_scores(tiny_reward, task)
    margins = torch.tensor([0.5, 2.0, 0.0]) if use_margin else torch.zeros(3)
    each = -logsigmoid(chosen - rejected - margins) + centering * (chosen + rejected).square()
    metrics = task.step(LoaderBatch(1, 0, [0, 1, 2]), lambda stage: None)
    assert metrics["rm/loss"] == pytest.approx(float(each.mean()), rel=1e-4)
    assert metrics["rm/chosen_mean"] == pytest.approx(float(chosen.mean()), abs=1e-4)
    assert metrics["rm/rejected_mean"] == pytest.approx(float(rejected.mean()), abs=1e-4)
    assert metrics["rm/accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))


def test_held_out_metrics_are_those_of_the_plain_scores(rm: Config, tiny_reward: Path) -> None:
    task = RewardModelTask(rm)
    chosen, rejected = plain_scores(tiny_reward, task)
    metrics = task.evaluate(0, Path())
    every = torch.cat([chosen, rejected])
    assert metrics["eval/accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))
    assert metrics["eval/score_mean"] == pytest.approx(float(every.mean()), abs=1e-4)
    assert metrics["eval/score_std"] == pytest.approx(float(every.std()), abs=1e-4)
    assert metrics["eval/loss"] == pytest.approx(
        float(-logsigmoid(chosen - rejected).mean()), rel=1e-4
    )
    # Thirds of three pairs, by the gap between the two scores.
    order = (chosen - rejected).abs().argsort().tolist()
    right = (chosen > rejected).float()
    for name, index in zip(("small", "medium", "large"), order, strict=True):
        assert metrics[f"eval/accuracy_{name}_margin"] == float(right[index])


def test_training_separates_the_two_sides_and_the_statistics_go_with_the_export(
    rm: Config, tmp_path: Path
) -> None:
    rm.train.reward_model.lr, rm.train.reward_model.lr_schedule = 3e-3, "constant"
    rm.train.reward_model.use_margin = False
    task = RewardModelTask(rm)
    before = task.evaluate(0, tmp_path)
    for step in range(1, 11):
        metrics = task.step(LoaderBatch(step, 0, [0, 1, 2]), lambda stage: None)
    assert metrics["rm/accuracy"] == 1.0
    assert metrics["rm/margin_mean"] > 1
    held_out = task.evaluate(10, tmp_path)
    assert held_out["eval/accuracy"] == 1.0
    assert held_out != before
    assert held_out["eval/accuracy_ci_low"] == pytest.approx(0.4385, abs=1e-4)
    assert held_out["eval/accuracy_ci_high"] == 1.0
    # Chosen answers are the longer ones here, by about as much as they score higher.
    assert -1 <= held_out["eval/length_bias"] <= 1
    task.export(tmp_path)
    statistics = json.loads((tmp_path / "score_statistics.json").read_text())
    assert statistics == {
        "mean": held_out["eval/score_mean"],
        "std": held_out["eval/score_std"],
        "pairs": 3,
        "accuracy": 1.0,
    }


def test_without_a_margin_column_there_are_no_margins(rm: Config, write_rows: Any) -> None:
    rm.data.train = write_rows("bare", [pair("a", "b", "c")])
    task = RewardModelTask(rm)
    assert encode_pairs(task.tokenizer, task.rows, [0], 96).margins is None


def test_a_microbatch_never_parts_the_two_sides_of_a_pair(rm: Config) -> None:
    task = RewardModelTask(rm)
    pairs = encode_pairs(task.tokenizer, task.rows, [0, 1, 2], 96)
    task.engine.tokens_per_microbatch = 1
    plan = pair_plan(task.engine, pairs.inputs)
    assert sorted(plan) == [[0, 1], [2, 3], [4, 5]]


def test_a_pair_is_as_long_as_its_longer_side_and_truncation_keeps_the_answer(
    rm: Config, write_rows: Any
) -> None:
    rm.data.train = write_rows("long", [pair("Hi", "ok", "x" * 100)])
    with pytest.raises(DataError, match=r"long\.jsonl:1"):
        RewardModelTask(rm)
    rm.data.overlong = "truncate_left"
    task = RewardModelTask(rm)
    inputs = encode_pairs(task.tokenizer, task.rows, task.kept, 96).inputs
    assert [item.truncated for item in inputs] == [False, True]
    assert len(inputs[1].ids) == 96
    assert "x" * 50 in task.tokenizer.decode(inputs[1].ids)
    task.step(LoaderBatch(1, 0, [0]), lambda stage: None)
