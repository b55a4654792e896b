"""AdamW state by parameter name: training goes on bit for bit, nothing is lost (D07)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from verl.checkpoint.tensors import (
    flatten_optimizer_state,
    load_optimizer_state,
    load_tensors,
    save_tensors,
)
from verl.errors import CheckpointError


class Small(torch.nn.Module):
    """A model with a matrix, a bias, a 0-dim parameter, and one that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.unused = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def build(reverse: bool = False, **options: Any) -> tuple[Small, torch.optim.AdamW]:
    model = Small()
    parameters = list(model.parameters())
    if reverse:
        parameters.reverse()
    return model, torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, **options)


def train(model: Small, optimizer: torch.optim.AdamW, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": True}, {"foreach": False}])
def test_two_and_two_steps_equal_four(tmp_path: Path, options: dict[str, bool]) -> None:
    straight, optimizer = build(**options)
    train(straight, optimizer, 0, 4)

    model, optimizer = build(**options)
    train(model, optimizer, 0, 2)
    state = flatten_optimizer_state(optimizer, dict(model.named_parameters()))
    save_tensors(tmp_path / "model", dict(model.named_parameters()))
    save_tensors(tmp_path / "optimizer", state)

    # The parameters come in another order: names, not positions, tell which state is whose.
    resumed, optimizer = build(reverse=True, **options)
    resumed.load_state_dict(load_tensors(tmp_path / "model"))
    names = dict(resumed.named_parameters())
    load_optimizer_state(optimizer, names, load_tensors(tmp_path / "optimizer"))
    again = flatten_optimizer_state(optimizer, names)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)
    train(resumed, optimizer, 2, 4)
    for name, parameter in straight.named_parameters():
        assert torch.equal(parameter, names[name]), name


def trained() -> tuple[Small, torch.optim.AdamW, dict[str, torch.Tensor]]:
    model, optimizer = build()
    train(model, optimizer, 0, 2)
    return model, optimizer, flatten_optimizer_state(optimizer, dict(model.named_parameters()))


def test_the_names_say_what_each_tensor_is() -> None:
    _, _, state = trained()
    moments = ("exp_avg", "exp_avg_sq", "step")
    stepped = ("layer.weight", "layer.bias", "scale")
    expected = {f"{name}.{key}" for name in stepped for key in moments} | {"unused.step"}
    assert set(state) == expected
    assert state["layer.weight.step"].item() == 2.0
    assert state["unused.step"].item() == 0.0


def test_an_optimizer_that_never_stepped_round_trips() -> None:
    model, optimizer = build()
    names = dict(model.named_parameters())
    state = flatten_optimizer_state(optimizer, names)
    used, used_optimizer, _ = trained()
    load_optimizer_state(used_optimizer, dict(used.named_parameters()), state)
    assert not used_optimizer.state[used.scale]
    train(used, used_optimizer, 2, 3)
    assert used_optimizer.state[used.scale]["step"].item() == 1.0


@pytest.mark.parametrize(
    "lost", [("layer.weight.exp_avg",), ("scale.step",), ("layer.bias.exp_avg", "unused.step")]
)
def test_missing_tensors_are_named_and_nothing_changes(lost: tuple[str, ...]) -> None:
    _, _, state = trained()
    for name in lost:
        del state[name]
    model, optimizer = build()
    with pytest.raises(CheckpointError) as caught:
        load_optimizer_state(optimizer, dict(model.named_parameters()), state)
    assert all(name in str(caught.value) for name in ("missing", *lost))
    assert not optimizer.state


def test_no_optimizer_tensors_at_all_is_an_error() -> None:
    model, optimizer = build()
    with pytest.raises(CheckpointError, match="missing: layer.bias.exp_avg, .* and 4 more"):
        load_optimizer_state(optimizer, dict(model.named_parameters()), {})


def test_unexpected_and_misshapen_tensors_are_named() -> None:
    model, optimizer, state = trained()
    names = dict(model.named_parameters())
    with pytest.raises(CheckpointError, match="unexpected: other.exp_avg"):
        load_optimizer_state(optimizer, names, state | {"other.exp_avg": torch.zeros(1)})
    wrong = state | {"layer.weight.exp_avg": torch.zeros(3, 2)}
    with pytest.raises(CheckpointError, match=r"layer.weight.exp_avg has shape \(3, 2\).*\(2, 3\)"):
        load_optimizer_state(optimizer, names, wrong)


def test_loading_copies() -> None:
    _, _, state = trained()
    state = {name: tensor.clone() for name, tensor in state.items()}
    before = {name: tensor.clone() for name, tensor in state.items()}
    model, optimizer = build()
    load_optimizer_state(optimizer, dict(model.named_parameters()), state)
    train(model, optimizer, 2, 4)
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_parameters_without_a_name_and_other_optimizers_are_refused() -> None:
    model, optimizer = build()
    names = dict(model.named_parameters())
    del names["scale"]
    with pytest.raises(CheckpointError, match=r"parameter 0 of optimizer group 0, shape \(\)"):
        flatten_optimizer_state(optimizer, names)
    with pytest.raises(CheckpointError, match="SGD optimizer cannot be saved; use AdamW"):
        flatten_optimizer_state(torch.optim.SGD(model.parameters(), lr=1.0), names)
