"""The life of a run: directory, lock, resume, the loop of steps, evaluation, checkpoints, export.

In: a configuration and the task of one stage (SFT, reward model, PPO). Out: a run directory that
a resumed run leaves as an uninterrupted one would. What a step does is the task's business.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from verl.checkpoint.atomic import (
    fsync_directory,
    remove_entry,
    temporary_sibling,
    write_json_atomic,
    write_text_atomic,
)
from verl.checkpoint.fingerprint import fingerprint_config, require_same_fingerprints
from verl.checkpoint.run_directory import RunDirectory
from verl.checkpoint.signals import StopSignal
from verl.checkpoint.store import CheckpointStore
from verl.config.load import resolved_text
from verl.config.schema import Config
from verl.data.loader import LoaderBatch, ResumableLoader
from verl.errors import CheckpointError, Interrupted, TrainingStopped
from verl.monitor.alerts import check_alerts
from verl.monitor.console import Progress
from verl.monitor.log import MetricLog, next_segment
from verl.monitor.trackers import open_trackers
from verl.trainer.random_state import load_rng, save_rng

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
        #: Step and held-out value of the best model so far; larger is better.
        self.best: tuple[int, float] | None = None
        #: Seconds of a save that no step has reported yet.
        self.save_seconds = 0.0

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
        problems = self.store.verify(chosen) if step is not None else []
        if problems:
            raise CheckpointError(f"cannot go back to step {chosen}: {'; '.join(problems)}")
        state = json.loads((folder / "state.json").read_text())
        require_same_fingerprints(state["fingerprints"], self.fingerprints, folder)
        self.task.load(folder)
        self.task.load_state(state["task"])
        self.task.loader.load_state(state["data"])
        load_rng(folder / "rng.safetensors")
        # Only now that the way on is certain does anything later go.
        if step is not None:
            self.store.discard_after(chosen)
        self.directory.trim_after(chosen)
        self.step = chosen
        self._restore_best(state["best"])

    def _restore_best(self, best: list[float] | None) -> None:
        """Make the store's record that of this step: a kill may have come between the two."""
        self.best = (int(best[0]), float(best[1])) if best is not None else None
        if self.best is not None and self.best[0] in self.store.steps():
            self.store.mark_best(*self.best)

    # --- the loop ------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train to the end; returns the last held-out metrics.

        Raises:
            Interrupted: SIGINT or SIGTERM; the state was saved first.
            TrainingStopped: an alert whose action is `stop`, or too many bad steps.
        """
        resumed = self.step > 0
        write_text_atomic(self.directory.config, resolved_text(self.config))
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
            if not resumed and self.config.eval.at_start:
                self._evaluate()  # the model that nothing was done to is never the best
            for batch in self.task.loader:
                metrics = self._train(batch)
                last = self.step == self.total
                every = self.config.eval.every
                held_out = self._evaluate() if last or _is_due(self.step, every) else {}
                best = self._note_best(held_out)
                due = _is_due(self.step, self.config.checkpoint.every)
                if last or best or stop.requested or due:
                    self._save()
                self._alert(metrics)
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
        if self.save_seconds:
            metrics["time/save"], self.save_seconds = self.save_seconds, 0.0
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

    def _note_best(self, held_out: dict[str, float]) -> bool:
        """Whether the model as it is now is the best so far."""
        name, larger = self.task.best_metric
        if name not in held_out or not math.isfinite(held_out[name]):
            return False
        value = held_out[name] if larger else -held_out[name]
        if self.best is not None and value <= self.best[1]:
            return False
        self.best = (self.step, value)
        return True

    def _save(self) -> None:
        started = time.perf_counter()
        self.log.sync()
        with self.progress.stage("save"):
            self.store.save(self.step, self._write, {"stage": self.task.stage})
            if self.best is not None and self.best[0] == self.step:
                self.store.mark_best(*self.best)
            self.store.prune()
        self.save_seconds = time.perf_counter() - started

    def _write(self, folder: Path) -> None:
        self.task.save(folder)
        save_rng(folder / "rng.safetensors")
        state = {
            "step": self.step,
            "task": self.task.state(),
            "data": self.task.loader.state(),
            "best": self.best,
            "fingerprints": self.fingerprints,
        }
        write_json_atomic(folder / "state.json", state)

    def _alert(self, metrics: dict[str, float]) -> None:
        for event in check_alerts(metrics, self.config.monitor.alerts):
            self.progress.message(event.message())
            if event.action == "stop":
                if self.step not in self.store.steps():
                    self._save()
                raise TrainingStopped(event.message())

    def _finish(self) -> None:
        self.progress.message(f"exporting the model to {self.directory.export}")
        export_to(self.directory.export, self.task.export)
        self.directory.mark_finished(self.step)


def _is_due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens after `step`."""
    return every > 0 and step % every == 0


def export_to(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder and put it in the place of `folder` when complete.

    What a kill leaves beside `folder` has a temporary's name, which opening the run clears away.
    """
    temporary = temporary_sibling(folder)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        _sync(temporary)
        if folder.exists():
            old = temporary_sibling(folder, "deleted")
            folder.rename(old)
            temporary.rename(folder)
            remove_entry(old)
        else:
            temporary.rename(folder)
        fsync_directory(folder.parent)
    finally:
        if temporary.exists():
            remove_entry(temporary)


def _sync(folder: Path) -> None:
    """Make every file below `folder` durable."""
    for directory, _, names in os.walk(folder):
        for name in names:
            with (Path(directory) / name).open("rb") as file:
                os.fsync(file.fileno())
        fsync_directory(Path(directory))


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


@contextmanager
def opened(config: Config, resume: bool) -> Iterator[RunDirectory]:
    """Lock and open the run directory of a configuration."""
    directory = RunDirectory(Path(config.run_dir))
    with directory.lock():
        directory.create_or_open(resume)
        yield directory
