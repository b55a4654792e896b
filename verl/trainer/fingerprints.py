"""Cheap fingerprints of model folders: enough to notice another model, without reading gigabytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

#: Bytes hashed at both ends of each file.
END_BYTES = 1 << 20


def model_fingerprint(path: str | None) -> str:
    """Hash of names, sizes and both ends of the files of a local folder; the id itself for hub ids."""
    if path is None:
        return "none"
    folder = Path(path)
    if not folder.is_dir():
        return f"hub:{path}"
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if not file.is_file() or file.name.startswith("."):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}/{size}/".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(END_BYTES))
            if size > END_BYTES:
                stream.seek(max(END_BYTES, size - END_BYTES))
                digest.update(stream.read(END_BYTES))
    return digest.hexdigest()
