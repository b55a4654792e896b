"""Tiny random models with spread-out distributions, so that a wrong position or mask shows."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _build(kind: str) -> torch.nn.Module:
    torch.manual_seed(5)
    # Weights ten times the usual size: at the default 0.02 every context gives nearly the same
    # distribution and a wrong position would pass unseen.
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3
        )
        return GPT2LMHeadModel(config)
    if kind == "qwen2":
        return Qwen2ForCausalLM(
            Qwen2Config(**SIZES, initializer_range=0.3, tie_word_embeddings=True)
        )
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**SIZES, initializer_range=0.3, sliding_window=4))
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3))


@pytest.fixture(params=["llama", "gpt2", "qwen2", "mistral"])
def any_model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return _build(request.param)


@pytest.fixture
def llama() -> torch.nn.Module:
    return _build("llama")


@pytest.fixture
def gpt2() -> torch.nn.Module:
    return _build("gpt2")
