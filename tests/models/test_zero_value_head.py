"""A critic whose head starts from zero: every value is 0, and the trunk is the checkpoint's."""

from __future__ import annotations

from pathlib import Path

import torch

from verl.config.schema import CriticModel
from verl.models.loading import head_of, load_value_model, trunk_of


def test_zero_head_keeps_the_trunk(tiny_reward: Path) -> None:
    kept = load_value_model(CriticModel(pretrained_path=str(tiny_reward)), "critic", seed=1)
    zero = load_value_model(
        CriticModel(pretrained_path=str(tiny_reward), value_head_init="zero"), "critic", seed=1
    )
    assert head_of(kept.model).weight.abs().max() > 0
    assert head_of(zero.model).weight.abs().max() == 0
    for a, b in zip(
        trunk_of(kept.model).parameters(), trunk_of(zero.model).parameters(), strict=True
    ):
        assert torch.equal(a, b)
