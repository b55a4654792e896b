"""The executor for one process: every role lives here, one device each, no Ray needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from verl.cluster.resources import Placement, ResourcePool, resolve_placements
from verl.cluster.worker_group import WorkerGroup
from verl.config.schema import Resource


class Executor(Protocol):
    """What a trainer needs from whatever runs its roles."""

    placements: dict[str, Placement]

    def device(self, role: str) -> torch.device:
        """Where `role` computes."""
        ...

    def start(self, role: str, make_worker: Callable[[torch.device], Any]) -> WorkerGroup:
        """Create the workers of `role` and return their group."""
        ...


class LocalExecutor:
    """Runs every role in this process.

    Raises:
        PlacementError: a device that `resource` names does not exist here.
    """

    def __init__(self, resource: Resource) -> None:
        self.placements = resolve_placements(resource)

    def device(self, role: str) -> torch.device:
        """Where `role` computes."""
        return ResourcePool(self.placements[role], role).devices[0]

    def start(self, role: str, make_worker: Callable[[torch.device], Any]) -> WorkerGroup:
        """Create the one worker of `role` on its device."""
        return WorkerGroup(role, [make_worker(self.device(role))])
