"""Rows of a .jsonl, .jsonl.gz or .parquet file (or a hub data set), one at a time.

Out: (number, row) with 1-based line or row numbers and plain Python values; the same row is
the same from every form. Whatever cannot be read is a `DataError` with file, row and reason.
"""

from __future__ import annotations

import datetime
import decimal
import difflib
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from verl.errors import DataError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")

Row = dict[str, Any]


def file_form(path: str | Path) -> str:
    """Return ".jsonl", ".jsonl.gz" or ".parquet" for an existing file.

    Raises:
        DataError: the file is missing, is a folder, or has another extension.
    """
    path = Path(path)
    if path.is_dir():
        inside = [p.relative_to(path) for p in sorted(path.rglob("*")) if _suffix(p)]
        found = f"; files in it: {', '.join(map(str, inside[:8]))}" if inside else ""
        raise DataError(f"{path}: is a folder, name one file{found}")
    form = _suffix(path)
    if form is None:
        raise DataError(f"{path}: unknown extension; use one of {', '.join(SUFFIXES)}")
    if not path.exists():
        near = []
        if path.parent.is_dir():
            names = [entry.name for entry in path.parent.iterdir()]
            near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise DataError(f"{path}: no such file{hint}")
    return form


def _suffix(path: Path) -> str | None:
    name = path.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def read_rows(path: str | Path) -> Iterator[tuple[int, Row]]:
    """Yield (number, row) of a file; numbers count lines (jsonl) or rows (parquet) from 1.

    Raises:
        DataError: at the first row that cannot be read, naming file, row and reason.
    """
    for number, row in scan_rows(path):
        if isinstance(row, DataError):
            raise row
        yield number, row


def scan_rows(path: str | Path) -> Iterator[tuple[int, Row | DataError]]:
    """Like `read_rows`, but yields the error of an unreadable line and goes on."""
    form = file_form(path)
    return _scan_parquet(Path(path)) if form == ".parquet" else _scan_jsonl(Path(path), form)


def open_source(source: str, split: str = "train") -> Iterator[tuple[int, Row]]:
    """Yield rows of a local file, or of `split` of a hub data set given by its id."""
    path = Path(source)
    if path.exists() or _suffix(path) or not HUB_ID.match(source):
        return read_rows(path)
    return _read_hub(source, split)


def _scan_jsonl(path: Path, form: str) -> Iterator[tuple[int, Row | DataError]]:
    number = 0
    try:
        with gzip.open(path, "rb") if form == ".jsonl.gz" else path.open("rb") as lines:
            # Binary lines end at \n only; text mode would also split at U+2028 or a lone \r.
            for number, line in enumerate(lines, start=1):
                if is_blank(line):
                    continue
                try:
                    yield number, parse_line(line, f"{path}:{number}", first=number == 1)
                except DataError as error:
                    yield number, error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}: damaged gzip file after line {number} ({error}); copy it again"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def is_blank(line: bytes) -> bool:
    """Whether a raw line carries no row (white space, or only a byte order mark)."""
    return not line.removeprefix(b"\xef\xbb\xbf").strip()


def parse_line(line: bytes, where: str, *, first: bool = False) -> Row:
    """Parse one raw jsonl line; `first` lines may start with a byte order mark.

    Raises:
        DataError: not UTF-8, not JSON, not an object; `where` (file:line) leads the message.
    """
    if first:
        line = line.removeprefix(b"\xef\xbb\xbf")
    try:
        text = line.decode("utf-8")
        row = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text or "\\uD" in text:
            # Half a surrogate pair cannot be stored as UTF-8 nor tokenised.
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8"
        ) from None
    except UnicodeEncodeError:
        raise DataError(f"{where}: a \\ud... escape is half of a surrogate pair") from None
    except json.JSONDecodeError as error:
        hint = "" if text.rstrip().endswith("}") else "; is the line cut off?"
        place = f"{error.msg} at character {error.colno}"
        raise DataError(f"{where}: broken JSON: {place}{hint}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: broken JSON: {error}") from None
    if not isinstance(row, dict):
        hint = "; the file looks like one JSON array" if first and text.startswith("[") else ""
        raise DataError(
            f"{where}: must be an object, got {type(row).__name__}; write one object per line{hint}"
        )
    return plain_row(row)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _scan_parquet(path: Path) -> Iterator[tuple[int, Row | DataError]]:
    import pyarrow as pa

    number = 0
    try:
        for batch in open_parquet(path).iter_batches(batch_size=512):
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                number += 1
                try:
                    yield number, plain_row(row)
                except DataError as error:
                    yield number, DataError(f"{path}:{number}: {error}")
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: damaged parquet file after row {number}: {error}") from None


def open_parquet(path: Path) -> Any:
    """Open a parquet file, memory-mapped (`pyarrow.parquet.ParquetFile`).

    Raises:
        DataError: the file is not parquet or its footer is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from None


def _read_hub(source: str, split: str) -> Iterator[tuple[int, Row]]:
    from verl.errors import MissingDependencyError

    try:
        import datasets
    except ImportError:
        raise MissingDependencyError(
            f"{source}: reading a hub data set needs `pip install datasets`"
        ) from None
    try:
        rows = datasets.load_dataset(source, split=split, streaming=True)
        for number, row in enumerate(rows, start=1):
            yield number, plain_row(row)
    except (OSError, ValueError, RuntimeError) as error:
        # The hub's clients report "not found", "no network" and "no such split" by these.
        raise DataError(
            f"{source}: no such file here, and the hub data set (split {split!r}) cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from None


def plain_row(row: dict[str, Any]) -> Row:
    """Return `row` with plain Python values; a null column stays, a null inside a value goes.

    A parquet struct has every field in every row, null where the row had none: without this
    the same message would render differently from parquet and from jsonl.
    """
    done = {}
    for column, value in row.items():
        try:
            done[str(column)] = plain(value)
        except (ValueError, TypeError) as error:
            raise DataError(f"{column}: {error}") from None
    return done


def plain(value: Any) -> Any:
    """Turn arrow and numpy values, at any depth, into dict, list, str, int, float, bool, None.

    Raises:
        TypeError, ValueError: a value that JSON has no form for.
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "as_py"):
        return plain(value.as_py())
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8")
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")
