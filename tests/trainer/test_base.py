"""The front door: `Trainer` and `train`, and what they refuse before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl import Trainer
from verl.config.load import load_config
from verl.config.schema import Config
from verl.errors import CheckpointError, ConfigError, PlacementError, RunDirectoryError
from verl.models import precision
from verl.trainer.base import make_task, train


def test_an_empty_configuration_is_the_default_one_and_says_where_the_roles_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = Trainer({"resource": {"critic": {"cpu": 1}}})
    assert trainer.config.train.ppo.clip_epsilon == 0.2
    assert "Initializing ResourcePool: actor " in capsys.readouterr().out
    assert str(trainer.placements["critic"]) == "cpu[0]"


def test_wrong_configurations_and_devices_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="clip_epsilon"):
        Trainer({"train": {"ppo": {"clip_epsilom": 0.1}}})
    with pytest.raises(PlacementError, match=r"needs 1 .* for critic gpu\[99\]"):
        Trainer({"resource": {"critic": {"gpu": [99]}}})


def test_an_unknown_stage_is_refused(config: Config) -> None:
    with pytest.raises(ValueError, match="stages are sft, rm, ppo"):
        make_task("dpo", config)


def test_a_missing_setting_is_found_before_the_run_directory_is_made(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"data\.train is not set"):
        train("ppo", config)
    assert not Path(config.run_dir).exists()


@pytest.fixture
def sft(config: Config, write_rows: Any) -> Config:
    """Two steps of SFT with two held-out rows."""

    def row(n: int) -> dict[str, Any]:
        question = {"role": "user", "content": f"{n}?"}
        return {"messages": [question, {"role": "assistant", "content": "Yes."}]}

    config.data.train = write_rows("train", [row(n) for n in range(8)])
    config.data.eval = write_rows("eval", [row(n) for n in range(8, 10)])
    config.checkpoint.every = 1
    return config


def test_a_run_returns_its_last_held_out_metrics_and_an_earlier_run_is_not_overwritten(
    sft: Config,
) -> None:
    metrics = Trainer(sft).sft()
    lines = (Path(sft.run_dir) / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["kind"] == "eval"
    assert json.loads(lines[-1])["eval/loss"] == metrics["eval/loss"]
    with pytest.raises(RunDirectoryError, match="--resume"):
        train("sft", sft)
    assert train("sft", sft, resume=True) == {}
    with pytest.raises(RunDirectoryError, match="a step is a count"):
        train("sft", sft, resume=-1)
    assert train("sft", sft, resume=1)["eval/loss"] == metrics["eval/loss"]


def test_a_run_without_an_evaluation_at_the_start(sft: Config) -> None:
    sft.eval.at_start = False
    train("sft", sft)
    lines = [json.loads(x) for x in (Path(sft.run_dir) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [lines[-1]["step"]]


def test_the_start_model_is_not_taken_for_the_best_one(sft: Config) -> None:
    # So large a rate that the first steps can only make the held-out loss worse.
    sft.train.sft.lr, sft.train.num_epochs, sft.eval.every = 1.0, 2, 2
    train("sft", sft)
    lines = [json.loads(x) for x in (Path(sft.run_dir) / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval/loss"] for line in lines if line["kind"] == "eval"}
    assert min(losses, key=losses.__getitem__) == 0
    del losses[0]
    best = json.loads((Path(sft.run_dir) / "checkpoints" / "best.json").read_text())
    assert best["step"] == min(losses, key=losses.__getitem__)
    assert best["metric"] == -losses[best["step"]]


def test_a_resumed_run_keeps_the_precision_it_was_started_with(
    sft: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sft.model.actor.dtype == "auto"
    rates = {"float32": 1.0, "bfloat16": 5.0}
    monkeypatch.setattr(precision, "matmul_rates", lambda device: rates)
    train("sft", sft)
    saved = load_config(str(Path(sft.run_dir) / "config.yaml")).config
    assert saved.model.actor.dtype == "bfloat16"
    assert sft.model.actor.dtype == "auto"
    whole = (Path(sft.run_dir) / "checkpoints" / "step_000002" / "actor.safetensors").read_bytes()

    rates["bfloat16"] = 1.0  # the same machine while it is busy, or another one
    train("sft", sft, resume=1)
    saved = load_config(str(Path(sft.run_dir) / "config.yaml")).config
    assert saved.model.actor.dtype == "bfloat16"
    again = (Path(sft.run_dir) / "checkpoints" / "step_000002" / "actor.safetensors").read_bytes()
    assert again == whole
    sft.model.actor.dtype = "float32"
    with pytest.raises(CheckpointError, match=r'model\.actor\.dtype: .*"bfloat16", this run has'):
        train("sft", sft, resume=1)
