"""Runs that were stopped, killed or sent back end like the run that nothing happened to."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

# Figures of the machine and of the process, not of the training.
UNSTABLE = ("time/", "throughput/", "memory/")


class Stage:
    """The settings of one stage's small run."""

    def __init__(self, name: str, settings: list[str]) -> None:
        self.name, self.settings = name, settings

    def arguments(self, run: Path, *more: str) -> list[str]:
        return [self.name, *self.settings, f"run_dir={run}", *more]


COMMON = [
    "data.seq_length=96", "data.batch_size=4", "train.num_epochs=2", "checkpoint.every=2",
    "eval.every=2", "monitor.trackers=[]", "checkpoint.keep=2", "train.tokens_per_microbatch=128",
]  # fmt: skip


@pytest.fixture(scope="session")
def stages(files: dict[str, Path], tiny_llama: Path, tiny_reward: Path) -> dict[str, Stage]:
    """10 rows in batches of 4, twice: 6 steps, of which the third and the last are smaller."""

    def data(kind: str) -> list[str]:
        return [f"data.train={files[f'{kind}/train']}", f"data.eval={files[f'{kind}/eval']}"]

    ppo = [
        f"model.actor.pretrained_path={tiny_llama}",
        f"model.reward_model.pretrained_path={tiny_reward}",
        "data.response_length=8", "train.ppo.actor_lr=1e-3", "train.ppo.epochs=2",
        "train.ppo.minibatch_size=2", "train.ppo.kl_controller=adaptive",
        "train.ppo.kl_target=0.05", "train.ppo.kl_horizon=20", "train.ppo.normalize_reward=running",
    ]  # fmt: skip
    actor = f"model.actor.pretrained_path={tiny_llama}"
    reward = f"model.reward_model.pretrained_path={tiny_llama}"
    return {
        "ppo": Stage("ppo", [*data("rl"), *COMMON, *ppo]),
        "sft": Stage("sft", [*data("sft"), *COMMON, actor, "train.sft.lr=1e-3"]),
        "rm": Stage("rm", [*data("rm"), *COMMON, reward, "train.reward_model.lr=1e-3"]),
    }


@pytest.fixture(scope="session")
def whole(
    stages: dict[str, Stage], run_verl: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Uninterrupted runs of the three stages, made when first asked for."""

    class Runs(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            run = tmp_path_factory.mktemp("whole") / name
            code, text = run_verl(*stages[name].arguments(run))
            assert code == 0, text
            self[name] = run
            return run

    return Runs()


def records(run: Path) -> list[dict[str, Any]]:
    """Metrics without what may differ between two equal runs."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if name not in ("time", "segment") and not name.startswith(UNSTABLE)
        }
        for line in lines
    ]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, except manifests, which list the others."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def assert_same(run: Path, expected: Path) -> None:
    """Metrics, samples, checkpoints (weights, optimisers, state, random state) and export."""
    assert records(run) == records(expected)
    for name in ("samples", "checkpoints", "export"):
        got, wanted = contents(run / name), contents(expected / name)
        assert got.keys() == wanted.keys()
        for file, data in wanted.items():
            assert got[file] == data, f"{name}/{file} differs"
    assert (run / "state.json").read_bytes() == (expected / "state.json").read_bytes()
    remains = [p.name for p in run.rglob("*") if ".tmp-" in p.name or ".old-" in p.name]
    assert remains == []


def logged(run: Path, step: int) -> bool:
    """Whether the training of `step` is in the metrics."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return False
    lines = path.read_bytes().split(b"\n")
    return any(f'"step": {step}, "kind": "train"'.encode() in line for line in lines)


def steps_of(run: Path) -> list[int]:
    return [int(p.name[5:]) for p in sorted((run / "checkpoints").glob("step_??????"))]


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


# --- the uninterrupted run ---------------------------------------------------------------------


def test_the_run_that_the_others_are_compared_with_does_what_its_settings_say(
    whole: dict[str, Path],
) -> None:
    train = [line for line in records(whole["ppo"]) if line["kind"] == "train"]
    assert [line["step"] for line in train] == [1, 2, 3, 4, 5, 6]
    assert [line["data/epoch"] for line in train] == [0, 0, 0, 1, 1, 1]
    assert len({line["kl/coef"] for line in train}) == 6
    held_out = [line["step"] for line in records(whole["ppo"]) if line["kind"] == "eval"]
    assert held_out == [0, 2, 4, 6]
    assert train[0]["reward/mean"] != train[0]["score/mean"]


def test_two_uninterrupted_runs_are_the_same(
    stages: dict[str, Stage], whole: dict[str, Path], run_verl: Any, tmp_path: Path
) -> None:
    expected = whole["ppo"]
    code, text = run_verl(*stages["ppo"].arguments(tmp_path / "run"))
    assert code == 0, text
    assert_same(tmp_path / "run", expected)


# --- stopped by a signal -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo", "sft", "rm"])
def test_sigterm_finishes_the_step_saves_and_the_resumed_run_is_the_same(
    name: str, stages: dict[str, Stage], whole: dict[str, Path], run_verl: Any, tmp_path: Path
) -> None:
    expected, run = whole[name], tmp_path / "run"
    command = run_verl.start(*stages[name].arguments(run))
    assert command.wait_until(lambda: logged(run, 1))
    command.send(signal.SIGTERM)
    assert command.wait() == 130, command.text()
    assert "the state is saved" in command.text() and "--resume" in command.text()
    stopped = steps_of(run)[-1]
    assert stopped < 6 and logged(run, stopped) and not logged(run, stopped + 1)
    assert not (run / "state.json").exists()

    code, text = run_verl(*stages[name].arguments(run, "--resume"))
    assert code == 0, text
    # The checkpoint of the stop is one that the other run did not make.
    if stopped not in steps_of(expected):
        shutil.rmtree(run / "checkpoints" / f"step_{stopped:06d}", ignore_errors=True)
    assert_same(run, expected)
