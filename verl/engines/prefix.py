"""The frozen lower blocks of a model, computed once per row and reused.

With `train_layers` the embeddings and the lower blocks never change, so within one PPO step old
log-probs, reference, values and every update epoch would compute the same lower half again. Here a
row's hidden states after the frozen blocks are kept until `clear`, and only the blocks above run.
Models whose frozen parts are equal (actor, reference, often critic and reward model) share the rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from verl.engines.microbatch import packed_arguments
from verl.models.adapters import transformer_blocks
from verl.models.loading import trunk_of


class _Reached(Exception):
    """Raised by a hook to end a forward pass at the first trained block."""


class KnownRows:
    """Hidden states (S, H) of token rows; a row is also known as the start of a longer one.

    In a causal model a token's state depends on the tokens before it alone. So what the reward
    model computed for an answer with its end-of-turn tokens serves the policy, which reads less.
    """

    def __init__(self) -> None:
        self._states: dict[bytes, Tensor] = {}
        #: In order, so that a row is followed by the rows that begin with it.
        self._keys: list[bytes] = []

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, ids: Tensor) -> Tensor | None:
        """States of the row `ids` (S,) int64 on the CPU, or None."""
        key = ids.numpy().tobytes()
        place = bisect_left(self._keys, key)
        if place == len(self._keys) or not self._keys[place].startswith(key):
            return None
        return self._states[self._keys[place]][: len(ids)]

    def add(self, ids: Tensor, states: Tensor) -> None:
        """Keep the states of a row."""
        key = ids.numpy().tobytes()
        if key not in self._states:
            insort(self._keys, key)
        self._states[key] = states

    def clear(self) -> None:
        """Forget all rows."""
        self._states.clear()
        self._keys.clear()


class FrozenPrefix:
    """Runs a trunk in two parts, with the result of the lower part kept per row.

    Args:
        model: a model whose embeddings and first `depth` blocks are frozen.
        depth: number of frozen blocks, from `frozen_depth`.
        rows: a store to share with a model that has the same frozen tensors; default: a new one.
    """

    def __init__(self, model: nn.Module, depth: int, rows: KnownRows | None = None) -> None:
        self.trunk = trunk_of(model)
        self.depth = depth
        self.rows = KnownRows() if rows is None else rows
        #: Whether the store belongs to another model, which also decides when it is cleared.
        self.shares = rows is not None
        self.blocks = transformer_blocks(model)
        self._owner, self._name = _place_of(self.trunk, self.blocks)

    def clear(self) -> None:
        """Forget all rows, unless they belong to another model."""
        if not self.shares:
            self.rows.clear()

    def hidden(self, ids: list[Tensor], arguments: dict[str, Any]) -> Tensor:
        """Last hidden states (1, S, H) of packed rows `ids` laid out as `arguments`."""
        missing = [row for row in ids if self.rows.find(row) is None]
        if missing:
            lower = self._lower(packed_arguments(missing, self._device()))
            for row, states in zip(
                missing, lower.split([len(row) for row in missing]), strict=True
            ):
                self.rows.add(row, states)
        below = torch.cat([states for row in ids if (states := self.rows.find(row)) is not None])
        return self._upper(below[None], arguments)

    @torch.no_grad()
    def _lower(self, arguments: dict[str, Any]) -> Tensor:
        """Input (S, H) of the first trained block."""
        found: list[Tensor] = []

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(args[0] if args else kwargs["hidden_states"])
            raise _Reached

        handle = self.blocks[self.depth].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.trunk(**arguments, use_cache=False)
        except _Reached:
            pass
        finally:
            handle.remove()
        return found[0][0].detach()

    def _device(self) -> torch.device:
        return self.trunk.get_input_embeddings().weight.device

    def _upper(self, below: Tensor, arguments: dict[str, Any]) -> Tensor:
        rest = {name: value for name, value in arguments.items() if name != "input_ids"}
        with self._only_upper_blocks():
            output = self.trunk(inputs_embeds=below, **rest, use_cache=False)
        return output.last_hidden_state

    @contextmanager
    def _only_upper_blocks(self) -> Iterator[None]:
        setattr(self._owner, self._name, self.blocks[self.depth :])
        try:
            yield
        finally:
            setattr(self._owner, self._name, self.blocks)


def frozen_depth(model: nn.Module) -> int:
    """Number of blocks from the bottom whose parameters, embeddings included, are all frozen."""
    if any(p.requires_grad for p in model.get_input_embeddings().parameters()):
        return 0
    depth = 0
    for block in transformer_blocks(model):
        if any(p.requires_grad for p in block.parameters()):
            break
        depth += 1
    return depth


def same_prefix(one: nn.Module, other: nn.Module, depth: int) -> bool:
    """Whether embeddings and the first `depth` blocks of two models hold the same numbers."""
    ours, theirs = _lower_parameters(one, depth), _lower_parameters(other, depth)
    return len(ours) == len(theirs) and all(
        a.device == b.device and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(ours, theirs, strict=True)
    )


def share_prefix(one: nn.Module, other: nn.Module, depth: int) -> None:
    """Give `one` the memory of `other` for what `same_prefix` found equal; both stay frozen."""
    pairs = zip(_lower_parameters(one, depth), _lower_parameters(other, depth), strict=True)
    for mine, theirs in pairs:
        mine.data = theirs.data


def _lower_parameters(model: nn.Module, depth: int) -> list[nn.Parameter]:
    parts = [model.get_input_embeddings(), *transformer_blocks(model)[:depth]]
    return [parameter for part in parts for parameter in part.parameters()]


def _place_of(trunk: nn.Module, blocks: nn.ModuleList) -> tuple[nn.Module, str]:
    """Module and attribute name that hold `blocks`."""
    for module in trunk.modules():
        for name, child in module.named_children():
            if child is blocks:
                return module, name
    raise ValueError("the blocks are not part of the trunk")
