"""How a call on a worker group reaches its workers, and how their answers become one.

A worker method is registered with a transfer mode; the group splits the arguments and joins the
results by it. New modes are `TransferMode` values made with two functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Function = TypeVar("Function", bound=Callable[..., Any])

_ATTRIBUTE = "_verl_transfer_mode"


@dataclass(frozen=True)
class TransferMode:
    """A protocol: `split` gives every worker its arguments, `join` makes one result.

    Attributes:
        name: how the mode is called in `register(transfer_mode="…")`.
        split: (group size, args, kwargs) -> per worker (args, kwargs).
        join: (results in worker order) -> result of the call.
    """

    name: str
    split: Callable[[int, tuple[Any, ...], dict[str, Any]], list[Arguments]]
    join: Callable[[Sequence[Any]], Any]


#: Modes by name, for `register(transfer_mode="DP_COMPUTE")`.
TRANSFER_MODES: dict[str, TransferMode] = {}


def transfer_mode(mode: TransferMode) -> TransferMode:
    """Make a mode known under its name; returns it."""
    if mode.name in TRANSFER_MODES:
        raise ValueError(f"transfer mode {mode.name!r} exists already")
    TRANSFER_MODES[mode.name] = mode
    return mode


def _same_for_all(size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    return [(args, kwargs)] * size


def _one_each(size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    for value in (*args, *kwargs.values()):
        if not isinstance(value, (list, tuple)) or len(value) != size:
            raise ValueError(f"ALL_TO_ALL takes one argument per worker: lists of length {size}")
    return [(tuple(a[i] for a in args), {k: v[i] for k, v in kwargs.items()}) for i in range(size)]


def _split_samples(size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    from verl.batch import Batch

    def shard(value: Any, rank: int) -> Any:
        if not isinstance(value, Batch):
            return value
        count = len(value)
        return value.select(range(rank * count // size, (rank + 1) * count // size))

    if size == 1:
        return [(args, kwargs)]
    return [
        (tuple(shard(a, r) for a in args), {k: shard(v, r) for k, v in kwargs.items()})
        for r in range(size)
    ]


def _join_samples(results: Sequence[Any]) -> Any:
    from verl.batch import Batch

    if len(results) == 1:
        return results[0]
    if isinstance(results[0], Batch):
        return Batch.concat(results)
    return list(results)


ONE_TO_ALL = transfer_mode(TransferMode("ONE_TO_ALL", _same_for_all, list))
ALL_TO_ALL = transfer_mode(TransferMode("ALL_TO_ALL", _one_each, list))
DP_COMPUTE = transfer_mode(TransferMode("DP_COMPUTE", _split_samples, _join_samples))
RANK_ZERO = transfer_mode(TransferMode("RANK_ZERO", _same_for_all, lambda results: results[0]))


def register(transfer_mode: TransferMode | str) -> Callable[[Function], Function]:
    """Decorate a worker method so that a worker group offers it.

    Args:
        transfer_mode: a `TransferMode`, or the name of a registered one.
    """
    if isinstance(transfer_mode, str):
        if transfer_mode not in TRANSFER_MODES:
            known = ", ".join(TRANSFER_MODES)
            raise ValueError(f"unknown transfer mode {transfer_mode!r}; known: {known}")
        transfer_mode = TRANSFER_MODES[transfer_mode]

    def mark(function: Function) -> Function:
        setattr(function, _ATTRIBUTE, transfer_mode)
        return function

    return mark


def mode_of(method: Any) -> TransferMode | None:
    """The transfer mode a method was registered with, or None."""
    return getattr(method, _ATTRIBUTE, None)
