"""What a run is going to do, in numbers, before anything is loaded: rows, steps, tokens, memory.

In: a configuration and a stage. Out: lines for a person. Model sizes come from the models' own
configuration files, built without weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.cluster.resources import resolve_placements
from verl.config.schema import Config, PretrainedModel, TrainedModel
from verl.data.datasets import DataProvider
from verl.data.loader import ResumableLoader
from verl.errors import ModelError
from verl.models.loading import required_path
from verl.models.precision import resolve_dtype
from verl.workers.updates import optimizer_steps

GIB = 2**30
KINDS = {"sft": "sft", "rm": "rm", "ppo": "rl"}


@dataclass(frozen=True)
class RolePlan:
    """One role: what it loads, where, and the memory of weights, gradients and Adam states."""

    role: str
    path: str
    device: str
    dtype: str
    parameters: int
    trained: int
    bytes: int

    def line(self) -> str:
        """The role on one line."""
        share = f"{self.trained / 1e6:.1f} M trained" if self.trained else "frozen"
        return (
            f"  {self.role:<13}{self.path}  {self.device}  {self.dtype}  "
            f"{self.parameters / 1e6:.1f} M parameters ({share})  {self.bytes / GIB:.2f} GiB"
        )


def plan_lines(config: Config, stage: str) -> list[str]:
    """Describe the run: data, steps, optimiser steps, tokens at most, memory per role.

    Raises:
        ConfigError, DataError, ModelError, PlacementError: what would stop the run at its start.
    """
    roles = list(_roles(config, stage))
    return [
        f"{stage}: run directory {config.run_dir}",
        *_arithmetic(config, stage),
        *(role.line() for role in roles),
        f"  {'together':<13}{sum(role.bytes for role in roles) / GIB:.2f} GiB, and activations of "
        f"{config.train.tokens_per_microbatch} tokens at a time",
    ]


def _arithmetic(config: Config, stage: str) -> Iterator[str]:
    data, train = config.data, config.train
    rows = len(DataProvider(config).train(KINDS[stage]))  # type: ignore[arg-type]
    loader = ResumableLoader(
        rows, data.batch_size, train.seed, data.shuffle, train.num_epochs, train.total_steps
    )
    steps = loader.total_steps
    unit = {"sft": "conversations", "rm": "pairs", "ppo": "prompts"}[stage]
    yield (
        f"  data         {data.train}: {rows} rows, {data.batch_size} {unit} per step, "
        f"{loader.steps_per_epoch} steps per epoch"
    )
    if stage == "ppo":
        size = train.ppo.minibatch_size or data.batch_size
        per_step = optimizer_steps(data.batch_size, size, train.ppo.epochs)
        yield (
            f"  steps        {steps} PPO steps = {steps * data.batch_size} samples at most, "
            f"{per_step} optimiser steps each ({train.ppo.epochs} epochs of {size}) for actor and "
            f"critic = {steps * per_step} each"
        )
        yield (
            f"  tokens       at most {steps * data.batch_size * data.response_length:,} sampled "
            f"(response_length {data.response_length}), prompts up to {data.prompt_limit}"
        )
    else:
        most = steps * data.batch_size * data.seq_length * (2 if stage == "rm" else 1)
        yield f"  steps        {steps} optimiser steps"
        yield f"  tokens       at most {most:,} (seq_length {data.seq_length})"


def _roles(config: Config, stage: str) -> Iterator[RolePlan]:
    names = {"sft": ["actor"], "rm": ["reward_model"]}.get(
        stage, ["actor", "critic", "ref_policy", "reward_model"]
    )
    placements = resolve_placements(config.resource)
    for role in names:
        if role == "ref_policy" and not config.train.ppo.needs_reference:
            continue
        yield _role(config, role, str(placements[role]), trained=role in ("actor", "critic") or stage == "rm")


def source_section(config: Config, role: str) -> PretrainedModel:
    """The section whose path a role loads: its own, or the one it falls back to."""
    models = config.model
    section: PretrainedModel = getattr(models, role)
    if section.pretrained_path is None and role == "critic":
        return models.reward_model
    if section.pretrained_path is None and role == "ref_policy":
        return models.actor
    return section


def _role(config: Config, role: str, device: str, trained: bool) -> RolePlan:
    section = source_section(config, role)
    path = required_path(section, role)
    own: Any = getattr(config.model, role)
    parameters, blocks, outside = _count(section, path)
    kind = "cuda" if device.startswith("gpu") else "cpu"
    dtype = resolve_dtype(own.dtype if trained else own.inference_dtype, kind)
    width = torch.finfo(dtype).bits // 8
    learned = _trained_parameters(own, parameters, blocks, outside) if trained else 0
    shared = 0
    if role == "ref_policy" and section is config.model.actor and width == 4:
        actor = config.model.actor
        shared = parameters if actor.lora else parameters - _trained_parameters(
            actor, parameters, blocks, outside
        )
    memory = (parameters - shared) * width + learned * (12 if width == 4 else 16)
    return RolePlan(role, path, device, str(dtype).removeprefix("torch."), parameters, learned, memory)


def _trained_parameters(section: TrainedModel, total: int, block: int, outside: int) -> int:
    if section.lora is not None:
        # A linear layer of n x m weights gets rank * (n + m); with n about m this is the share.
        side = max(1, round((block / 12) ** 0.5))
        return min(total, (total - outside) // (side * side) * 2 * side * section.lora.rank)
    if section.train_layers is not None:
        return min(total, block * section.train_layers)
    return total


def _count(section: PretrainedModel, path: str) -> tuple[int, int, int]:
    """Parameters of the model, of one block, and outside the blocks."""
    from transformers import AutoConfig, AutoModel

    options: dict[str, Any] = {"trust_remote_code": section.trust_remote_code}
    if section.gguf_file:
        options["gguf_file"] = section.gguf_file
    try:
        model_config = AutoConfig.from_pretrained(path, **options)
        with torch.device("meta"):
            model = AutoModel.from_config(model_config)
    except (OSError, ValueError, KeyError) as error:
        where = "" if Path(path).exists() else " (no such folder, and no hub to ask)"
        raise ModelError(f"cannot read the configuration of {path!r}{where}: {error}") from error
    total = sum(p.numel() for p in model.parameters())
    layers = model_config.get_text_config().num_hidden_layers
    embeddings = model.get_input_embeddings().weight.numel()
    return total, (total - embeddings) // layers, embeddings
