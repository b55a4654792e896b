"""Tiny runs: a configuration, its four roles, and doubles at the seams that the trainer offers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.batch import Batch
from verl.cluster.dispatch import register
from verl.cluster.worker_group import WorkerGroup
from verl.config.schema import Config, get_default_config
from verl.trainer.ppo import PPOTrainer
from verl.workers.create import create_llm_model
from verl.workers.reward import RewardWorker

PROMPTS = ["2+2?", "Name a colour, please.", "Hi", "What is the capital of Peru?"]


@pytest.fixture
def config(tiny_llama: Path, tiny_reward: Path, tmp_path: Path) -> Config:
    """A PPO configuration of tiny models; tests change what they are about."""
    tree = get_default_config()
    tree.run_dir = str(tmp_path / "run")
    tree.model.actor.pretrained_path = str(tiny_llama)
    tree.model.reward_model.pretrained_path = str(tiny_reward)
    tree.data.batch_size, tree.data.seq_length, tree.data.response_length = 4, 96, 8
    tree.train.ppo.epochs, tree.train.ppo.actor_lr = 2, 1e-3
    tree.monitor.trackers = []
    return tree


@pytest.fixture
def trainer_of() -> Callable[..., PPOTrainer]:
    """`trainer_of(config)`: a trainer with the roles that the configuration needs."""

    def make(config: Config, total_steps: int | None = None, **given: Any) -> PPOTrainer:
        models = config.model
        roles = {
            "actor": lambda: create_llm_model("actor", models.actor),
            "critic": lambda: create_llm_model("critic", models.critic),
            "ref_policy": lambda: (
                create_llm_model("ref_policy", models.ref_policy)
                if config.train.ppo.needs_reference
                else None
            ),
            "reward_model": lambda: create_llm_model("reward_model", models.reward_model),
        }
        made = {name: given[name] if name in given else load() for name, load in roles.items()}
        return PPOTrainer(**made, config=config, total_steps=total_steps)

    return make


class GivenScores:
    """A reward source that gives the scores it was made with."""

    name, tokenizer = "given", None

    def __init__(self, scores: Sequence[float]) -> None:
        self.scores = list(scores)

    def score(self, prompts: Sequence[Any], responses: Sequence[str]) -> torch.Tensor:
        """The scores, one per response."""
        assert len(responses) == len(self.scores)
        return torch.tensor(self.scores)


@pytest.fixture
def scores_of() -> Callable[..., WorkerGroup]:
    """`scores_of(2.0, -1.0)`: a reward group that gives these scores."""

    def make(*scores: float) -> WorkerGroup:
        return WorkerGroup("reward_model", [RewardWorker(GivenScores(scores), torch.device("cpu"))])

    return make


class GivenKL:
    """A reference policy at a given k1 distance below the actor."""

    def __init__(self, kl: torch.Tensor) -> None:
        self.kl, self.device = kl, torch.device("cpu")

    @register(transfer_mode="DP_COMPUTE")
    def logprobs(self, batch: Batch, temperature: float) -> Batch:
        """Add `ref_logprobs`: those of the actor minus the KL."""
        name = "old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"
        return batch.with_columns(ref_logprobs=batch[name] - self.kl)


@pytest.fixture
def reference_at() -> Callable[..., WorkerGroup]:
    """`reference_at([[.2, .4]])`: a reference whose per-token KL is this."""

    def make(kl: list[list[float]]) -> WorkerGroup:
        return WorkerGroup("ref_policy", [GivenKL(torch.tensor(kl))])

    return make


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """`write_rows("train", rows)`: the path of a jsonl file."""

    def write(name: str, rows: Sequence[dict[str, Any]]) -> str:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def prompts() -> list[str]:
    """Four short prompts."""
    return list(PROMPTS)


def weights_of(group: WorkerGroup) -> dict[str, torch.Tensor]:
    """A copy of all parameters of a group's model."""
    model = group.workers[0].engine.model
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture
def weights() -> Callable[[WorkerGroup], dict[str, torch.Tensor]]:
    """`weights(group)`: a copy of its parameters."""
    return weights_of


@pytest.fixture
def same_weights() -> Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], bool]:
    """Whether two copies of parameters are bitwise equal."""

    def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
        return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

    return same
