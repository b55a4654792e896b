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
from verl.data.schema import Kind
from verl.engines.microbatch import tokens_at_once
from verl.errors import ModelError
from verl.models.gguf import read_once
from verl.models.loading import required_path
from verl.models.precision import resolve_dtype
from verl.workers.updates import optimizer_steps

GIB = 2**30
KINDS: dict[str, Kind] = {"sft": "sft", "rm": "rm", "ppo": "rl"}


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
    setting = config.train.tokens_per_microbatch
    tokens = max(tokens_at_once(setting, torch.device(_kind(role.device))) for role in roles)
    return [
        f"{stage}: run directory {config.run_dir}",
        *_arithmetic(config, stage),
        *(role.line() for role in roles),
        f"  {'together':<13}{sum(role.bytes for role in roles) / GIB:.2f} GiB, and activations of "
        f"{tokens} tokens at a time",
    ]


def _kind(placement: str) -> str:
    """What torch calls the devices of a placement such as gpu[0]."""
    return "cuda" if placement.startswith("gpu") else "cpu"


def _arithmetic(config: Config, stage: str) -> Iterator[str]:
    data, train = config.data, config.train
    provider, kind = DataProvider(config), KINDS[stage]
    rows = len(provider.train(kind))
    loader = ResumableLoader(
        rows, data.batch_size, train.seed, data.shuffle, train.num_epochs, train.total_steps
    )
    steps = loader.total_steps
    sizes = step_sizes(rows, data.batch_size, steps)
    unit = {"sft": "conversations", "rm": "pairs", "ppo": "prompts"}[stage]
    yield (
        f"  data         {data.train}: {rows} rows, {data.batch_size} {unit} per step, "
        f"{loader.steps_per_epoch} steps per epoch"
    )
    if data.eval is not None:
        held_out = min(len(provider.eval(kind)), config.eval.num_prompts)
        times = _evaluations(config, steps)
        yield (
            f"  held out     {data.eval}: {held_out} rows, {times} time{'s' if times > 1 else ''}"
        )
    if stage == "ppo":
        yield from _ppo_arithmetic(config, sizes)
    else:
        most = sum(sizes) * data.seq_length * (2 if stage == "rm" else 1)
        yield f"  steps        {steps} optimiser steps"
        yield f"  tokens       at most {most:,} (seq_length {data.seq_length})"


def _ppo_arithmetic(config: Config, sizes: list[int]) -> Iterator[str]:
    data, ppo = config.data, config.train.ppo
    size = ppo.minibatch_size or data.batch_size
    total = sum(optimizer_steps(samples, size, ppo.epochs) for samples in sizes)
    yield (
        f"  steps        {len(sizes)} PPO steps = {sum(sizes)} samples, "
        f"{optimizer_steps(sizes[0], size, ppo.epochs)} optimiser steps each "
        f"({ppo.epochs} epochs in mini-batches of {min(size, sizes[0])}) = {total} for the critic"
    )
    silent = sizes[: ppo.critic_warmup_steps]
    if silent:
        actor = total - sum(optimizer_steps(samples, size, ppo.epochs) for samples in silent)
        yield f"               the actor takes {actor}, after {len(silent)} steps of critic warm-up"
    yield (
        f"  tokens       at most {sum(sizes) * data.response_length:,} sampled "
        f"(response_length {data.response_length}), prompts up to {data.prompt_limit}"
    )


def step_sizes(rows: int, batch_size: int, steps: int) -> list[int]:
    """Samples of each step: full batches, and what is left at the end of each epoch."""
    epoch = [batch_size] * (rows // batch_size) + [rows % batch_size] * (rows % batch_size > 0)
    return [epoch[step % len(epoch)] for step in range(steps)]


def _evaluations(config: Config, steps: int) -> int:
    """Evaluations of a run: at the end, every `eval.every` steps and, usually, at the start."""
    every = config.eval.every
    return 1 + int(config.eval.at_start) + ((steps - 1) // every if every else 0)


def _roles(config: Config, stage: str) -> Iterator[RolePlan]:
    names = {"sft": ["actor"], "rm": ["reward_model"]}.get(
        stage, ["actor", "critic", "ref_policy", "reward_model"]
    )
    placements = resolve_placements(config.resource)
    for role in names:
        if role == "ref_policy" and not config.train.ppo.needs_reference:
            continue
        yield _role(
            config,
            role,
            str(placements[role]),
            trained=role in ("actor", "critic") or stage == "rm",
        )


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
    causal = role in ("actor", "ref_policy")
    parameters, blocks, outside = _count(section, path, causal)
    kind = _kind(device)
    dtype = resolve_dtype(own.dtype if trained else own.inference_dtype, kind)
    width = torch.finfo(dtype).bits // 8
    learned = _trained_parameters(own, parameters, blocks, outside) if trained else 0
    actor, shared = config.model.actor, 0
    if role == "ref_policy" and section is actor:
        # The reference shares the actor's frozen tensors, and all of them when adapters are trained.
        if actor.lora is not None:
            shared = parameters
        elif dtype == resolve_dtype(actor.dtype, kind):
            shared = parameters - _trained_parameters(actor, parameters, blocks, outside)
    memory = (parameters - shared) * width + learned * (12 if width == 4 else 16)
    return RolePlan(
        role, path, device, str(dtype).removeprefix("torch."), parameters, learned, memory
    )


def _trained_parameters(section: TrainedModel, total: int, block: int, outside: int) -> int:
    every = total - outside
    top = total if section.train_layers is None else min(total, block * section.train_layers)
    if section.lora is None:
        return top
    # A linear layer of n x m weights gets rank * (n + m); with n about m this is the share.
    side = max(1, round((block / 12) ** 0.5))
    return min(total, min(every, top) // (side * side) * 2 * side * section.lora.rank)


def _count(section: PretrainedModel, path: str, causal: bool) -> tuple[int, int, int]:
    """Parameters of the model, of one block, and outside the blocks."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": section.trust_remote_code}
    if section.gguf_file:
        options["gguf_file"] = section.gguf_file
    try:
        # Kept, for the model is loaded from the same file right after the plan.
        with read_once(section.gguf_file, keep=True):
            config = AutoConfig.from_pretrained(path, **options)
        with torch.device("meta"):
            trunk = AutoModel.from_config(config)
            model = AutoModelForCausalLM.from_config(config) if causal else trunk
    except (OSError, ValueError, KeyError) as error:
        where = "" if Path(path).exists() else " (no such folder, and no hub to ask)"
        raise ModelError(f"cannot read the configuration of {path!r}{where}: {error}") from error
    total = sum(p.numel() for p in model.parameters())
    inside = (
        sum(p.numel() for p in trunk.parameters()) - trunk.get_input_embeddings().weight.numel()
    )
    return total, inside // config.get_text_config().num_hidden_layers, total - inside
