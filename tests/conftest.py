"""Tiny real models and a byte-level chat tokenizer, made once per test session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str | None = CHATML) -> Any:
    """One token per byte plus <|endoftext|>, <|im_start|>, <|im_end|> (ids 0, 1, 2)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def save_tiny(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """Write a random model of about 30,000 parameters with its tokenizer; returns the folder."""
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    common = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 2}
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    if kind == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**{**common, **shape, **changes}))
    elif kind == "qwen2":
        tied = {"tie_word_embeddings": True}
        model = Qwen2ForCausalLM(Qwen2Config(**{**common, **shape, **tied, **changes}))
    else:
        own = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
        model = GPT2LMHeadModel(GPT2Config(**{**common, **own, **changes}))
    # Random tiny models are near uniform; a wider head makes their samples less alike.
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny-qwen2"), "qwen2")


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny-gpt2"), "gpt2")


@pytest.fixture(scope="session")
def tiny_reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with a seeded head on the tiny Llama."""
    from verl.config.schema import RewardModel
    from verl.models.loading import load_value_model, save_model

    base = save_tiny(tmp_path_factory.mktemp("tiny-reward-base"))
    loaded = load_value_model(RewardModel(pretrained_path=str(base)), "reward_model", seed=3)
    folder = tmp_path_factory.mktemp("tiny-reward")
    save_model(loaded, folder)
    return folder
