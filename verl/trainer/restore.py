"""Models of a run or a folder, ready to answer or to be exported, without the rest of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.checkpoint.store import CheckpointStore
from verl.cluster.local import LocalExecutor
from verl.config.load import load_config
from verl.config.schema import Config, Optimizer
from verl.errors import CheckpointError, ConfigError, RunDirectoryError
from verl.workers.build import build_actor, build_critic, build_trainable
from verl.workers.trained import TrainedWorker

#: Roles whose weights a checkpoint of each stage holds; the first is what the stage is about.
ROLES_OF_STAGE = {"sft": ("actor",), "rm": ("reward_model",), "ppo": ("actor", "critic")}


def is_run(path: Path) -> bool:
    """Whether `path` is a run directory (rather than a model folder)."""
    return (path / "config.yaml").is_file() and (path / "checkpoints").is_dir()


def run_config(run: Path) -> Config:
    """The resolved configuration that a run was started with."""
    if not is_run(run):
        raise RunDirectoryError(
            f"{run} is not a run directory (no config.yaml and checkpoints/); "
            "give the run_dir of a `verl sft`, `verl rm` or `verl ppo`"
        )
    config = load_config(str(run / "config.yaml")).config
    config.run_dir = str(run)
    return config


def find_step(run: Path, which: str) -> tuple[int, Path, str]:
    """Resolve `latest`, `best` or a number to (step, folder, stage).

    Raises:
        CheckpointError: there is no such checkpoint.
        ConfigError: `which` is none of these.
    """
    store = CheckpointStore(run / "checkpoints", keep=1)
    if which == "latest":
        step = store.latest()
    elif which == "best":
        best = store.best()
        step = best[0] if best else None
    elif which.isdigit():
        step = int(which)
    else:
        raise ConfigError(f"--step {which}: give a number, `latest` or `best`")
    if step is None:
        raise CheckpointError(f"{run} has no complete checkpoint ({which})")
    return step, store.path(step), str(store.info(step)["stage"])


def restored_worker(config: Config, role: str, folder: Path) -> Any:
    """The worker of `role` with the weights of a checkpoint.

    Raises:
        CheckpointError: the checkpoint does not hold `role`.
    """
    device = LocalExecutor(config.resource).device(role)
    if role == "actor":
        worker: TrainedWorker = build_actor(config, device)
    elif role == "critic":
        worker = build_critic(config, device)
    else:
        worker = TrainedWorker(role, build_trainable(config, role, device))
    worker.prepare_training(Optimizer(), 1.0, 1)
    worker.load_state(folder)
    return worker
