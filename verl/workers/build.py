"""Make the workers of each role from the configuration: load, freeze, place, attach a sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from verl.config.schema import Config
from verl.engines.microbatch import tokens_at_once
from verl.engines.torch_engine import TorchEngine
from verl.errors import ModelError
from verl.models.adapters import frozen_copy, prepare_for_training
from verl.models.loading import (
    LoadedModel,
    load_causal_lm,
    load_reward_model,
    load_value_model,
    required_path,
)
from verl.models.precision import resolve_dtype
from verl.rewards.model import ModelReward
from verl.rollout.base import engine_class
from verl.seeding import derive_seed
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker
from verl.workers.reference import ReferenceWorker
from verl.workers.reward import RewardWorker

logger = logging.getLogger(__name__)


def build_actor(config: Config, device: torch.device) -> ActorWorker:
    """The policy, with the rollout engine named in the configuration on the same weights."""
    section = config.model.actor
    loaded = load_causal_lm(section, "actor")
    loaded = replace(loaded, model=prepare_for_training(loaded.model, section, "actor"))
    engine = _engine(config, loaded, device, section.dtype)
    engine.reuse_prefix()
    sampler = engine_class(config.rollout.engine)(
        engine.model,
        loaded.vocab_size,
        engine.pad_id,
        max_rows=config.rollout.max_rows,
        device=device,
    )
    return ActorWorker(engine, sampler)


def build_critic(
    config: Config, device: torch.device, actor: ActorWorker | None = None
) -> CriticWorker:
    """The value model, by default a copy of the reward model.

    Frozen lower blocks that equal those of `actor` are computed once for both.
    """
    section = config.model.critic
    if section.pretrained_path is None:
        reward = config.model.reward_model
        template = section.chat_template or reward.chat_template
        section = section.model_copy(update={**_origin(reward), "chat_template": template})
    loaded = load_value_model(section, "critic", derive_seed(config.train.seed, "value-head"))
    if loaded.kind == "encoder":
        raise ModelError(
            f"critic: {section.pretrained_path!r} is an encoder, which sees the whole text at once "
            "and has no value per token. Set model.critic.pretrained_path to a causal model, for "
            "instance the actor's."
        )
    loaded = replace(loaded, model=prepare_for_training(loaded.model, section, "critic"))
    engine = _engine(config, loaded, device, section.dtype)
    engine.reuse_prefix(of=actor.engine if actor is not None else None)
    return CriticWorker(engine)


def build_reference(
    config: Config, device: torch.device, actor: ActorWorker | None = None
) -> ReferenceWorker:
    """The frozen policy.

    With `actor` given and no path of its own, it shares the actor's frozen tensors and copies only
    the trained ones; with adapters it is the actor's model with the adapter switched off.
    """
    section = config.model.ref_policy
    own_path = section.pretrained_path not in (None, config.model.actor.pretrained_path)
    same_device = actor is not None and actor.device == device
    if actor is not None and same_device and not own_path:
        if config.model.actor.lora is not None:
            return ReferenceWorker(actor.engine, _adapter_off(actor))
        dtype = resolve_dtype(section.inference_dtype, str(device))
        # Offloading moves tensors in place, and would take the actor's shared ones along.
        offloads = section.offload and device.type != "cpu"
        if dtype == actor.engine.dtype and not offloads:
            twin = replace(actor.engine.loaded, model=frozen_copy(actor.engine.model))
            engine = TorchEngine(twin, device, dtype, actor.engine.tokens_per_microbatch)
            engine.reuse_prefix(of=actor.engine)
            return ReferenceWorker(engine)
    if section.pretrained_path is None:
        actor_section = config.model.actor
        template = actor_section.chat_template
        section = section.model_copy(update={**_origin(actor_section), "chat_template": template})
    loaded = load_causal_lm(section, "ref_policy")
    loaded.model.requires_grad_(False)
    return ReferenceWorker(
        _engine(config, loaded, device, section.inference_dtype, section.offload)
    )


def _origin(section: Any) -> dict[str, Any]:
    """The settings of a role that say where its weights come from and how they may be read."""
    names = ("pretrained_path", "gguf_file", "trust_remote_code", "allow_pickle_weights")
    return {name: getattr(section, name) for name in names}


def _adapter_off(actor: ActorWorker) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: actor.engine.model.disable_adapter()


def build_reward(
    config: Config, device: torch.device, actor: ActorWorker | None = None
) -> RewardWorker:
    """The learned reward model as a source of scores.

    Frozen lower blocks that equal those of `actor` are computed once for both.
    """
    section = config.model.reward_model
    loaded = load_reward_model(section)
    loaded.model.requires_grad_(False)
    engine = _engine(config, loaded, device, section.inference_dtype)
    if actor is not None:
        engine.reuse_prefix(of=actor.engine)
    return RewardWorker(ModelReward(engine, section.max_length), device)


def build_trainable(config: Config, role: str, device: torch.device) -> TorchEngine:
    """The engine of a model that SFT (`actor`) or reward-model training trains."""
    if role == "actor":
        section: Any = config.model.actor
        loaded = load_causal_lm(section, role)
    else:
        section = config.model.reward_model
        loaded = load_value_model(section, role, derive_seed(config.train.seed, "value-head"))
    loaded = replace(loaded, model=prepare_for_training(loaded.model, section, role))
    return _engine(config, loaded, device, section.dtype)


def _engine(
    config: Config, loaded: LoadedModel, device: torch.device, dtype: str, offload: bool = False
) -> TorchEngine:
    return TorchEngine(
        loaded,
        device,
        resolve_dtype(dtype, str(device)),
        tokens_at_once(config.train.tokens_per_microbatch, device),
        offload,
    )


BUILDERS: dict[str, Callable[..., Any]] = {
    "actor": build_actor,
    "critic": build_critic,
    "ref_policy": build_reference,
    "reward_model": build_reward,
}


def describe_load(config: Config, role: str) -> str:
    """One line for a person: what is loaded for which role."""
    section = getattr(config.model, role)
    path = section.pretrained_path
    if path is None and role == "critic":
        path = config.model.reward_model.pretrained_path
    if path is None and role == "ref_policy":
        path = config.model.actor.pretrained_path
    if path is None:
        required_path(section, role)
    title = {
        "actor": "Actor",
        "critic": "Critic",
        "ref_policy": "Reference policy",
        "reward_model": "Reward model",
    }[role]
    return f"Loading {path} for {title}..."
