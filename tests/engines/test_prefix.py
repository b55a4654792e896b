"""Frozen lower blocks computed once per row: the same outputs and gradients, no stale rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from verl.config.schema import ActorModel
from verl.engines.microbatch import Rows
from verl.engines.prefix import KnownRows, frozen_depth
from verl.engines.torch_engine import TorchEngine
from verl.models.adapters import frozen_copy, prepare_for_training
from verl.models.loading import load_causal_lm

CPU = torch.device("cpu")


def engine_of(folder: Path, train_layers: int | None = 1, budget: int = 40) -> TorchEngine:
    section = ActorModel(pretrained_path=str(folder), train_layers=train_layers)
    loaded = load_causal_lm(section, "actor")
    prepare_for_training(loaded.model, section, "actor")
    return TorchEngine(loaded, CPU, torch.float32, budget)


def some_rows(seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    lengths = (9, 14, 30, 5)
    ids = [torch.randint(3, 200, (n,), generator=generator) for n in lengths]
    reads = [torch.arange(2, n - 1) for n in lengths]
    return Rows(ids, reads, [row[r + 1] for row, r in zip(ids, reads, strict=True)])


def gradients(engine: TorchEngine, rows: Rows) -> dict[str, torch.Tensor]:
    engine.backward(rows, lambda outputs, index: outputs["logprobs"].sum())
    found = {name: p.grad.clone() for name, p in engine.trainable() if p.grad is not None}
    engine.model.zero_grad()
    return found


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen2"])
def test_two_parts_give_the_same_logprobs_and_gradients(
    family: str, request: pytest.FixtureRequest
) -> None:
    engine, rows = engine_of(request.getfixturevalue(family)), some_rows()
    whole, _ = engine.logprobs(rows, 0.7)
    expected = gradients(engine, rows)
    engine.reuse_prefix()
    assert engine.prefix is not None
    assert engine.prefix.depth == 1
    for _ in range(2):  # the first pass fills the store, the second reads it
        assert torch.allclose(engine.logprobs(rows, 0.7)[0], whole, atol=1e-6)
    found = gradients(engine, rows)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-5), name


def test_rows_are_computed_once_and_found_in_other_micro_batches(tiny_llama: Path) -> None:
    engine, rows = engine_of(tiny_llama), some_rows()
    engine.reuse_prefix()
    assert engine.prefix is not None
    runs = []
    lowest = engine.prefix.blocks[0]
    handle = lowest.register_forward_pre_hook(lambda module, args: runs.append(1))
    engine.logprobs(rows, 1.0)
    filled = len(runs)
    engine.logprobs(rows.select([3, 0]), 1.0)
    assert len(runs) == filled
    engine.prefix.clear()
    engine.logprobs(rows.select([3, 0]), 1.0)
    assert len(runs) > filled
    handle.remove()


def test_the_reference_shares_rows_but_not_trained_blocks(tiny_llama: Path) -> None:
    from dataclasses import replace

    engine, rows = engine_of(tiny_llama), some_rows()
    engine.reuse_prefix()
    twin = TorchEngine(
        replace(engine.loaded, model=frozen_copy(engine.model)), CPU, torch.float32, 40
    )
    before, _ = twin.logprobs(rows, 1.0)
    twin.reuse_prefix(of=engine)
    assert twin.prefix is not None
    assert engine.prefix is not None
    assert twin.prefix.rows is engine.prefix.rows
    with torch.no_grad():
        for _, parameter in engine.trainable():
            parameter.add_(0.05)
    moved, _ = engine.logprobs(rows, 1.0)
    assert torch.allclose(twin.logprobs(rows, 1.0)[0], before, atol=1e-6)
    assert not torch.allclose(moved, before, atol=1e-3)


def test_nothing_is_reused_where_everything_is_trained(tiny_llama: Path) -> None:
    engine = engine_of(tiny_llama, train_layers=None)
    assert frozen_depth(engine.model) == 0
    engine.reuse_prefix()
    assert engine.prefix is None


def test_learned_positions_are_not_run_in_two_parts(tiny_gpt2: Path) -> None:
    engine, rows = engine_of(tiny_gpt2), some_rows()
    whole, _ = engine.logprobs(rows, 1.0)
    engine.reuse_prefix()
    assert torch.allclose(engine.logprobs(rows, 1.0)[0], whole, atol=1e-6)


def test_a_model_with_other_frozen_numbers_keeps_its_own_rows(tiny_llama: Path) -> None:
    engine, other = engine_of(tiny_llama), engine_of(tiny_llama)
    engine.reuse_prefix()
    assert engine.prefix is not None
    other.reuse_prefix(of=engine)
    assert other.prefix is not None
    assert other.prefix.rows is engine.prefix.rows
    other.prefix.clear()  # what belongs to the engine is the engine's to clear
    engine.logprobs(some_rows(), 1.0)
    other.prefix.clear()
    assert len(engine.prefix.rows) == 4
    third = engine_of(tiny_llama)
    with torch.no_grad():
        next(third.model.get_input_embeddings().parameters())[5, 0] += 1e-3
    third.reuse_prefix(of=engine)
    assert third.prefix is not None
    assert third.prefix.rows is not engine.prefix.rows


def test_a_row_is_known_as_the_start_of_a_longer_one() -> None:
    known, states = KnownRows(), torch.randn(4, 2)
    known.add(torch.tensor([5, 6, 7, 8]), states)
    known.add(torch.tensor([5, 6, 9]), torch.zeros(3, 2))
    known.add(torch.tensor([4]), torch.zeros(1, 2))
    for length in (1, 2, 3, 4):
        found = known.find(torch.tensor([5, 6, 7, 8][:length]))
        assert found is not None
        assert found.shape == (length, 2)
    assert torch.equal(known.find(torch.tensor([5, 6, 7])), states[:3])
    for unknown in ([5, 6, 7, 8, 1], [5, 7], [6, 7], [9], [5, 6, 7 + 2**32]):
        assert known.find(torch.tensor(unknown)) is None
    known.clear()
    assert len(known) == 0
    assert known.find(torch.tensor([5])) is None


def test_a_longer_row_of_another_model_serves_a_shorter_one(tiny_llama: Path) -> None:
    from dataclasses import replace

    engine, rows = engine_of(tiny_llama), some_rows()
    alone, _ = engine.logprobs(rows, 1.0)
    engine.reuse_prefix()
    assert engine.prefix is not None
    twin = TorchEngine(
        replace(engine.loaded, model=frozen_copy(engine.model)), CPU, torch.float32, 40
    )
    twin.reuse_prefix(of=engine)
    longer = [torch.cat([row, torch.tensor([1, 2])]) for row in rows.ids]
    twin.logprobs(Rows(longer, rows.reads, rows.labels), 1.0)
    runs: list[int] = []
    handle = engine.prefix.blocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    shared, _ = engine.logprobs(rows, 1.0)
    handle.remove()
    assert not runs
    assert torch.allclose(shared, alone, atol=1e-6)


def test_equal_frozen_tensors_lie_in_memory_once(tiny_llama: Path) -> None:
    engine, other = engine_of(tiny_llama), engine_of(tiny_llama)
    whole, _ = other.logprobs(some_rows(), 1.0)
    engine.reuse_prefix()
    other.reuse_prefix(of=engine)
    shared = [
        name
        for (name, mine), theirs in zip(
            engine.model.named_parameters(), other.model.parameters(), strict=True
        )
        if mine.data_ptr() == theirs.data_ptr()
    ]
    lower = ("model.embed_tokens.", "model.layers.0.")
    assert shared == [n for n, _ in engine.model.named_parameters() if n.startswith(lower)]
    assert torch.allclose(other.logprobs(some_rows(), 1.0)[0], whole, atol=1e-6)


def test_a_frozen_model_alone_keeps_no_rows(tiny_llama: Path) -> None:
    engine = engine_of(tiny_llama)
    engine.model.requires_grad_(False)
    engine.reuse_prefix()
    assert engine.prefix is None
    whole = engine_of(tiny_llama, train_layers=None)
    engine.reuse_prefix(of=whole)
    assert engine.prefix is None
