"""Fingerprints: the same content gives the same text, a difference is named by its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.checkpoint.fingerprint import (
    compare_fingerprints,
    fingerprint_config,
    fingerprint_files,
    require_same_fingerprints,
)
from verl.errors import CheckpointError

CONFIG = {
    "train": {"seed": 3, "ppo": {"gamma": 0.99, "clip": None}},
    "data": {"train": ["a.parquet", "b.parquet"], "path": Path("x/y")},
    "rewards": [{"name": "model", "weight": 1.0}],
    "lora": {},
}


def test_config_is_flat_text_by_key() -> None:
    assert fingerprint_config(CONFIG) == {
        "train.seed": "3",
        "train.ppo.gamma": "0.99",
        "train.ppo.clip": "null",
        "data.train": '["a.parquet", "b.parquet"]',
        "data.path": '"x/y"',
        "rewards.0.name": '"model"',
        "rewards.0.weight": "1.0",
        "lora": "{}",
    }
    assert fingerprint_config({}) == {}


def test_ignored_keys_cover_what_is_below_them_and_nothing_else() -> None:
    config = {"train": {"seed": 1, "seeds": 2}, "monitor": {"a": {"b": 1}}, "monitors": 1}
    kept = fingerprint_config(config, ignore=("train.seed", "monitor"))
    assert kept == {"train.seeds": "2", "monitors": "1"}


def test_a_value_that_is_not_plain_is_an_error_with_its_key() -> None:
    with pytest.raises(TypeError, match="a.b: a object has no fingerprint"):
        fingerprint_config({"a": {"b": object()}})


def test_compare_names_key_and_both_values() -> None:
    saved = {"train.ppo.gamma": "0.99", "gone": "1", "same": "2"}
    current = {"train.ppo.gamma": "0.95", "new": "3", "same": "2"}
    assert compare_fingerprints(saved, current) == [
        "gone: the checkpoint was made with 1, this run has no value",
        "new: the checkpoint was made with no value, this run has 3",
        "train.ppo.gamma: the checkpoint was made with 0.99, this run has 0.95",
    ]
    assert compare_fingerprints(saved, dict(saved)) == []


def test_long_values_are_shown_where_they_differ() -> None:
    common = "x" * 400
    (message,) = compare_fingerprints(
        {"chat_template": f"{common}OLD{common}"}, {"chat_template": f"{common}NEW{common}"}
    )
    assert "xOLDx" in message and "xNEWx" in message
    assert len(message) < 330


def test_require_raises_with_every_key_and_what_to_do() -> None:
    with pytest.raises(CheckpointError) as caught:
        require_same_fingerprints({"a": "1", "b": "2"}, {"a": "7", "b": "8"}, "runs/x/step_000002")
    text = str(caught.value)
    assert "runs/x/step_000002" in text and "run_dir=" in text
    assert "a: the checkpoint was made with 1, this run has 7" in text
    assert "b: the checkpoint was made with 2, this run has 8" in text
    require_same_fingerprints({"a": "1"}, {"a": "1"}, "anything")


def make_model(folder: Path, weights: str = "w") -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "model.safetensors").write_text(weights)
    return folder


def test_files_count_by_content_not_by_place(tmp_path: Path) -> None:
    one = make_model(tmp_path / "one")
    two = make_model(tmp_path / "moved" / "two")
    (two / ".cache").mkdir()
    (two / ".cache" / "etag").write_text("x")
    (two / ".DS_Store").write_text("x")
    assert fingerprint_files([one]) == fingerprint_files([str(two)])
    assert len(fingerprint_files([one])) == 64
    (tmp_path / "a.jsonl").write_text("rows")
    (tmp_path / "b.jsonl").write_text("rows")
    assert fingerprint_files([tmp_path / "a.jsonl"]) == fingerprint_files([tmp_path / "b.jsonl"])


def test_files_differ_by_content_name_and_order(tmp_path: Path) -> None:
    one = make_model(tmp_path / "one")
    other = make_model(tmp_path / "other", weights="W")
    renamed = make_model(tmp_path / "renamed")
    (renamed / "config.json").rename(renamed / "configuration.json")
    prints = [fingerprint_files(paths) for paths in ([one], [other], [renamed], [one, other])]
    prints.append(fingerprint_files([other, one]))
    assert len(set(prints)) == 5


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent.parquet does not exist"):
        fingerprint_files([tmp_path / "absent.parquet"])
