"""A value belongs to the position that chose its token, as the log-prob does."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.conftest import save_tiny
from tests.engines.conftest import policy, value_model
from verl.batch import Batch
from verl.engines.torch_engine import TorchEngine
from verl.workers.critic import CriticWorker
from verl.workers.layout import response_rows


def make_values_positions(engine: TorchEngine) -> None:
    """Set the weights of a GPT-2 critic so that its output at position p is p.

    Attention and MLP write nothing; position p is embedded as 100 e_p, which the final layer norm
    turns into (e_p - 1/32) / s with s = sqrt(31) / 32.
    """
    trunk, head, width = engine.model.transformer, engine.model.score, 32
    with torch.no_grad():
        for block in trunk.h:
            for layer in (block.attn.c_proj, block.mlp.c_proj):
                layer.weight.zero_()
                layer.bias.zero_()
        trunk.wte.weight.zero_()
        trunk.wpe.weight.zero_()
        trunk.wpe.weight[:width] = 100 * torch.eye(width)
        weight = torch.arange(width) * math.sqrt(width - 1) / width
        head.weight.copy_(weight[None])
        mean = (width - 1) / 2  # what the layer norm takes away, given back by its bias
        trunk.ln_f.bias.copy_(mean * weight / weight.square().sum())


def batch() -> Batch:
    """Prompts of 2 and 3 tokens with responses of 3 and 1."""
    return Batch(
        {
            "input_ids": torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 8, 0]]),
            "prompt_length": torch.tensor([2, 3]),
            "response_length": torch.tensor([3, 1]),
            "response_mask": torch.tensor([[True, True, True], [True, False, False]]),
        }
    )


@pytest.mark.parametrize("packs", [True, False])
def test_a09_a10_exactly_the_values_of_the_choosing_positions(packs: bool, tmp_path: Path) -> None:
    engine = value_model(save_tiny(tmp_path, "gpt2"))
    make_values_positions(engine)
    engine.packs = packs
    scored = CriticWorker(engine).values(batch(), bootstrap=True)
    assert torch.allclose(
        scored["values"], torch.tensor([[1.0, 2.0, 3.0], [2.0, 0.0, 0.0]]), atol=1e-3
    )
    assert torch.allclose(scored["last_value"], torch.tensor([4.0, 3.0]), atol=1e-3)


def test_a10_logprob_and_value_are_read_at_the_same_positions(tiny_gpt2: Path) -> None:
    rows = response_rows(batch(), with_labels=True)
    assert [r.tolist() for r in rows.reads] == [[1, 2, 3], [2]]
    assert [label.tolist() for label in rows.labels or []] == [[7, 8, 9], [8]]
    engine = policy(tiny_gpt2)
    with torch.no_grad():
        every = torch.log_softmax(engine.model(rows.ids[0][None]).logits[0], -1)
    expected = torch.stack([every[1, 7], every[2, 8], every[3, 9]])
    assert torch.allclose(engine.logprobs(rows, 1.0)[0][:3], expected, atol=1e-5)
