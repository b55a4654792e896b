"""What the native engine refuses, and what it says."""

from __future__ import annotations

import math

import pytest
import torch

from verl.errors import DataError, ModelError
from verl.rollout import Completion, SamplingParams
from verl.rollout.native import NativeEngine

VOCAB = 97


def engine(model: torch.nn.Module) -> NativeEngine:
    return NativeEngine(model, vocab_size=VOCAB, pad_token_id=0)


def test_no_prompts_give_no_completions(llama: torch.nn.Module) -> None:
    assert engine(llama).generate([], SamplingParams(4), []) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1 is empty"),
        ([[1], [1, VOCAB]], rf"prompt 1 holds ids from 1 to {VOCAB}"),
        ([[1], [2], [3] * 61], "prompt 2 has 61 tokens; with 4 response tokens .* 64 positions"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named(
    gpt2: torch.nn.Module, prompts: list[list[int]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        engine(gpt2).generate(prompts, SamplingParams(4), range(len(prompts)))


def test_weights_that_are_not_finite_stop_the_rollout_by_name(llama: torch.nn.Module) -> None:
    with torch.no_grad():
        llama.model.embed_tokens.weight[90] = math.nan
    llama.train()
    with pytest.raises(ModelError, match=r"rollout of prompt 2, response token 0: .*NaN"):
        engine(llama).generate([[5], [11, 12, 13], [90, 3]], SamplingParams(4), range(3))
    assert llama.training
    assert llama.config._attn_implementation == "sdpa"


def test_arguments_out_of_range_are_refused(llama: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match=r"vocab_size must be in 1\.\.97"):
        NativeEngine(llama, vocab_size=98, pad_token_id=0)
    with pytest.raises(ValueError, match=r"pad_token_id must be in 0\.\.96"):
        NativeEngine(llama, vocab_size=97, pad_token_id=97)
    with pytest.raises(ValueError, match="max_rows must be at least 1"):
        NativeEngine(llama, vocab_size=97, pad_token_id=0, max_rows=0)
    with pytest.raises(ValueError, match="2 prompts need as many seeds, got 1"):
        engine(llama).generate([[1], [2]], SamplingParams(4), [0])
    with pytest.raises(ValueError, match=r"stop_token_ids \[97\] are not below vocab_size 97"):
        engine(llama).generate([[1]], SamplingParams(4, stop_token_ids=(97,)), [0])


def test_a_completion_has_the_documented_fields() -> None:
    completion = Completion([1], [-0.5], "abort")
    assert (completion.ids, completion.logprobs, completion.finish_reason) == ([1], [-0.5], "abort")
