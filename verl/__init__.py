"""From human preferences to an aligned language model: SFT, reward model, PPO, evaluation, report.

`import verl` loads nothing heavy; the names below are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.cluster.dispatch import register
    from verl.cluster.resources import ResourcePool
    from verl.data import DataProvider
    from verl.trainer.base import Trainer

__version__ = "0.3.0"

__all__ = ["DataProvider", "ResourcePool", "Trainer", "__version__", "register"]

_HOMES = {
    "DataProvider": "verl.data",
    "ResourcePool": "verl.cluster.resources",
    "Trainer": "verl.trainer.base",
    "register": "verl.cluster.dispatch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'verl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
