"""What SFT and reward-model training share: one engine, rows tokenised at the start, one step each.

Subclasses say how rows become tokens and what their loss is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl.cluster.local import LocalExecutor
from verl.config.schema import Config, Optimizer
from verl.data.datasets import DataProvider, RowDataset
from verl.data.lengths import keep_rows
from verl.data.loader import ResumableLoader
from verl.data.schema import Kind
from verl.trainer.fingerprints import model_fingerprint
from verl.workers.build import build_trainable, describe_load
from verl.workers.trained import TrainedWorker
from verl.workers.updates import StepLog


class SupervisedTask(ABC):
    """Base of the tasks that train one model on rows with known answers."""

    stage: str
    role: str
    kind: Kind
    best_metric: tuple[str, bool]

    def __init__(self, config: Config, say: Callable[[str], None] = print) -> None:
        self.config = config
        self.section: Optimizer = self._section()
        say(describe_load(config, self.role))
        executor = LocalExecutor(config.resource)
        self.group = executor.start(
            self.role,
            lambda device: TrainedWorker(self.role, build_trainable(config, self.role, device)),
        )
        self.worker: TrainedWorker = self.group.workers[0]
        self.engine = self.worker.engine
        self.tokenizer = self.group.tokenizer
        provider = DataProvider(config)
        self.rows = provider.train(self.kind)
        self.kept = self._within_limit(self.rows)
        self.eval_rows: RowDataset | None = None
        self.eval_indices: list[int] = []
        if config.data.eval is not None:
            self.eval_rows = provider.eval(self.kind)
            self.eval_indices = self._within_limit(self.eval_rows)[: config.eval.num_prompts]
        self.loader = ResumableLoader(
            len(self.kept),
            config.data.batch_size,
            config.train.seed,
            config.data.shuffle,
            config.train.num_epochs,
            config.train.total_steps,
            dropped=len(self.rows) - len(self.kept),
            source=str(self.rows.path),
        )
        self.group.prepare_training(self.section, self._lr(), self.loader.total_steps)
        self._last: list[int] = []

    @abstractmethod
    def _section(self) -> Optimizer:
        """The optimiser settings of the stage."""

    @abstractmethod
    def _lr(self) -> float:
        """The peak learning rate of the stage."""

    @abstractmethod
    def _length(self, row: Mapping[str, Any], where: str) -> int:
        """Tokens of a row; `where` names it in errors."""

    def _within_limit(self, rows: RowDataset) -> list[int]:
        return keep_rows(
            rows, self._length, self.config.data.seq_length, self.config.data.overlong
        ).indices

    def new_log(self) -> StepLog:
        """Log of the optimiser steps of one training step; remembers bad steps across them."""
        return StepLog(self.role, self.section.max_bad_steps, bad_in_a_row=self.worker.bad_in_a_row)

    def close_log(self, log: StepLog, prefix: str) -> dict[str, float]:
        """Metrics of the log; keeps the count of bad steps."""
        self.worker.bad_in_a_row = log.bad_in_a_row
        return {k: v for k, v in log.metrics(prefix).items() if not k.endswith("skipped_steps")}

    def save(self, folder: Path) -> None:
        """Write weights and optimiser state."""
        self.group.save_state(folder)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.group.load_state(folder)

    def state(self) -> dict[str, Any]:
        """Nothing: all that a step depends on is in the worker's state and the loader's."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore `state()`: nothing."""
        del state

    def inputs(self) -> dict[str, str]:
        """Fingerprints of the start model and the data."""
        found = {
            "input.model": model_fingerprint(getattr(self.config.model, self.role).pretrained_path),
            "input.train": self.rows.fingerprint(),
        }
        if self.eval_rows is not None:
            found["input.eval"] = self.eval_rows.fingerprint()
        return found

    def export(self, folder: Path) -> None:
        """Write the trained model in Hugging Face format."""
        self.group.export(folder)

    def dump(self, folder: Path, step: int) -> None:
        """Write the rows of the last batch."""
        import json

        from verl.checkpoint.atomic import write_text_atomic

        lines = [json.dumps(self.rows[i], ensure_ascii=False, default=str) for i in self._last]
        write_text_atomic(folder / f"batch_step_{step:06d}.jsonl", "\n".join(lines) + "\n")
