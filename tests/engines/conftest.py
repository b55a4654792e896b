"""Engines on tiny models with spread-out weights, and the plain forward pass to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import byte_tokenizer, save_tiny
from verl.config.schema import ActorModel, CriticModel, Optimizer
from verl.engines.microbatch import Rows
from verl.engines.optimizer import MasterAdamW
from verl.engines.torch_engine import TorchEngine, build_optimizer
from verl.models.adapters import prepare_for_training
from verl.models.loading import load_causal_lm, load_value_model

CPU = torch.device("cpu")
#: At the usual initialisation every context gives nearly the same distribution, and a wrong
#: position or mask would pass unseen. Dropout of 0.1 everywhere must not be noticed.
SPREAD = {"initializer_range": 0.3, "attention_dropout": 0.1}
GPT2_SPREAD = {
    "initializer_range": 0.3,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
}


def save_mistral(folder: Path) -> Path:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=4,
        **SPREAD,
    )
    MistralForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the spread-out model of a kind: llama, qwen2, gpt2 or mistral."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(f"spread-{kind}")
            if kind == "mistral":
                made[kind] = save_mistral(folder)
            else:
                made[kind] = save_tiny(folder, kind, **(GPT2_SPREAD if kind == "gpt2" else SPREAD))
        return made[kind]

    return get


def policy(
    path: Path, budget: int = 64, dtype: torch.dtype = torch.float32, **settings: Any
) -> TorchEngine:
    """An engine of a causal LM, prepared for training as the actor's is."""
    section = ActorModel(pretrained_path=str(path), **settings)
    loaded = load_causal_lm(section, "actor")
    loaded = replace(loaded, model=prepare_for_training(loaded.model, section, "actor"))
    return TorchEngine(loaded, CPU, dtype, budget)


def value_model(
    path: Path, budget: int = 64, dtype: torch.dtype = torch.float32, **settings: Any
) -> TorchEngine:
    """An engine of a critic with a seeded head."""
    section = CriticModel(pretrained_path=str(path), **settings)
    loaded = load_value_model(section, "critic", seed=1)
    loaded = replace(loaded, model=prepare_for_training(loaded.model, section, "critic"))
    return TorchEngine(loaded, CPU, dtype, budget)


def draw_rows(seed: int, lengths: Sequence[tuple[int, int]], labels: bool = True) -> Rows:
    """Random rows of (prompt, response) lengths, read where the response tokens were chosen."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 259, (p + r,), generator=generator) for p, r in lengths]
    reads = [torch.arange(p - 1, p + r - 1) for p, r in lengths]
    targets = [row[p:] for row, (p, _) in zip(ids, lengths, strict=True)]
    return Rows(ids, reads, targets if labels else None)


def plain_logprobs(model: torch.nn.Module, rows: Rows, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of a plain transformers model, one row at a time."""
    values, entropies = [], []
    for ids, reads, labels in zip(rows.ids, rows.reads, rows.labels or [], strict=True):
        logits = model(ids[None]).logits[0, reads].float() / temperature
        every = torch.log_softmax(logits, -1)
        values.append(every.gather(-1, labels[:, None])[:, 0])
        entropies.append(-(every.exp() * every).sum(-1))
    return torch.cat(values), torch.cat(entropies)


def train(engine: TorchEngine, lr: float = 1e-2, total: int = 10, **settings: Any) -> MasterAdamW:
    """Attach an optimiser with a constant rate."""
    section = Optimizer(**{"lr_schedule": "constant", "max_grad_norm": 1e9, **settings})
    return build_optimizer(engine, section, lr, total)


def gradients(engine: TorchEngine) -> dict[str, Tensor]:
    """Copies of the gradients by name, and the buffers cleared."""
    found = {n: p.grad.clone() for n, p in engine.trainable() if p.grad is not None}
    engine.model.zero_grad(set_to_none=True)
    return found
