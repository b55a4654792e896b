"""Pieces of the run loop: export, the random state, the line a person reads."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verl.checkpoint.atomic import remove_stale_temporaries
from verl.config.schema import Config
from verl.data.loader import LoaderBatch
from verl.errors import CheckpointError
from verl.trainer.random_state import load_rng, save_rng, seed_generators
from verl.trainer.run import Run, export_to, held_out_line, opened
from verl.trainer.sft import SFTTask


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_export_replaces_the_earlier_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    for text in ("first", "second"):
        export_to(tmp_path / "export", lambda folder, text=text: [(folder / text).write_text(text)])
        assert names(tmp_path) == ["export"]
        assert names(tmp_path / "export") == [text]


def test_an_export_that_fails_leaves_the_earlier_one(tmp_path: Path) -> None:
    export_to(tmp_path / "export", lambda folder: [(folder / "first").write_text("")])

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        export_to(tmp_path / "export", fail)
    assert names(tmp_path) == ["export"]
    assert names(tmp_path / "export") == ["first"]


def test_what_a_killed_export_leaves_is_cleared_when_the_run_is_opened(tmp_path: Path) -> None:
    seen: list[Path] = []
    export_to(tmp_path / "export", lambda folder: seen.append(folder))
    seen[0].mkdir()  # as if the process had been killed before the rename
    remove_stale_temporaries(tmp_path)
    assert names(tmp_path) == ["export"]


def draws() -> list[float]:
    return [float(torch.rand(1)), float(np.random.rand()), random.random(), random.gauss(0, 1)]


def test_all_three_generators_go_on_where_they_were_saved(tmp_path: Path) -> None:
    np.random.standard_normal(3)
    random.gauss(0, 1)  # leaves a second value behind in the generator
    save_rng(tmp_path / "rng.safetensors")
    expected = draws()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    assert draws() != expected
    load_rng(tmp_path / "rng.safetensors")
    assert draws() == expected


def test_the_generators_are_seeded_from_the_root_seed() -> None:
    found = []
    for seed in (3, 3, 4):
        seed_generators(seed)
        found.append(draws())
    assert found[0] == found[1]
    assert not set(found[1]) & set(found[2])


def test_a_missing_random_state_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rng\.safetensors is missing"):
        load_rng(tmp_path / "rng.safetensors")


def test_the_held_out_line_shows_what_there_is_with_its_interval() -> None:
    ppo = {"eval/score_sampled_mean": 1.5, "eval/score_sampled_ci95": 0.25, "eval/win_rate": 0.75}
    assert held_out_line(4, ppo) == "held out, step 4: score 1.500 ± 0.250  win rate 0.75"
    rm = {"eval/accuracy": 0.9, "eval/accuracy_ci_low": 0.8, "eval/accuracy_ci_high": 0.95}
    assert held_out_line(0, rm).endswith("accuracy 0.900  (95 % CI 0.800 to 0.950)")


class DrawingTask(SFTTask):
    """SFT whose steps also draw from the global generators, as a library might."""

    def __init__(self, config: Config, stop_at: int | None = None) -> None:
        super().__init__(config)
        self.stop_at, self.drawn = stop_at, dict[int, list[float]]()

    def step(self, batch: LoaderBatch, on_stage: Callable[[str], None]) -> dict[str, float]:
        """Draw, then train."""
        if batch.step == self.stop_at:
            raise RuntimeError("the lights went out")
        self.drawn[batch.step] = draws()
        return super().step(batch, on_stage)


def test_a_resumed_run_goes_on_with_the_random_numbers_of_the_uninterrupted_one(
    config: Config, write_rows: Any, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    config.data.train = write_rows("train", [{"messages": turns}] * 4)
    config.data.batch_size, config.checkpoint.every = 1, 1
    seed_generators(1)
    whole = DrawingTask(config)
    with opened(config, False) as directory:
        Run(whole, directory).fit()

    config.run_dir = str(tmp_path / "stopped")
    seed_generators(1)
    first = DrawingTask(config, stop_at=3)
    with opened(config, False) as directory, pytest.raises(RuntimeError, match="lights"):
        Run(first, directory).fit()
    seed_generators(2)
    second = DrawingTask(config)
    with opened(config, True) as directory:
        run = Run(second, directory)
        run.restore(None)
        run.fit()
    assert list(second.drawn) == [3, 4]
    assert first.drawn | second.drawn == whole.drawn
