"""Batches with known lengths, and workers on tiny models with spread-out weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import save_tiny
from tests.engines.conftest import GPT2_SPREAD, SPREAD, policy, train, value_model
from verl.batch import Batch
from verl.config.schema import PPO
from verl.rollout.native import NativeEngine
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker

LENGTHS = [(2, 4), (5, 1), (3, 6), (1, 2), (4, 4)]


@pytest.fixture(scope="session")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a model of a kind whose contexts give clearly different distributions."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            settings = GPT2_SPREAD if kind == "gpt2" else SPREAD
            made[kind] = save_tiny(tmp_path_factory.mktemp(f"workers-{kind}"), kind, **settings)
        return made[kind]

    return get


def draw_batch(seed: int = 0) -> Batch:
    """Five samples of random tokens with advantages, values and returns."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = zip(*LENGTHS, strict=True)
    width, longest = max(p + r for p, r in LENGTHS), max(responses)
    ids = torch.randint(3, 259, (len(LENGTHS), width), generator=generator)
    mask = torch.arange(longest) < torch.tensor(responses)[:, None]
    columns = {
        name: torch.randn(mask.shape, generator=generator) * mask
        for name in ("advantages", "values", "returns")
    }
    return Batch(
        {
            "input_ids": ids,
            "prompt_length": torch.tensor(prompts),
            "response_length": torch.tensor(responses),
            "response_mask": mask,
            **columns,
        }
    )


def actor_of(path: Path, budget: int = 64, rollout: bool = False, **optimizer: Any) -> ActorWorker:
    """An actor with an optimiser of constant rate."""
    engine = policy(path, budget)
    train(engine, **optimizer)
    sampler = NativeEngine(engine.model, engine.loaded.vocab_size, engine.pad_id)
    return ActorWorker(engine, sampler if rollout else None)


def critic_of(path: Path, budget: int = 64, **optimizer: Any) -> CriticWorker:
    """A critic with an optimiser of constant rate."""
    engine = value_model(path, budget)
    train(engine, **optimizer)
    return CriticWorker(engine)


def update_actor(actor: ActorWorker, batch: Batch, **ppo: Any) -> dict[str, float]:
    """One PPO update with one epoch unless told otherwise."""
    settings = PPO(**{"epochs": 1, **ppo})
    return actor.update(batch, settings, 0.7, max_response_length=6, seed=0, step=1)


def update_critic(critic: CriticWorker, batch: Batch, **ppo: Any) -> dict[str, float]:
    """One critic update with one epoch unless told otherwise."""
    settings = PPO(**{"epochs": 1, **ppo})
    return critic.update(batch, settings, max_response_length=6, seed=0, step=1)
