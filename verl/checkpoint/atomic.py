"""Write small files so that a reader, or a kill at any moment, sees the old or the new content.

In: a path and text, bytes or a JSON value. Out: the file, durable on disk when the call returns.
A kill can leave a hidden `.NAME.tmp-PID-…` file behind; `remove_stale_temporaries` clears those.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

_TEMPORARY = re.compile(r".*\.(?:tmp|deleted)-(\d+)-[0-9a-f]{8}")


def write_text_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` in UTF-8, line ends as given; durable when the call returns."""
    write_bytes_atomic(path, text.encode("utf-8"))


def write_json_atomic(path: Path, obj: Any) -> None:
    """Replace `path` by `obj` as indented JSON.

    Raises:
        ValueError: `obj` holds something JSON has no word for (NaN, infinity, a tensor, ...).
    """
    try:
        text = json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: the value cannot be written as JSON ({error}); "
            "convert it to numbers, text, lists and dictionaries first"
        ) from error
    write_text_atomic(path, text + "\n")


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`; durable when the call returns."""
    path = Path(path)
    temporary = temporary_sibling(path.with_name(f".{path.name}"))
    try:
        # A plain open keeps the user's umask; tempfile would make the file private (0600).
        with open(temporary, "xb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make the creations, renames and removals inside directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_sibling(path: Path, kind: str = "tmp") -> Path:
    """Return an unused name beside `path` that carries this process's id."""
    return path.with_name(f"{path.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")


def stale_temporaries(directory: Path, active: Collection[Path] = ()) -> list[Path]:
    """Return the temporary entries of `directory` that no living process is working on.

    Args:
        active: entries that this process is writing now. Any other entry with this process's
            id is stale: in a container the same small ids come back after every restart.
    """
    stale = []
    for entry in sorted(directory.iterdir()) if directory.is_dir() else []:
        match = _TEMPORARY.fullmatch(entry.name)
        if match is None or entry in active:
            continue
        owner = int(match.group(1))
        if owner == os.getpid() or not process_is_alive(owner):
            stale.append(entry)
    return stale


def remove_stale_temporaries(directory: Path, active: Collection[Path] = ()) -> None:
    """Delete what killed processes left half-written in `directory` (not in folders below)."""
    for entry in stale_temporaries(directory, active):
        remove_entry(entry)


def remove_entry(path: Path) -> None:
    """Delete a file, a link (not its target) or a directory tree."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def process_is_alive(pid: int) -> bool:
    """Say whether a process with id `pid` exists on this host."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
