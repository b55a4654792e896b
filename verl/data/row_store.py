"""Random access to the rows of a file without holding them as Python objects.

In: a .jsonl, .jsonl.gz or .parquet file. Out: a store with `len`, `row(i)` and `number(i)` (the
1-based line or row in the file). jsonl keeps byte offsets; parquet is laid out once as a
memory-mapped arrow file; compressed files are unpacked into a temporary folder.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
import zlib
from array import array
from bisect import bisect_right
from pathlib import Path
from typing import Any, Protocol

from verl.data.reading import Row, file_form, is_blank, open_parquet, parse_line, plain_row
from verl.errors import DataError


class RowStore(Protocol):
    """Rows by index."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Return row `index` (0-based); raises `DataError` when it cannot be read."""
        ...

    def number(self, index: int) -> int:
        """Return the 1-based line (jsonl) or row (parquet) of row `index` in the file."""
        ...

    def columns(self) -> list[str]:
        """Return the columns of the file; of a jsonl file, those of its first row."""
        ...


def open_store(path: Path) -> RowStore:
    """Open a file of any of the three forms.

    Raises:
        DataError: missing, unknown extension, or damaged.
    """
    form = file_form(path)
    if form == ".parquet":
        return ArrowStore(path)
    return JsonlStore(path, compressed=form == ".jsonl.gz")


class JsonlStore:
    """A jsonl file indexed by the byte offsets of its lines (16 bytes per row)."""

    def __init__(self, path: Path, *, compressed: bool = False) -> None:
        self._path = path
        self._plain = path
        if compressed:
            self._folder = tempfile.TemporaryDirectory(prefix="verl-data-")
            self._plain = Path(self._folder.name) / "rows.jsonl"
            _unpack(path, self._plain)
        self._offsets = array("Q")
        self._numbers = array("Q")
        offset = 0
        with self._plain.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not is_blank(line):
                    self._offsets.append(offset)
                    self._numbers.append(number)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, index: int) -> Row:
        # Opened for each read: an open handle would share its position with forked workers.
        with self._plain.open("rb") as file:
            file.seek(self._offsets[index])
            line = file.readline()
        number = self._numbers[index]
        return parse_line(line, f"{self._path}:{number}", first=number == 1)

    def number(self, index: int) -> int:
        return self._numbers[index]

    def columns(self) -> list[str]:
        return list(self.row(0)) if len(self) else []


def _unpack(path: Path, target: Path) -> None:
    try:
        with gzip.open(path, "rb") as source, target.open("wb") as plain:
            shutil.copyfileobj(source, plain, 1 << 20)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({error}); copy it again") from None


class ArrowStore:
    """A parquet file rewritten, one row group at a time, as an arrow file that is memory-mapped."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._folder = tempfile.TemporaryDirectory(prefix="verl-data-")
        target = Path(self._folder.name) / "rows.arrow"
        source = open_parquet(path)
        try:
            with pa.ipc.new_file(target, source.schema_arrow) as writer:
                for batch in source.iter_batches(batch_size=4096):
                    writer.write_batch(batch)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: damaged parquet file: {error}") from None
        reader = pa.ipc.open_file(pa.memory_map(str(target)))
        self._columns = list(reader.schema.names)
        self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        self._starts = [0]
        for batch in self._batches:
            self._starts.append(self._starts[-1] + batch.num_rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> dict[str, Any]:
        position = bisect_right(self._starts, index) - 1
        batch = self._batches[position].slice(index - self._starts[position], 1)
        return plain_row(batch.to_pylist(maps_as_pydicts="strict")[0])

    def number(self, index: int) -> int:
        return index + 1

    def columns(self) -> list[str]:
        return self._columns
