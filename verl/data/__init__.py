"""Data: the schemas of the three splits, converters, datasets, length limits, the loader.

Nothing heavy is imported until a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "DataProvider": "verl.data.datasets",
    "PromptDataset": "verl.data.datasets",
    "PromptText": "verl.data.datasets",
    "RowDataset": "verl.data.datasets",
    "LoaderBatch": "verl.data.loader",
    "ResumableLoader": "verl.data.loader",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
