"""Writes a folder of split files, all or nothing.

In: rows for named files such as `sft/train`. Out: the folder DIR with a parquet file each. All
of it is built in a hidden folder beside DIR and renamed at the end, so a failure or a kill
leaves the old DIR, or none, and never a part.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from verl.checkpoint.atomic import (
    fsync_directory,
    remove_entry,
    stale_temporaries,
    temporary_sibling,
    write_json_atomic,
)
from verl.data.schema import KINDS, Kind, arrow_schema
from verl.data.split import SPLITS
from verl.errors import DataError

MANIFEST = "prepare.json"
_BUFFERED_ROWS = 1024


def refuse_output(out: Path, force: bool, sources: list[str]) -> None:
    """Refuse an output folder that cannot be replaced, before any work is done.

    Raises:
        DataError: it is a file; it has content and `force` is off; it holds something that
            `verl prepare` does not write, or a source file.
    """
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; --out names a folder")
    for source in sources:
        if Path(source).exists() and out.resolve() in Path(source).resolve().parents:
            raise DataError(f"{source}: lies inside --out {out}; write to another folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not force:
        raise DataError(f"{out}: is not empty; name another folder, or replace it with --force")
    paths = sorted(path.relative_to(out) for path in out.rglob("*") if _is_foreign(path, out))
    foreign = [str(path) for path in paths[:5]]
    if foreign:
        raise DataError(
            f"{out}: --force replaces only what `verl prepare` wrote, and the folder also holds "
            f"{', '.join(foreign)}; name another folder"
        )


def _is_foreign(path: Path, out: Path) -> bool:
    parts = path.relative_to(out).parts
    own_files = {(kind, f"{split}.parquet") for kind in KINDS for split in SPLITS} | {(MANIFEST,)}
    return parts not in own_files and not (len(parts) == 1 and parts[0] in KINDS and path.is_dir())


class SplitWriter:
    """Context manager: rows go to a temporary folder; `commit` makes it DIR.

    Leaving the context without `commit` deletes the temporary folder.
    """

    def __init__(self, out: Path) -> None:
        self.out = out.resolve()
        self.rows: dict[str, int] = {}
        self._buffers: dict[str, list[Mapping[str, Any]]] = {}
        self._writers: dict[str, Any] = {}

    def __enter__(self) -> SplitWriter:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self._remove_stale("tmp")
        self._folder = temporary_sibling(self.out.with_name(f".{self.out.name}"))
        self._folder.mkdir()
        return self

    def open_file(self, kind: Kind, split: str) -> None:
        """Create the parquet file of `kind` and `split`, even if it stays without rows."""
        import pyarrow.parquet as pq

        path = self._folder / kind / f"{split}.parquet"
        path.parent.mkdir(exist_ok=True)
        name = f"{kind}/{split}"
        self._writers[name] = pq.ParquetWriter(path, arrow_schema(kind), compression="zstd")
        self._buffers[name] = []
        self.rows[name] = 0

    def add(self, kind: Kind, split: str, row: Mapping[str, Any]) -> None:
        """Append a row to the file of `kind` and `split`."""
        name = f"{kind}/{split}"
        self._buffers[name].append(row)
        self.rows[name] += 1
        if len(self._buffers[name]) >= _BUFFERED_ROWS:
            self._flush(name)

    def _flush(self, name: str) -> None:
        import pyarrow as pa

        rows, self._buffers[name] = self._buffers[name], []
        if rows:
            writer = self._writers[name]
            writer.write_table(pa.Table.from_pylist(rows, schema=writer.schema))

    def commit(self, manifest: Mapping[str, Any]) -> None:
        """Complete the files, write the manifest, and put the folder in the place of DIR."""
        for name in self._writers:
            self._flush(name)
        self._close()
        write_json_atomic(self._folder / MANIFEST, dict(manifest))
        for path in sorted(self._folder.rglob("*"), reverse=True):
            if path.is_file():
                _fsync_file(path)
            else:
                fsync_directory(path)
        fsync_directory(self._folder)
        self._replace()
        fsync_directory(self.out.parent)
        # A kill between the two renames leaves the old folder under its hidden name; it is
        # deleted only now that a new one is in place.
        self._remove_stale("deleted")

    def _remove_stale(self, kind: str) -> None:
        for entry in stale_temporaries(self.out.parent):
            if entry.name.startswith(f".{self.out.name}.{kind}-"):
                remove_entry(entry)

    def _replace(self) -> None:
        """Rename; an old folder steps aside first and comes back if the rename fails."""
        old = None
        if self.out.exists():
            old = temporary_sibling(self.out.with_name(f".{self.out.name}"), "deleted")
            os.rename(self.out, old)
        try:
            os.rename(self._folder, self.out)
        except OSError:
            if old is not None:
                os.rename(old, self.out)
            raise

    def _close(self) -> None:
        while self._writers:
            self._writers.popitem()[1].close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
        if self._folder.exists():
            remove_entry(self._folder)


def _fsync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
