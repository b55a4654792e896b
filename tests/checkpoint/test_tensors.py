"""safetensors files: every kind of tensor comes back bit for bit; shared memory is explicit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.checkpoint.tensors import load_metadata, load_tensors, save_tensors
from verl.errors import CheckpointError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    dtype=st.sampled_from(DTYPES),
    flip=st.booleans(),
    seed=st.integers(0, 99),
)
def test_round_trip_is_bit_exact(
    tmp_path_factory: pytest.TempPathFactory,
    shape: list[int],
    dtype: torch.dtype,
    flip: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(shape, generator=generator) * 3).to(dtype)
    if flip:
        tensor = tensor.movedim(0, -1) if tensor.dim() > 1 else tensor
    path = tmp_path_factory.mktemp("t") / "x.safetensors"
    save_tensors(path, {"x": tensor, "step": torch.tensor(7.0)})
    loaded = load_tensors(path)
    assert loaded["x"].dtype == dtype and loaded["x"].shape == tensor.shape
    assert torch.equal(loaded["x"], tensor)
    assert loaded["step"].shape == () and loaded["step"].item() == 7.0


def test_special_floats_and_parameters_keep_their_bits(tmp_path: Path) -> None:
    values = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    save_tensors(tmp_path / "x", {"p": torch.nn.Parameter(values)})
    loaded = load_tensors(tmp_path / "x")["p"]
    assert torch.equal(loaded.view(torch.int32), values.view(torch.int32))
    assert not loaded.requires_grad


def test_loaded_tensors_own_their_memory(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x", {"a": torch.arange(1000.0), "b": torch.arange(3.0)})
    loaded = load_tensors(tmp_path / "x")
    assert loaded["a"].untyped_storage().nbytes() == 4000
    assert loaded["b"].untyped_storage().nbytes() == 12
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path / "x") not in maps.read_text()


def test_metadata_comes_back_without_our_own_key(tmp_path: Path) -> None:
    tied = torch.ones(2)
    save_tensors(tmp_path / "x", {"a": tied, "b": tied}, {"role": "actor"}, dedup=True)
    assert load_metadata(tmp_path / "x") == {"role": "actor"}
    with pytest.raises(CheckpointError, match="reserved"):
        save_tensors(tmp_path / "x", {}, {"verl.aliases": "{}"})


def test_tied_tensors_are_refused_by_name(tmp_path: Path) -> None:
    embedding = torch.nn.Embedding(5, 3)
    head = torch.nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    with pytest.raises(CheckpointError, match="head = embed.*dedup=True"):
        save_tensors(tmp_path / "x", {"embed": embedding.weight, "head": head.weight})
    assert not (tmp_path / "x").exists()


def test_dedup_stores_tied_tensors_once_and_ties_them_again(tmp_path: Path) -> None:
    shared = torch.randn(50, 4)
    tensors = {"z.embed": shared, "other": torch.randn(2), "a.head": shared.view(50, 4)}
    save_tensors(tmp_path / "x", tensors, dedup=True)
    assert (tmp_path / "x").stat().st_size < 1200
    loaded = load_tensors(tmp_path / "x")
    assert set(loaded) == set(tensors)
    assert loaded["a.head"] is loaded["z.embed"]
    assert torch.equal(loaded["a.head"], shared)


@pytest.mark.parametrize("dedup", [False, True])
def test_partly_shared_memory_is_refused(tmp_path: Path, dedup: bool) -> None:
    base = torch.arange(10.0)
    for other in (base[2:5], base.view(2, 5), base[::2], base.view(torch.int32)):
        with pytest.raises(CheckpointError, match=r"(whole and part|part and whole) overlap"):
            save_tensors(tmp_path / "x", {"whole": base, "part": other}, dedup=dedup)


def test_neighbours_in_one_buffer_share_nothing(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    tensors = {"q": flat[:4].view(2, 2), "k": flat[4:8].view(2, 2).t(), "v": flat[8:]}
    save_tensors(tmp_path / "x", tensors)
    loaded = load_tensors(tmp_path / "x")
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert (tmp_path / "x").stat().st_size < 400


def test_empty_tensors_are_never_aliases(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x", {"a": torch.empty(0), "b": torch.empty(0, 3)})
    assert load_tensors(tmp_path / "x")["b"].shape == (0, 3)


def test_tensors_without_dense_data_are_refused(tmp_path: Path) -> None:
    for tensor in (torch.empty(2, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(CheckpointError, match="bad has device"):
            save_tensors(tmp_path / "x", {"bad": tensor})


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match="model.safetensors does not exist"):
        load_tensors(path)
    save_tensors(path, {"a": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:-4])
    for read in (load_tensors, load_metadata):
        with pytest.raises(CheckpointError, match="model.safetensors cannot be read.*torn"):
            read(path)
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_tensors(tmp_path / "absent" / "x", {"a": torch.zeros(1)})


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_tensors(tmp_path / "x.safetensors")
