"""The life of a run: directory, lock, resume, the loop of steps, evaluation, checkpoints, export.

In: a configuration and the task of one stage (SFT, reward model, PPO). Out: a run directory that
a resumed run leaves as an uninterrupted one would. What a step does is the task's business.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from verl.checkpoint.atomic import fsync_directory, write_json_atomic
from verl.checkpoint.fingerprint import fingerprint_config, require_same_fingerprints
from verl.checkpoint.run_directory import RunDirectory
from verl.checkpoint.signals import StopSignal
from verl.checkpoint.store import CheckpointStore
from verl.checkpoint.tensors import load_tensors, save_tensors
from verl.config.load import save_resolved
from verl.config.schema import Config
from verl.data.loader import LoaderBatch, ResumableLoader
from verl.errors import CheckpointError, Interrupted, TrainingStopped
from verl.monitor.alerts import check_alerts
from verl.monitor.console import Progress
from verl.monitor.log import MetricLog, next_segment
from verl.monitor.trackers import open_trackers

logger = logging.getLogger(__name__)

#: Settings that may differ when a run is resumed, because no result depends on them.
MAY_CHANGE = (
    "run_dir", "checkpoint", "monitor", "resource", "eval.every", "train.tokens_per_microbatch",
)  # fmt: skip


class Task(Protocol):
    """One stage of training, as the loop sees it."""

    stage: str
    config: Config
    loader: ResumableLoader
    #: Held-out metric that names the best checkpoint, and whether larger is better.
    best_metric: tuple[str, bool]

    def step(self, batch: LoaderBatch, on_stage: Callable[[str], None]) -> dict[str, float]:
        """Train on one batch of rows; returns metrics."""
        ...

    def evaluate(self, step: int, samples: Path) -> dict[str, float]:
        """Held-out metrics of the model as it is; sample answers go to `samples`."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimiser state."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        ...

    def state(self) -> dict[str, Any]:
        """Small JSON state besides the weights."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore `state()`."""
        ...

    def inputs(self) -> dict[str, str]:
        """Fingerprints of models and data."""
        ...

    def export(self, folder: Path) -> None:
        """Write the trained model in Hugging Face format."""
        ...

    def dump(self, folder: Path, step: int) -> None:
        """Write the last batch for a person to look at, after training stopped itself."""
        ...


class Run:
    """Drives a task from its first step, or from a checkpoint, to its end."""

    def __init__(self, task: Task, directory: RunDirectory) -> None:
        config = task.config
        self.task, self.directory, self.config = task, directory, config
        self.store = CheckpointStore(directory.checkpoints, config.checkpoint.keep)
        self.total = task.loader.total_steps
        self.fingerprints = {
            **fingerprint_config(config.model_dump(mode="json"), MAY_CHANGE),
            **task.inputs(),
        }
        self.step = 0

    # --- start ---------------------------------------------------------------------------------

    def restore(self, step: int | None) -> None:
        """Continue from checkpoint `step`, or from the latest complete one.

        Raises:
            CheckpointError: no such checkpoint, or it belongs to another configuration.
        """
        chosen = self.store.latest() if step is None else step
        if chosen is None:
            logger.warning("no complete checkpoint in %s: starting from step 0", self.store.root)
            self.directory.trim_after(-1)
            return
        folder = self.store.path(chosen)
        state = json.loads((folder / "state.json").read_text())
        require_same_fingerprints(state["fingerprints"], self.fingerprints, folder)
        if step is not None:
            self.store.discard_after(chosen)
        self.directory.trim_after(chosen)
        self.task.load(folder)
        self.task.load_state(state["task"])
        self.task.loader.load_state(state["data"])
        load_rng(folder / "rng.safetensors")
        self.step = chosen

    # --- the loop ------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train to the end; returns the last held-out metrics.

        Raises:
            Interrupted: SIGINT or SIGTERM; the state was saved first.
            TrainingStopped: an alert whose action is `stop`, or too many bad steps.
        """
        resumed = self.step > 0
        save_resolved(self.config, self.directory.config)
        trackers = open_trackers(
            self.config.monitor.trackers, self.directory.path, first_step=self.step + 1
        )
        segment = next_segment(self.directory.path) if resumed else 0
        held_out: dict[str, float] = {}
        with (
            MetricLog(self.directory.path, segment, trackers) as self.log,
            Progress(self.total, start_step=self.step, title=self.task.stage) as self.progress,
            StopSignal() as stop,
        ):
            if not resumed:
                held_out = self._evaluate()
            for batch in self.task.loader:
                metrics = self._train(batch)
                last = self.step == self.total
                every = self.config.eval.every
                if last or (every and self.step % every == 0):
                    held_out = self._evaluate()
                best = bool(held_out) and self._is_best(held_out)
                if last or best or stop.requested or self.step % self.config.checkpoint.every == 0:
                    self._save(held_out if best else None)
                self._alert(metrics)
                held_out = held_out if last else {}
                if stop.requested and not last:
                    raise Interrupted(
                        f"stopped after step {self.step} of {self.total}; the state is saved. "
                        "Continue with --resume"
                    )
            self._finish()
        return held_out

    def _train(self, batch: LoaderBatch) -> dict[str, float]:
        started = time.perf_counter()
        try:
            with self.progress.stage("train"):
                metrics = self.task.step(batch, self._show_stage)
        except TrainingStopped:
            self.task.dump(self.directory.logs, batch.step)
            logger.error("the batch is in %s", self.directory.logs)
            raise
        self.step = batch.step
        metrics.setdefault("time/step", time.perf_counter() - started)
        metrics |= {"data/epoch": float(batch.epoch), "memory/peak_gib": peak_memory_gib()}
        self.log.log(self.step, "train", metrics)
        self.progress.step(self.step, metrics)
        return metrics

    def _show_stage(self, name: str) -> None:
        logger.debug("step %d: %s", self.step + 1, name)

    def _evaluate(self) -> dict[str, float]:
        started = time.perf_counter()
        samples = self.directory.samples / f"step_{self.step:06d}.jsonl"
        with self.progress.stage("evaluate"):
            metrics = self.task.evaluate(self.step, samples)
        if metrics:
            metrics["time/evaluate"] = time.perf_counter() - started
            self.log.log(self.step, "eval", metrics)
            self.progress.message(held_out_line(self.step, metrics))
        return metrics

    def _is_best(self, held_out: dict[str, float]) -> bool:
        name, larger = self.task.best_metric
        if name not in held_out or not math.isfinite(held_out[name]):
            return False
        value = held_out[name] if larger else -held_out[name]
        best = self.store.best()
        return best is None or value > best[1]

    def _save(self, best: dict[str, float] | None) -> None:
        self.log.sync()
        with self.progress.stage("save"):
            self.store.save(self.step, self._write, {"stage": self.task.stage})
            if best is not None:
                name, larger = self.task.best_metric
                self.store.mark_best(self.step, best[name] if larger else -best[name])
            self.store.prune()

    def _write(self, folder: Path) -> None:
        self.task.save(folder)
        save_rng(folder / "rng.safetensors")
        state = {
            "step": self.step,
            "task": self.task.state(),
            "data": self.task.loader.state(),
            "fingerprints": self.fingerprints,
        }
        write_json_atomic(folder / "state.json", state)

    def _alert(self, metrics: dict[str, float]) -> None:
        for event in check_alerts(metrics, self.config.monitor.alerts):
            self.progress.message(event.message())
            if event.action == "stop":
                if self.step not in self.store.steps():
                    self._save(None)
                raise TrainingStopped(event.message())

    def _finish(self) -> None:
        self.progress.message(f"exporting the model to {self.directory.export}")
        export_to(self.directory.export, self.task.export)
        self.directory.mark_finished(self.step)


def export_to(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder and put it in the place of `folder` when complete."""
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    old = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    fsync_directory(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def held_out_line(step: int, metrics: dict[str, float]) -> str:
    """The held-out result of a step on one line."""
    known = [
        ("eval/score_sampled_mean", "score {:.3f}", "eval/score_sampled_ci95"),
        ("eval/score_greedy_mean", "greedy {:.3f}", "eval/score_greedy_ci95"),
        ("eval/win_rate", "win rate {:.2f}", "eval/win_rate_ci95"),
        ("eval/kl_sequence_mean", "KL {:.2f}", None),
        ("eval/length_mean", "length {:.1f}", None),
        ("eval/finished_fraction", "finished {:.2f}", None),
        ("eval/loss", "loss {:.4f}", None),
        ("eval/accuracy", "accuracy {:.3f}", None),
    ]
    parts = []
    for name, form, spread in known:
        if name in metrics:
            text = form.format(metrics[name])
            parts.append(f"{text} ± {metrics[spread]:.3f}" if spread in metrics else text)
    if "eval/accuracy_ci_low" in metrics:
        low, high = metrics["eval/accuracy_ci_low"], metrics["eval/accuracy_ci_high"]
        parts.append(f"(95 % CI {low:.3f} to {high:.3f})")
    return f"held out, step {step}: " + "  ".join(parts)


def peak_memory_gib() -> float:
    """Largest resident memory of this process so far, or GPU memory where one is used."""
    import resource

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def save_rng(path: Path) -> None:
    """Store the global generators of torch, numpy and Python; the run's own draws need none."""
    numpy_state = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(numpy_state[1].astype(np.int64)),
        "python": torch.tensor(words, dtype=torch.int64),
    }
    if torch.cuda.is_available():
        tensors |= {f"cuda{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    facts = {"numpy": numpy_state[2:], "python": [version, gauss]}
    save_tensors(path, tensors, {"facts": json.dumps(facts)})


def load_rng(path: Path) -> None:
    """Restore what `save_rng` stored."""
    from verl.checkpoint.tensors import load_metadata

    if not path.exists():
        raise CheckpointError(f"{path} is missing: the random state of the run is lost")
    tensors = load_tensors(path, torch.device("cpu"))
    facts = json.loads(load_metadata(path)["facts"])
    torch.set_rng_state(tensors["torch"])
    words = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, *facts["numpy"]))
    version, gauss = facts["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    if torch.cuda.is_available():
        states = [tensors[name] for name in sorted(tensors) if name.startswith("cuda")]
        torch.cuda.set_rng_state_all(states[: torch.cuda.device_count()])


@contextmanager
def opened(config: Config, resume: bool) -> Iterator[RunDirectory]:
    """Lock and open the run directory of a configuration."""
    directory = RunDirectory(Path(config.run_dir))
    with directory.lock():
        directory.create_or_open(resume)
        yield directory
