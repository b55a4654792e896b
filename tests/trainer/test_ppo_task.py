"""PPO as a task: which models it loads, which rows it takes, and how it stops itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.config.schema import Config
from verl.data.loader import LoaderBatch
from verl.errors import DataError, RunDirectoryError, TrainingStopped
from verl.trainer.base import train
from verl.trainer.ppo_task import PPOTask
from verl.trainer.run import Run, opened

ROWS = [{"prompt": prompt} for prompt in ("2+2?", "Hi", "Name a colour.", "Why?", "x" * 120, "Ho")]


@pytest.fixture
def short(config: Config, write_rows: Any) -> Config:
    """The configuration with five short prompts to train on."""
    config.data.train = write_rows("train", [row for row in ROWS if len(row["prompt"]) < 99])
    config.eval.every = 0
    return config


@pytest.mark.parametrize(("in_reward", "in_loss"), [(0.1, 0), (0, 0.1), (0, 0)])
def test_a_reference_is_loaded_only_when_a_kl_term_uses_it(
    in_reward: float, in_loss: float, short: Config
) -> None:
    short.train.ppo.kl_coef, short.train.ppo.kl_loss_coef = in_reward, in_loss
    said: list[str] = []
    task = PPOTask(short, said.append)
    wanted = bool(in_reward or in_loss)
    assert any("Reference policy" in line for line in said) == wanted
    assert (task.trainer.ref_policy is not None) == wanted
    assert ("kl/sequence_mean" in task.step(next(task.loader), lambda stage: None)) == wanted


def test_a_prompt_above_the_limit_is_named_by_file_and_row_or_left_out_or_cut(
    config: Config, write_rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config.data.train = write_rows("train", ROWS)
    with pytest.raises(DataError, match=r"train\.jsonl:5 \(\d+ tokens\)"):
        PPOTask(config)
    config.data.overlong = "drop"
    task = PPOTask(config)
    assert task.kept == [0, 1, 2, 3, 5]
    assert "1 of 6 rows" in caplog.text and "left out" in caplog.text
    config.data.overlong = "truncate_left"
    task = PPOTask(config)
    assert task.kept == [0, 1, 2, 3, 4, 5]
    task.step(LoaderBatch(1, 0, [4, 0]), lambda stage: None)


def test_rows_that_want_a_rule_are_refused_by_row(config: Config, write_rows: Any) -> None:
    row = {"prompt": "2+2?", "reward_model": {"style": "rule", "ground_truth": "4"}}
    config.data.train = write_rows("train", [ROWS[0], row])
    with pytest.raises(DataError, match=r"train\.jsonl:2: reward_model\.style is 'rule'"):
        PPOTask(config)


def test_the_reference_normalisation_reads_what_verl_rm_left_beside_the_model(
    short: Config, tiny_reward: Path, tmp_path: Path
) -> None:
    import shutil

    folder = shutil.copytree(tiny_reward, tmp_path / "reward")
    (folder / "score_statistics.json").write_text('{"mean": 0.5, "std": 2.0}')
    short.model.reward_model.pretrained_path = str(folder)
    assert PPOTask(short).trainer.reference_moments == (0.5, 2.0)


def test_an_alert_whose_action_is_stop_saves_and_stops(short: Config, tiny_qwen2: Path) -> None:
    short.model.ref_policy.pretrained_path = str(tiny_qwen2)
    short.monitor.alerts.sequence_kl.limit = 0.01
    short.monitor.alerts.sequence_kl.action = "stop"
    with pytest.raises(TrainingStopped, match=r"kl/sequence_mean is .* limit 0\.01") as stopped:
        train("ppo", short)
    assert stopped.value.exit_code == 4
    assert (Path(short.run_dir) / "checkpoints" / "step_000001" / "manifest.json").exists()
    short.monitor.alerts.sequence_kl.action = "warn"
    train("ppo", short, resume=True)
    assert json.loads((Path(short.run_dir) / "state.json").read_text()) == {"finished": 2}


def test_bad_gradients_in_a_row_stop_the_run_and_leave_the_batch(
    short: Config, weights: Any, same_weights: Any
) -> None:
    short.train.ppo.epochs, short.train.ppo.minibatch_size = 1, 1
    short.train.ppo.max_bad_steps = 3
    task = PPOTask(short)
    actor = task.trainer.actor
    actor.workers[0].engine.trainable()[0][1].register_hook(lambda g: torch.full_like(g, torch.nan))
    before = weights(actor)
    with opened(short, False) as directory:
        with pytest.raises(TrainingStopped, match="actor: 3 optimiser steps in a row") as stopped:
            Run(task, directory).fit()
        assert stopped.value.exit_code == 4
        dumped = (directory.logs / "batch_step_000001.jsonl").read_text().splitlines()
    assert same_weights(before, weights(actor))
    assert len(dumped) == 4
    prompts = {row["prompt"] for row in ROWS}
    assert {json.loads(line)["prompt"] for line in dumped} <= prompts


def test_bad_gradients_in_a_row_are_counted_across_a_resume(short: Config, tmp_path: Path) -> None:
    short.train.ppo.epochs, short.train.ppo.max_bad_steps = 1, 2

    def poisoned() -> PPOTask:
        task = PPOTask(short)
        parameter = task.trainer.critic.workers[0].engine.trainable()[0][1]
        parameter.register_hook(lambda gradient: gradient * float("nan"))
        return task

    first = poisoned()
    first.step(LoaderBatch(1, 0, [0, 1]), lambda stage: None)
    first.save(tmp_path)
    second = poisoned()
    second.load(tmp_path)
    with pytest.raises(TrainingStopped, match="critic: 2 optimiser steps in a row"):
        second.step(LoaderBatch(2, 0, [2, 3]), lambda stage: None)


def test_the_answers_of_the_start_policy_are_not_replaced_by_a_win_rate_of_one_half(
    short: Config, write_rows: Any, tmp_path: Path
) -> None:
    short.data.eval = write_rows("eval", [{"prompt": "Why not?"}])
    task = PPOTask(short)
    assert task.evaluate(0, tmp_path / "step_000000.jsonl")["eval/win_rate"] == 0.5
    task.evaluate(1, tmp_path / "step_000001.jsonl")
    (tmp_path / "step_000000.jsonl").unlink()
    with pytest.raises(RunDirectoryError, match=r"step_000000\.jsonl is missing"):
        task.evaluate(2, tmp_path / "step_000002.jsonl")


def test_without_held_out_prompts_nothing_is_evaluated(short: Config, tmp_path: Path) -> None:
    assert PPOTask(short).evaluate(0, tmp_path / "step_000000.jsonl") == {}
    assert list(tmp_path.glob("step_*")) == []
