"""Read a GGUF file once where transformers reads it three or four times.

transformers 5.19 parses the whole file again for the configuration, the weights and the tokenizer;
with 49,000 tokens each pass takes seconds. Within `read_once` they share one parsed file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: (path, size, time of change) of the file parsed last, and its reader.
_kept: tuple[tuple[str, int, int], Any] | None = None


@contextmanager
def read_once(gguf_file: str | None, keep: bool = False) -> Iterator[None]:
    """Parse each version of a GGUF file at most once within the context.

    Args:
        gguf_file: the model's setting; without one, or without the package gguf (of which
            transformers will speak), this does nothing.
        keep: hold the parsed file (some 100 MB) for a later context instead of letting it go.
    """
    gguf = _package() if gguf_file else None
    if gguf is None:
        yield
        return
    original = gguf.GGUFReader
    gguf.GGUFReader = lambda path, mode="r": _parsed(original, path, mode)
    try:
        yield
    finally:
        gguf.GGUFReader = original
        if not keep:
            release()


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        return None
    return gguf


def release() -> None:
    """Let the parsed file go."""
    global _kept
    _kept = None


def _parsed(reader: Any, path: Any, mode: str) -> Any:
    global _kept
    if mode != "r":
        return reader(path, mode)
    found = os.stat(path)
    key = (os.path.realpath(path), found.st_size, found.st_mtime_ns)
    if _kept is None or _kept[0] != key:
        _kept = (key, reader(path, mode))
    return _kept[1]
