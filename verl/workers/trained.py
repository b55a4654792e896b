"""A role with trained weights: optimiser set-up, state for checkpoints, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl.checkpoint.tensors import load_metadata, load_tensors, save_tensors
from verl.cluster.dispatch import register
from verl.config.schema import Optimizer
from verl.engines.torch_engine import TorchEngine, build_optimizer
from verl.errors import CheckpointError
from verl.models.loading import save_model


class TrainedWorker:
    """Base of actor and critic (and of the models that SFT and `verl rm` train).

    A checkpoint holds the trained parameters in float32 with their Adam moments. Frozen parameters
    are not stored: they are those of the start model, whose fingerprint the run checks.
    """

    def __init__(self, role: str, engine: TorchEngine) -> None:
        self.role, self.engine = role, engine
        self.device = engine.device
        #: Optimiser steps in a row, up to now, whose gradient was not finite.
        self.bad_in_a_row = 0

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model."""
        return self.engine.loaded.tokenizer

    @register(transfer_mode="ONE_TO_ALL")
    def prepare_training(self, section: Optimizer, lr: float, total_steps: int) -> None:
        """Make the optimiser; `total_steps` optimiser steps are the horizon of its schedule."""
        build_optimizer(self.engine, section, lr, total_steps)

    @register(transfer_mode="RANK_ZERO")
    def save_state(self, folder: Path) -> None:
        """Write `<role>.safetensors` with weights and optimiser state into `folder`."""
        if self.engine.optimizer is None:
            raise CheckpointError(f"{self.role} has no optimiser yet; nothing to save")
        # One entry: safetensors writes several in an order of its own, another one each time.
        facts = json.dumps({"role": self.role, "bad_in_a_row": self.bad_in_a_row})
        file = folder / f"{self.role}.safetensors"
        save_tensors(file, self.engine.optimizer.state(), {"facts": facts})

    @register(transfer_mode="ONE_TO_ALL")
    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote."""
        file = folder / f"{self.role}.safetensors"
        if not file.exists():
            raise CheckpointError(f"{folder} has no {file.name}: the state of {self.role} is lost")
        if self.engine.optimizer is None:
            raise CheckpointError(f"{self.role}: prepare_training comes before load_state")
        self.engine.optimizer.load_state(load_tensors(file, self.device), str(file))
        facts = json.loads(load_metadata(file).get("facts", "{}"))
        self.bad_in_a_row = int(facts.get("bad_in_a_row", 0))

    @register(transfer_mode="RANK_ZERO")
    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder in float32."""
        save_model(self.engine.export_view(), folder)

    @register(transfer_mode="RANK_ZERO")
    def parameter_count(self) -> tuple[int, int]:
        """(all parameters, trained parameters)."""
        every = sum(p.numel() for p in self.engine.model.parameters())
        return every, sum(p.numel() for _, p in self.engine.trainable())
