"""The manifest of one checkpoint directory: what files it must hold, with sizes and hashes.

In: a directory with its files written. Out: manifest.json, and the list of problems found when a
directory is compared with its manifest (by sizes: cheap; by hashes: reads every byte).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from verl.checkpoint.atomic import fsync_directory, write_text_atomic
from verl.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
_CHUNK_BYTES = 4 << 20


def build_manifest(directory: Path, step: int, info: dict[str, Any]) -> dict[str, Any]:
    """Fsync every file and folder under `directory` and return its manifest.

    Raises:
        CheckpointError: a link or a special file among the content, no file at all, or a file
            that has the manifest's own name.
    """
    files = _content(directory)
    digests = hash_files([directory / name for name in files], sync=True)
    for folder, _, _ in os.walk(directory, topdown=False):
        fsync_directory(Path(folder))
    manifest = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "info": info,
        "files": [
            {"path": name, "size": (directory / name).stat().st_size, "sha256": digest}
            for name, digest in zip(files, digests, strict=True)
        ],
    }
    return manifest | {"sha256": _self_hash(manifest)}


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write `manifest` into `directory`; from here on the directory counts as complete."""
    text = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False)
    write_text_atomic(directory / MANIFEST_NAME, text + "\n")


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest of `directory`.

    Raises:
        CheckpointError: it is missing, torn, altered, or of an unknown format version.
    """
    path = directory / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {manifest.get('format_version')!r}, "
            f"this program reads version {FORMAT_VERSION}"
        )
    recorded = manifest.pop("sha256", None)
    if recorded != _self_hash(manifest):
        raise CheckpointError(f"{path} was altered after it was written (its own hash differs)")
    return manifest | {"sha256": recorded}


def size_problems(directory: Path, manifest: dict[str, Any]) -> list[str]:
    """Return what is missing or of the wrong size; reads no file content."""
    problems = []
    for entry in manifest["files"]:
        path = directory / entry["path"]
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != entry["size"]:
            problems.append(
                f"{path} has {path.stat().st_size} bytes, the manifest says {entry['size']}"
            )
    return problems


def hash_problems(directory: Path, manifest: dict[str, Any]) -> list[str]:
    """Return the files whose content is not what was saved; reads every byte.

    Raises:
        CheckpointError: a file cannot be read.
    """
    paths = [directory / entry["path"] for entry in manifest["files"]]
    return [
        f"{path} does not have the content that was saved (sha256 differs)"
        for path, entry, digest in zip(paths, manifest["files"], hash_files(paths), strict=True)
        if digest != entry["sha256"]
    ]


def plain_info(info: dict[str, Any], final: Path) -> dict[str, Any]:
    """Return `info` as it will be read back (text keys, lists), so that its hash agrees.

    Raises:
        CheckpointError: it holds something JSON has no word for; `final` names the checkpoint.
    """
    try:
        plain: dict[str, Any] = json.loads(json.dumps(info, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the info for {final} is not plain JSON: {error}") from error
    return plain


def look_of(directory: Path, manifest: dict[str, Any]) -> tuple[Any, ...]:
    """Return what changes when a file of the checkpoint is written to or swapped.

    Raises:
        OSError: a file of the manifest is missing.
    """
    stats = [(directory / entry["path"]).stat() for entry in manifest["files"]]
    return (
        manifest["sha256"],
        *((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats),
    )


def hash_files(paths: Iterable[Path], sync: bool = False) -> list[str]:
    """Return the sha256 (hexadecimal) of each file, several files at a time.

    Args:
        sync: also fsync each file before it is hashed.

    Raises:
        CheckpointError: a file cannot be read or synced.
    """
    # Threads help because hashing and fsync both release the interpreter lock.
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda path: _hash_file(path, sync), paths))


def _hash_file(path: Path, sync: bool) -> str:
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    try:
        # hashlib.file_digest would do, but Python 3.10 lacks it.
        with open(path, "rb", buffering=0) as handle:
            if sync:
                os.fsync(handle.fileno())
            while count := handle.readinto(chunk):
                digest.update(chunk[:count])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read in full ({error.strerror})") from error
    return digest.hexdigest()


def _content(directory: Path) -> list[str]:
    """Return the files below `directory` as sorted POSIX paths relative to it."""
    files = []
    for path in sorted(directory.rglob("*")):
        # A link would make the checkpoint depend on a file that can change or go.
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise CheckpointError(
                f"{path} is a link or a special file; a checkpoint holds plain files only: "
                "copy the content instead"
            )
        if path.is_file():
            files.append(PurePosixPath(path.relative_to(directory)).as_posix())
    if MANIFEST_NAME in files:
        raise CheckpointError(
            f"the checkpoint's content includes {MANIFEST_NAME}, a name that is reserved for its "
            "manifest: give that file another name"
        )
    if not files:
        raise CheckpointError(f"nothing was written into {directory}: refusing an empty checkpoint")
    return files


def _self_hash(manifest: dict[str, Any]) -> str:
    canonical = json.dumps(manifest, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
