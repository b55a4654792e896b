"""How many tokens go through a model at once where the configuration does not say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.conftest import CPU
from verl.config.load import load_config
from verl.engines.microbatch import tokens_at_once
from verl.trainer.plan import plan_lines
from verl.workers.build import build_trainable


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [(None, "cpu", 512), (None, "cuda:1", 8192), (77, "cpu", 77), (77, "cuda", 77)],
)
def test_the_default_suits_the_device(setting: int | None, device: str, expected: int) -> None:
    assert tokens_at_once(setting, torch.device(device)) == expected


@pytest.mark.parametrize(("override", "expected"), [([], 512), (["48"], 48)])
def test_plan_and_engine_agree(
    override: list[str], expected: int, tiny_llama: Path, tmp_path: Path
) -> None:
    (data := tmp_path / "sft.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    settings = [f"data.train={data}", f"model.actor.pretrained_path={tiny_llama}"]
    settings += [f"train.tokens_per_microbatch={value}" for value in override]
    config = load_config(None, settings).config
    assert f"activations of {expected} tokens at a time" in plan_lines(config, "sft")[-1]
    assert build_trainable(config, "actor", CPU).tokens_per_microbatch == expected
