"""The front door for Python users: one object from a configuration, one call per stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl.cluster.resources import ROLES, resolve_placements
from verl.config.check import check
from verl.config.load import load_config
from verl.config.schema import Config
from verl.errors import RunDirectoryError
from verl.models.precision import resolve_dtype
from verl.trainer.ppo import whole_tree
from verl.trainer.random_state import seed_generators
from verl.trainer.run import Run, Task, opened

#: Role and setting of every precision that a stage uses.
PRECISIONS = {
    "sft": [("actor", "dtype")],
    "rm": [("reward_model", "dtype")],
    "ppo": [
        ("actor", "dtype"),
        ("critic", "dtype"),
        ("ref_policy", "inference_dtype"),
        ("reward_model", "inference_dtype"),
    ],
}


class Trainer:
    """A checked configuration with its devices.

    Args:
        config: the tree, or a plain mapping of its settings; `{}` gives the defaults.

    Raises:
        ConfigError: an unknown or impossible setting.
        PlacementError: a device that `resource` names is not there.
    """

    def __init__(self, config: Config | Mapping[str, Any] | None = None) -> None:
        self.config = whole_tree(config)
        self.placements = resolve_placements(self.config.resource)
        print(self.describe_placement(), flush=True)

    def describe_placement(self) -> str:
        """One line: which role has which device."""
        parts = ", ".join(f"{role} {self.placements[role]}" for role in ROLES)
        return f"Initializing ResourcePool: {parts}"

    def sft(self, resume: bool | int = False) -> dict[str, float]:
        """Run supervised fine-tuning to its end; returns the last held-out metrics."""
        return train("sft", self.config, resume)

    def reward_model(self, resume: bool | int = False) -> dict[str, float]:
        """Train a reward model; returns the last held-out metrics."""
        return train("rm", self.config, resume)

    def ppo(self, resume: bool | int = False) -> dict[str, float]:
        """Run PPO to its end; returns the last held-out metrics."""
        return train("ppo", self.config, resume)


def make_task(stage: str, config: Config, say: Callable[[str], None] = print) -> Task:
    """Load what `stage` (sft, rm, ppo) needs."""
    if stage == "sft":
        from verl.trainer.sft import SFTTask

        return SFTTask(config, say)
    if stage == "rm":
        from verl.trainer.reward_model import RewardModelTask

        return RewardModelTask(config, say)
    if stage == "ppo":
        from verl.trainer.ppo_task import PPOTask

        return PPOTask(config, say)
    raise ValueError(f"unknown stage {stage!r}; stages are sft, rm, ppo")


def train(
    stage: str,
    config: Config,
    resume: bool | int = False,
    say: Callable[[str], None] = print,
) -> dict[str, float]:
    """Run a stage in its run directory, from the start or from a checkpoint.

    Args:
        resume: False for a new run, True for the latest complete checkpoint, or a step.

    Raises:
        ConfigError, DataError, ModelError: before the first step.
        RunDirectoryError: the directory is in use, or holds a run and `resume` is off.
        CheckpointError: no such checkpoint, or it belongs to another configuration.
        Interrupted, TrainingStopped: see `Run.fit`.
    """
    check(config, stage)
    resuming = resume is not False
    with opened(config, resuming) as directory:
        step = None if isinstance(resume, bool) else resume
        finished = directory.finished()
        if finished is not None and step is None:
            say(f"{directory.path} is finished (step {finished}); nothing to do")
            return {}
        if resuming and step is not None and step < 0:
            raise RunDirectoryError(f"--resume {step}: a step is a count, 0 or more")
        config = settled(config, stage, directory.config)
        seed_generators(config.train.seed)
        run = Run(make_task(stage, config, say), directory)
        if resuming:
            run.restore(step)
        return run.fit()


def settled(config: Config, stage: str, saved: Path) -> Config:
    """The configuration with every `auto` precision of the stage replaced by what it means here.

    A run keeps the precision it started with: measured again on a busy machine, or on another
    one, `auto` could become another and the resumed run another run.

    Args:
        saved: config.yaml of the run; there from the second start on.
    """
    config = whole_tree(config)
    before = load_config(str(saved)).config if saved.is_file() else None
    placements = resolve_placements(config.resource)
    for role, name in PRECISIONS[stage]:
        section = getattr(config.model, role)
        if getattr(section, name) != "auto":
            continue
        value = getattr(getattr(before.model, role), name) if before is not None else "auto"
        kind = "cuda" if placements[role].kind == "gpu" else "cpu"
        setattr(section, name, str(resolve_dtype(value, kind)).removeprefix("torch."))
    return config
