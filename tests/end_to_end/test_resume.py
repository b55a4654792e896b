"""Runs that were stopped, killed or sent back end like the run that nothing happened to."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from verl.checkpoint.manifest import build_manifest, read_manifest, write_manifest

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

LAYERS = ["model.actor.train_layers=1", "model.critic.train_layers=1"]
LORA = ["model.actor.lora.rank=2", "model.critic.lora.rank=2", "train.ppo.critic_warmup_steps=1"]


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
        "ppo-layers": Stage("ppo", [*data("rl"), *COMMON, *ppo, *LAYERS]),
        "ppo-lora": Stage("ppo", [*data("rl"), *COMMON, *ppo, *LORA]),
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


def assert_same_files(folder: Path, expected: Path, except_for: Collection[str] = ()) -> None:
    """The same names with the same bytes."""
    got, wanted = contents(folder), contents(expected)
    assert got.keys() == wanted.keys()
    for file, data in wanted.items():
        assert file in except_for or got[file] == data, f"{folder / file} differs"


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint besides its tensors."""
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return state


def assert_same(run: Path, expected: Path) -> None:
    """Metrics, samples, checkpoints (weights, optimisers, state, random state) and export."""
    assert records(run) == records(expected)
    for name in ("samples", "checkpoints", "export"):
        assert_same_files(run / name, expected / name)
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


def saving(run: Path) -> bool:
    """Whether a checkpoint is being written."""
    folder = run / "checkpoints"
    return folder.is_dir() and any(".tmp-" in name for name in os.listdir(folder))


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


# --- stopped by a signal -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "ppo",
        "sft",
        "rm",
        pytest.param("ppo-layers", marks=pytest.mark.slow),
        pytest.param("ppo-lora", marks=pytest.mark.slow),
    ],
)
def test_sigterm_finishes_the_step_saves_and_the_resumed_run_is_the_same(
    name: str, stages: dict[str, Stage], whole: dict[str, Path], run_verl: Any, tmp_path: Path
) -> None:
    if name.endswith("lora"):
        pytest.importorskip("peft", reason="adapters need peft")
    expected, run = whole[name], tmp_path / "run"
    for _ in range(3):
        # No other reason to save: what is saved is saved because of the signal.
        command = run_verl.start(
            *stages[name].arguments(run, "checkpoint.every=50", "eval.every=0")
        )
        assert command.wait_until(lambda: logged(run, 1))
        command.send(signal.SIGTERM)
        code = command.wait()
        if code != 0:  # on a busy machine all six steps may pass before the signal comes
            break
        shutil.rmtree(run)
    assert code == 130, command.text()
    assert "the state is saved" in command.text() and "--resume" in command.text()
    assert len(steps_of(run)) == 1
    stopped = steps_of(run)[0]
    assert stopped < 6 and logged(run, stopped) and not logged(run, stopped + 1)
    assert not (run / "state.json").exists()

    code, text = run_verl(*stages[name].arguments(run, "--resume"))
    assert code == 0, text
    train = [[line for line in records(r) if line["kind"] == "train"] for r in (run, expected)]
    assert train[0] == train[1]
    for part in ("export", "checkpoints/step_000006"):
        assert_same_files(run / part, expected / part, except_for={"state.json"})
    states = [read_state(r / "checkpoints" / "step_000006") for r in (run, expected)]
    for state in states:
        state.pop("best")  # evaluations before the stop were left out above
    assert states[0] == states[1]
    last = "samples/step_000006.jsonl"
    if (expected / last).exists():
        assert (run / last).read_bytes() == (expected / last).read_bytes()


def test_a_second_process_in_the_same_run_directory_is_refused_with_the_first_one_s_pid(
    stages: dict[str, Stage], run_verl: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = run_verl.start(*stages["sft"].arguments(run, "train.num_epochs=500"))
    assert first.wait_until(lambda: logged(run, 1))
    for more in ([], ["--resume"]):
        code, text = run_verl(*stages["sft"].arguments(run, "train.num_epochs=500", *more))
        assert code == 3
        assert f"in use by process {first.pid}" in text
    first.send(signal.SIGINT)
    assert first.wait() == 130, first.text()


# --- killed ------------------------------------------------------------------------------------


def kill_nine(command: Any, run: Path, condition: Any, delay: float, pause: float = 0.001) -> bool:
    """Kill -9 some time after `condition`; False when the command ended by itself before."""
    if command.wait_until(condition, pause=pause):
        time.sleep(delay)
        command.send(signal.SIGKILL)
    code = command.wait()
    assert code in (0, -signal.SIGKILL), command.text()
    return code != 0


def test_killed_before_the_first_checkpoint_and_inside_a_save(
    stages: dict[str, Stage], whole: dict[str, Path], run_verl: Any, tmp_path: Path
) -> None:
    expected, run = whole["ppo"], tmp_path / "run"
    command = run_verl.start(*stages["ppo"].arguments(run))
    assert kill_nine(command, run, lambda: logged(run, 1), 0)
    assert steps_of(run) == []
    command = run_verl.start(*stages["ppo"].arguments(run, "--resume"))
    kill_nine(command, run, lambda: saving(run), 0, pause=0)
    assert "no complete checkpoint" in command.text()

    code, text = run_verl(*stages["ppo"].arguments(run, "--resume"))
    assert code == 0, text
    assert_same(run, expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1])
def test_ten_kills_at_random_moments_of_one_run(
    seed: int, stages: dict[str, Stage], whole: dict[str, Path], run_verl: Any, tmp_path: Path
) -> None:
    expected, run = whole["ppo"], tmp_path / "run"
    draw = random.Random(seed)
    kills = in_saves = 0
    resume: list[str] = []
    # How long a save takes is the machine's business: go on until one of the kills has hit one.
    while kills < 10 or (not in_saves and kills < 40):
        command = run_verl.start(*stages["ppo"].arguments(run, *resume))
        if draw.random() < 0.5:
            moment, delay = saving, draw.random() ** 2 * 0.01
        else:
            # After the models are loaded, so that some kills hit each part of the work.
            moment, delay = Path.is_dir, draw.random() * 1.5
        killed = kill_nine(command, run, lambda moment=moment: moment(run), delay, pause=0)
        in_saves += killed and saving(run)
        kills += killed
        if not killed:  # it got through; start over for the kills that are left
            assert_same(run, expected)
            shutil.rmtree(run)
        resume = ["--resume"] if run.exists() else []
    code, text = run_verl(*stages["ppo"].arguments(run, "--resume"))
    assert code == 0, text
    assert_same(run, expected)
    assert in_saves, "no kill hit a save, so this test showed less than its name says"


# --- resumed from where one wants ----------------------------------------------------------------

DENSE = ["checkpoint.every=1", "checkpoint.keep=6"]


@pytest.fixture(scope="session")
def dense(
    stages: dict[str, Stage], run_verl: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A finished PPO run that kept all its checkpoints; tests work on copies."""
    run = tmp_path_factory.mktemp("dense") / "run"
    code, text = run_verl(*stages["ppo"].arguments(run, *DENSE))
    assert code == 0, text
    assert steps_of(run) == [1, 2, 3, 4, 5, 6]
    return run


def test_saving_more_often_changes_nothing(dense: Path, whole: dict[str, Path]) -> None:
    assert records(dense) == records(whole["ppo"])
    assert contents(dense / "export") == contents(whole["ppo"] / "export")


def test_going_back_to_the_end_of_an_epoch_runs_the_next_epoch_again(
    dense: Path, stages: dict[str, Stage], run_verl: Any, tmp_path: Path
) -> None:
    run = copied(dense, tmp_path / "run")
    command = run_verl.start(*stages["ppo"].arguments(run, *DENSE, "--resume", "3"))
    assert command.wait_until(lambda: steps_of(run)[-1] < 6)
    assert command.wait() == 0, command.text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [(line["step"], line["segment"]) for line in lines if line["kind"] == "train"]
    assert train == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]
    assert_same(run, dense)


def test_a_finished_run_resumed_does_nothing_and_says_so(
    dense: Path, stages: dict[str, Stage], run_verl: Any, tmp_path: Path
) -> None:
    run = copied(dense, tmp_path / "run")
    for _ in range(2):
        code, text = run_verl(*stages["ppo"].arguments(run, *DENSE, "--resume"))
        assert code == 0
        assert "is finished (step 6); nothing to do" in text
        assert "Loading" not in text
    assert contents(run) == contents(dense)


def test_a_run_killed_after_its_last_save_only_exports(
    dense: Path, stages: dict[str, Stage], run_verl: Any, tmp_path: Path
) -> None:
    run = copied(dense, tmp_path / "run")
    (run / "state.json").unlink()
    shutil.rmtree(run / "export")
    (run / "export.tmp-999999999-0123abcd").mkdir()
    code, text = run_verl(*stages["ppo"].arguments(run, *DENSE, "--resume"))
    assert code == 0, text
    assert (run / "metrics.jsonl").read_bytes() == (dense / "metrics.jsonl").read_bytes()
    assert_same(run, dense)


def test_a_run_killed_between_save_and_the_record_of_the_best_step(
    dense: Path, stages: dict[str, Stage], run_verl: Any, tmp_path: Path
) -> None:
    run = copied(dense, tmp_path / "run")
    best = json.loads((dense / "checkpoints" / "best.json").read_text())["step"]
    (run / "checkpoints" / "best.json").unlink()
    (run / "state.json").unlink()
    for step in range(best + 1, 7):
        shutil.rmtree(run / "checkpoints" / f"step_{step:06d}")
    code, text = run_verl(*stages["ppo"].arguments(run, *DENSE, "--resume"))
    assert code == 0, text
    assert_same(run, dense)


def test_the_last_step_is_saved_when_the_epochs_end_before_total_steps(
    files: dict[str, Path], tiny_llama: Path, run_verl: Any, tmp_path: Path
) -> None:
    code, text = run_verl(
        "sft", f"data.train={files['sft/train']}", f"model.actor.pretrained_path={tiny_llama}",
        "data.batch_size=2", "train.total_steps=100", "checkpoint.every=2", "checkpoint.keep=9",
        "monitor.trackers=[]", f"run_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert code == 0, text
    assert steps_of(tmp_path / "run") == [2, 4, 5]


# --- refused -------------------------------------------------------------------------------------


def test_another_setting_is_refused_with_its_key_and_both_values(
    dense: Path, stages: dict[str, Stage], run_verl: Any, tmp_path: Path
) -> None:
    run = copied(dense, tmp_path / "run")
    changed = ["train.ppo.gamma=0.5", "rollout.top_k=7"]
    code, text = run_verl(*stages["ppo"].arguments(run, *DENSE, *changed, "--resume", "3"))
    assert code == 3
    assert "train.ppo.gamma: the checkpoint was made with 1.0, this run has 0.5" in text
    assert "rollout.top_k: the checkpoint was made with 0, this run has 7" in text
    assert contents(run) == contents(dense)


@contextmanager
def one_more_byte(path: Path) -> Iterator[None]:
    """A file with a line end added, for as long as the block runs."""
    before = path.read_bytes() if path.exists() else None
    path.write_bytes((before or b"") + b"\n")
    yield
    if before is None:
        path.unlink()
    else:
        path.write_bytes(before)


@pytest.mark.parametrize("changed", ["input.train", "input.eval", "input.actor"])
def test_changed_data_or_models_are_refused_by_name(
    changed: str,
    dense: Path,
    stages: dict[str, Stage],
    files: dict[str, Path],
    tiny_llama: Path,
    run_verl: Any,
    tmp_path: Path,
) -> None:
    run = copied(dense, tmp_path / "run")
    path = {
        "input.train": files["rl/train"],
        "input.eval": files["rl/eval"],
        "input.actor": tiny_llama / "notes.txt",
    }[changed]
    with one_more_byte(path):
        code, text = run_verl(*stages["ppo"].arguments(run, *DENSE, "--resume", "3"))
    assert code == 3
    assert f"{changed}: the checkpoint was made with" in text
    assert text.count("the checkpoint was made with") == 1
    assert contents(run) == contents(dense)


def test_a_step_that_is_not_there_is_refused_with_those_that_are(
    dense: Path, stages: dict[str, Stage], run_verl: Any, tmp_path: Path
) -> None:
    run = copied(dense, tmp_path / "run")
    code, text = run_verl(*stages["ppo"].arguments(run, *DENSE, "--resume", "9"))
    assert code == 3
    assert "no complete checkpoint of step 9" in text and "1, 2, 3, 4, 5, 6" in text


def test_a_half_written_newest_checkpoint_is_passed_over_with_a_warning(
    dense: Path, stages: dict[str, Stage], run_verl: Any, tmp_path: Path
) -> None:
    run = copied(dense, tmp_path / "run")
    (run / "state.json").unlink()
    broken = run / "checkpoints" / "step_000006"
    os.truncate(broken / "critic.safetensors", 1000)
    code, text = run_verl(*stages["ppo"].arguments(run, *DENSE, "--resume"))
    assert code == 0, text
    assert f"WARNING skipping checkpoint {broken}" in text
    assert_same(run, dense)


def sealed(folder: Path) -> None:
    """Write the manifest of a checkpoint anew, so that only its content is wrong."""
    manifest = read_manifest(folder)
    (folder / "manifest.json").unlink()
    write_manifest(folder, build_manifest(folder, manifest["step"], manifest["info"]))


def test_a_checkpoint_without_its_critic_is_refused_and_nothing_newer_goes(
    dense: Path, stages: dict[str, Stage], run_verl: Any, tmp_path: Path
) -> None:
    run = copied(dense, tmp_path / "run")
    folder = run / "checkpoints" / "step_000004"
    (folder / "critic.safetensors").unlink()
    sealed(folder)
    before = contents(run)
    code, text = run_verl(*stages["ppo"].arguments(run, *DENSE, "--resume", "4"))
    assert code == 3
    assert f"{folder} has no critic.safetensors" in text
    assert contents(run) == before


@pytest.mark.parametrize("lost", ["exp_avg/", "exp_avg_sq/", "step/", "exp"])
def test_a_checkpoint_without_optimiser_moments_is_refused(
    lost: str, dense: Path, stages: dict[str, Stage], run_verl: Any, tmp_path: Path
) -> None:
    import torch

    from verl.checkpoint.tensors import load_tensors, save_tensors

    run = copied(dense, tmp_path / "run")
    folder = run / "checkpoints" / "step_000004"
    tensors = load_tensors(folder / "actor.safetensors", torch.device("cpu"))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}
    assert len(kept) < len(tensors)
    (folder / "actor.safetensors").unlink()
    save_tensors(folder / "actor.safetensors", kept, {"role": "actor"})
    sealed(folder)
    code, text = run_verl(*stages["ppo"].arguments(run, *DENSE, "--resume", "4"))
    assert code == 3, text
    assert f"{folder / 'actor.safetensors'}: the optimiser state does not fit this model" in text
    assert f"missing: ['{lost}" in text
