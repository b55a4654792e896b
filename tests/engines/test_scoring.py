"""Log-probs, entropies and scores do not depend on how rows are cut, packed or padded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.conftest import byte_tokenizer, save_tiny
from tests.engines.conftest import CPU, draw_rows, plain_logprobs, policy, value_model
from verl.engines import torch_engine
from verl.engines.microbatch import Rows
from verl.engines.torch_engine import TorchEngine
from verl.errors import ModelError

FolderOf = Callable[[str], Path]
LENGTHS = [(3, 5), (1, 9), (12, 2), (2, 2), (7, 7)]


@pytest.fixture(scope="session")
def engine_of(folder_of: FolderOf) -> Callable[[str], TorchEngine]:
    made: dict[str, TorchEngine] = {}

    def get(kind: str) -> TorchEngine:
        if kind not in made:
            made[kind] = policy(folder_of(kind), budget=24)
        return made[kind]

    return get


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "mistral"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a14_scores_are_those_of_a_plain_forward_pass(
    kind: str, temperature: float, folder_of: FolderOf, engine_of: Callable[[str], TorchEngine]
) -> None:
    rows = draw_rows(1, LENGTHS)
    engine = engine_of(kind)
    assert engine.packs
    plain = AutoModelForCausalLM.from_pretrained(folder_of(kind)).eval()
    with torch.no_grad():
        expected, spread = plain_logprobs(plain, rows, temperature)
    values, entropy = engine.logprobs(rows, temperature, entropy=True)
    assert values.std() > 0.5
    assert torch.allclose(values, expected, atol=1e-4)
    assert torch.allclose(entropy, spread, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
@given(
    seed=st.integers(0, 9),
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6),
    budget=st.integers(1, 60),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_packed_padded_and_alone_agree(
    kind: str,
    engine_of: Callable[[str], TorchEngine],
    seed: int,
    lengths: list[tuple[int, int]],
    budget: int,
) -> None:
    engine = engine_of(kind)
    rows = draw_rows(seed, lengths)
    try:
        engine.tokens_per_microbatch = budget
        packed, _ = engine.logprobs(rows, 0.7)
        engine.packs = False
        padded, _ = engine.logprobs(rows, 0.7)
        alone = [engine.logprobs(rows.select([i]), 0.7)[0] for i in range(len(rows))]
    finally:
        engine.packs, engine.tokens_per_microbatch = True, 24
    assert torch.allclose(packed, torch.cat(alone), atol=1e-4)
    assert torch.allclose(padded, torch.cat(alone), atol=1e-4)


def test_rows_without_reads_cost_nothing_and_shift_nothing(
    engine_of: Callable[[str], TorchEngine],
) -> None:
    rows = draw_rows(2, [(4, 0), (3, 2), (5, 0)])
    engine = engine_of("llama")
    values, _ = engine.logprobs(rows, 1.0)
    assert torch.equal(values, engine.logprobs(rows.select([1]), 1.0)[0])
    assert engine.logprobs(rows.select([0, 2]), 1.0)[0].shape == (0,)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_chunks_of_the_head_change_nothing(
    chunk: int, engine_of: Callable[[str], TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = draw_rows(3, LENGTHS)
    values, entropy = engine_of("llama").logprobs(rows, 0.7, entropy=True)
    monkeypatch.setattr(torch_engine, "HEAD_CHUNK", chunk)
    again, spread = engine_of("llama").logprobs(rows, 0.7, entropy=True)
    assert torch.allclose(again, values, atol=1e-5)
    assert torch.allclose(spread, entropy, atol=1e-5)


def test_g14_temperature_zero_scores_untempered(engine_of: Callable[[str], TorchEngine]) -> None:
    rows = draw_rows(4, [(3, 4)])
    greedy, entropy = engine_of("llama").logprobs(rows, 0.0, entropy=True)
    plain, spread = engine_of("llama").logprobs(rows, 1.0, entropy=True)
    assert torch.equal(greedy, plain)
    assert torch.equal(entropy, spread)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a12_two_passes_are_bitwise_equal_even_in_training_mode(
    kind: str, folder_of: FolderOf
) -> None:
    rows = draw_rows(5, LENGTHS)
    engine = policy(folder_of(kind))
    engine.model.train()
    first, _ = engine.logprobs(rows, 0.7)
    assert torch.equal(engine.logprobs(rows, 0.7)[0], first)
    critic = value_model(folder_of(kind))
    critic.model.train()
    assert torch.equal(critic.values(rows), critic.values(rows))


def test_c08_padded_vocabulary_has_no_probability(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, initializer_range=0.3, vocab_size=272)
    plain = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        plain.lm_head.weight[265] = 50 * plain.lm_head.weight[7]
    plain.save_pretrained(path)
    engine = policy(path)
    assert engine.loaded.vocab_size == 259
    rows = draw_rows(6, LENGTHS)
    with torch.no_grad():
        whole, _ = plain_logprobs(plain, rows, 1.0)
        known = torch.cat(
            [
                plain(i[None]).logits[0, r, :259].log_softmax(-1).gather(-1, y[:, None])[:, 0]
                for i, r, y in zip(rows.ids, rows.reads, rows.labels, strict=True)
            ]
        )
    values, entropy = engine.logprobs(rows, 1.0, entropy=True)
    assert (whole - known).abs().max() > 1
    assert torch.allclose(values, known, atol=1e-4)
    assert entropy.isfinite().all()


def test_c05_c06_batched_scores_are_single_scores(folder_of: FolderOf) -> None:
    lengths = [4, 12, 3, 30]
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 259, (n,), generator=generator) for n in lengths]
    rows = Rows(ids, [torch.tensor([n - 1]) for n in lengths])
    engine = value_model(folder_of("llama"), budget=1000)
    engine.model.config.pad_token_id = None
    alone = torch.cat([engine.values(rows.select([i])) for i in range(4)])
    assert alone.std() > 0.1
    for packs in (True, False):
        engine.packs = packs
        assert torch.allclose(engine.values(rows), alone, atol=1e-5)


def test_bfloat16_keeps_rotary_frequencies_exact(folder_of: FolderOf) -> None:
    exact = policy(folder_of("llama")).model.model.rotary_emb.inv_freq
    engine = policy(folder_of("llama"), dtype=torch.bfloat16)
    assert engine.model.lm_head.weight.dtype == torch.bfloat16
    assert engine.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(engine.model.model.rotary_emb.inv_freq, exact)


def test_bfloat16_agrees_with_transformers_in_bfloat16_far_into_a_row(folder_of: FolderOf) -> None:
    rows = draw_rows(7, [(400, 40)])
    plain = AutoModelForCausalLM.from_pretrained(folder_of("llama"), dtype=torch.bfloat16).eval()
    with torch.no_grad():
        expected, _ = plain_logprobs(plain, rows, 1.0)
    values, _ = policy(folder_of("llama"), 512, torch.bfloat16).logprobs(rows, 1.0)
    assert (values - expected).abs().mean() < 0.1


def test_logits_scaled_by_the_architecture_are_scaled_here(tmp_path: Path) -> None:
    from transformers import CohereConfig, CohereForCausalLM

    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        logit_scale=0.25,
        initializer_range=0.3,
        pad_token_id=0,
    )
    CohereForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    rows = draw_rows(8, LENGTHS)
    with torch.no_grad():
        expected, _ = plain_logprobs(CohereForCausalLM.from_pretrained(tmp_path), rows, 0.7)
    assert torch.allclose(policy(tmp_path).logprobs(rows, 0.7)[0], expected, atol=1e-4)


def test_logits_that_are_changed_in_an_unknown_way_are_refused(folder_of: FolderOf) -> None:
    engine = policy(folder_of("llama"))

    def scale(module: torch.nn.Module, args: Any, output: Any) -> Any:
        output.logits = output.logits * 1.5
        return output

    engine.model.register_forward_hook(scale)
    with pytest.raises(ModelError, match="LlamaForCausalLM: the logits of this architecture"):
        TorchEngine(engine.loaded, CPU, torch.float32, 64)
