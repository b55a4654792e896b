"""Devices: what the configuration asks for, what this machine has, and pools of them.

In: placements such as {"gpu": [0, 1]}, {"gpu": 2} or {"cpu": 1}. Out: `ResourcePool`s with devices
that exist, or a `PlacementError` that says what is needed, what is there, and what works here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.config.schema import Resource
from verl.errors import ConfigError, PlacementError

if TYPE_CHECKING:
    import torch

ROLES = ("actor", "critic", "ref_policy", "reward_model")


@dataclass(frozen=True)
class Placement:
    """Devices of one kind by index; an index counts the devices of this machine."""

    kind: str
    indices: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}[{','.join(map(str, self.indices))}]"


def parse_placement(value: dict[str, Any], role: str) -> Placement:
    """Read {"gpu": [0, 1]}, {"gpu": 2} or {"cpu": 1}.

    Raises:
        ConfigError: another key, an empty or repeated index list, or a count below 1.
    """
    example = '{"gpu": [0]}, {"gpu": 1} or {"cpu": 1}'
    if len(value) != 1 or next(iter(value)) not in ("gpu", "cpu"):
        raise ConfigError(f"resource.{role}: {value!r} is no placement; write {example}")
    kind, wanted = next(iter(value.items()))
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0:
        return Placement(kind, tuple(range(wanted)))
    valid = isinstance(wanted, (list, tuple)) and wanted
    if not valid or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in wanted):
        raise ConfigError(f"resource.{role}: {value!r} is no placement; write {example}")
    if len(set(wanted)) != len(wanted):
        raise ConfigError(f"resource.{role}: {value!r} names a device twice")
    return Placement(kind, tuple(wanted))


class ResourcePool:
    """A set of devices that the workers of one or more roles share.

    `ResourcePool({"cpu": 1})` takes the spelling of the configuration. Raises `PlacementError`
    when the machine lacks a device.
    """

    def __init__(self, placement: dict[str, Any] | Placement, name: str = "pool") -> None:
        self.placement = (
            placement if isinstance(placement, Placement) else parse_placement(placement, name)
        )
        self.name = name
        check_available({name: self.placement})

    @property
    def devices(self) -> list[torch.device]:
        """The torch devices, in the order given."""
        import torch

        if self.placement.kind == "cpu":
            return [torch.device("cpu")]
        return [torch.device("cuda", i) for i in self.placement.indices]

    def __repr__(self) -> str:
        return f"ResourcePool({self.name}: {self.placement})"


def resolve_placements(resource: Resource) -> dict[str, Placement]:
    """Placement of every role; a role without one gets the first GPU, or the CPU."""
    default = {"gpu": 1} if gpu_count() else {"cpu": 1}
    placements = {role: parse_placement(getattr(resource, role) or default, role) for role in ROLES}
    check_available(placements)
    for role, placement in placements.items():
        if len(placement.indices) > 1:
            raise PlacementError(
                f"resource.{role} asks for {len(placement.indices)} devices ({placement}); this "
                f"version runs each role on one device of one process. "
                f'Write resource.{role} = {{"{placement.kind}": 1}}.'
            )
    return placements


def check_available(placements: dict[str, Placement]) -> None:
    """Raise `PlacementError` if a GPU that is asked for does not exist."""
    have = gpu_count()
    wanted = {role: p for role, p in placements.items() if p.kind == "gpu"}
    lacking = {role: p for role, p in wanted.items() if max(p.indices) >= have}
    if not lacking:
        return
    needed = sorted({i for p in wanted.values() for i in p.indices})
    roles = ", ".join(f"{role} {p}" for role, p in lacking.items())
    raise PlacementError(
        f"not enough GPUs: the configuration needs {len(needed)} (indices {needed}) for {roles}; "
        f"this machine has {have}. To run here, write "
        + ", ".join(f'resource.{role} = {{"cpu": 1}}' for role in lacking)
        + ", or leave resource out."
    )


def gpu_count() -> int:
    """GPUs that torch can use here."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
