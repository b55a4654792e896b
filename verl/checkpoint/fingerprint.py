"""Fingerprints of what a run was started with, to refuse a resume with something else.

In: files (model, tokenizer, data) and the resolved configuration. Out: short texts that go into
the checkpoint, and at resume the list of keys whose saved and current values differ.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.checkpoint.manifest import hash_files
from verl.errors import CheckpointError

_SHOWN_CHARACTERS = 100


def fingerprint_files(paths: Iterable[Path | str]) -> str:
    """Return one sha256 (hexadecimal) over the content of `paths`, in their order.

    A folder counts with all files below it and their relative names; hidden entries (download
    caches, editor files) do not count. A file's own name and place do not count, so moving a
    data set does not change its fingerprint.

    Raises:
        CheckpointError: a path does not exist or cannot be read.
    """
    named: list[tuple[str, Path]] = []
    for path in map(Path, paths):
        if path.is_dir():
            named.extend(_visible_files(path))
        elif path.is_file():
            named.append(("", path))
        else:
            raise CheckpointError(f"{path} does not exist, so its fingerprint cannot be taken")
    digests = hash_files([path for _, path in named])
    listing = [[name, digest] for (name, _), digest in zip(named, digests, strict=True)]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def fingerprint_config(config: Mapping[str, Any], ignore: Collection[str] = ()) -> dict[str, str]:
    """Return the configuration as flat `{"train.ppo.gamma": "0.99", …}`, values as JSON.

    Args:
        config: nested mappings, lists and plain values; lists of mappings get an index in the key
            (`rewards.0.weight`).
        ignore: dotted keys that may differ at resume; each also covers everything below it.

    Raises:
        TypeError: a value that is not plain data, with its key.
    """
    flat = dict(_flatten(config, ""))
    return {key: value for key, value in flat.items() if not _is_ignored(key, ignore)}


def compare_fingerprints(saved: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Return one message per key that differs, with the saved and the current value."""
    messages = []
    for key in sorted(saved.keys() | current.keys()):
        before, now = saved.get(key), current.get(key)
        if before != now:
            start = _first_difference(before, now)
            messages.append(
                f"{key}: the checkpoint was made with {_excerpt(before, start)}, "
                f"this run has {_excerpt(now, start)}"
            )
    return messages


def require_same_fingerprints(
    saved: Mapping[str, str], current: Mapping[str, str], checkpoint: Path | str
) -> None:
    """Refuse to resume from `checkpoint` when a fingerprint differs.

    Raises:
        CheckpointError: names every key that differs, with both values.
    """
    messages = compare_fingerprints(saved, current)
    if messages:
        listing = "".join(f"\n  {message}" for message in messages)
        raise CheckpointError(
            f"{checkpoint} cannot be resumed with this configuration and these files:{listing}\n"
            "Restore the saved values to resume, or start a new run with another run_dir="
        )


def _visible_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                path = Path(directory) / name
                yield path.relative_to(folder).as_posix(), path


def _flatten(value: Any, key: str) -> Iterator[tuple[str, str]]:
    prefix = f"{key}." if key else ""
    if isinstance(value, Mapping) and (value or not key):
        for name, child in value.items():
            yield from _flatten(child, f"{prefix}{name}")
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for index, child in enumerate(value):
            yield from _flatten(child, f"{prefix}{index}")
    else:
        try:
            yield key, json.dumps(value, ensure_ascii=False, sort_keys=True, default=_plain)
        except TypeError as error:
            raise TypeError(f"{key}: {error}") from error


def _plain(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no fingerprint; use plain values")


def _is_ignored(key: str, ignore: Collection[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in ignore)


def _first_difference(before: str | None, now: str | None) -> int:
    pairs = zip(before or "", now or "", strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(before or ""), len(now or ""))
    )


def _excerpt(value: str | None, difference: int) -> str:
    """Show `value`; of a long text only the part around the first difference."""
    if value is None:
        return "no value"
    if len(value) <= _SHOWN_CHARACTERS:
        return value
    start = max(0, difference - _SHOWN_CHARACTERS // 2)
    shown = value[start : start + _SHOWN_CHARACTERS]
    lead, tail = "…" if start else "", "…" if start + _SHOWN_CHARACTERS < len(value) else ""
    return f"{lead}{shown}{tail}"
