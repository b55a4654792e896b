"""Small files are replaced whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import verl.checkpoint
from verl.checkpoint.atomic import (
    process_is_alive,
    remove_stale_temporaries,
    write_bytes_atomic,
    write_json_atomic,
    write_text_atomic,
)


def test_text_is_written_as_given_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    write_text_atomic(path, "first")
    write_text_atomic(path, "zwei\r\n三\n")
    assert path.read_bytes() == "zwei\r\n三\n".encode()
    assert os.listdir(tmp_path) == ["note.txt"]


def test_json_is_readable_text(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "a.json", {"name": "héllo", "n": [1, 2.5, None]})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == (
        '{\n  "name": "héllo",\n  "n": [\n    1,\n    2.5,\n    null\n  ]\n}\n'
    )


@pytest.mark.parametrize("value", [{"a": float("nan")}, {"a": float("inf")}, {"a": object()}])
def test_what_is_not_json_is_refused_and_the_old_file_stays(tmp_path: Path, value: object) -> None:
    path = tmp_path / "a.json"
    write_json_atomic(path, {"a": 1})
    with pytest.raises(ValueError, match="a.json: the value cannot be written as JSON"):
        write_json_atomic(path, value)
    assert path.read_text() == '{\n  "a": 1\n}\n'


def test_a_failed_replacement_leaves_the_target_and_no_temporary(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_text_atomic(tmp_path / "taken", "text")
    assert os.listdir(tmp_path) == ["taken"]


def test_the_file_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text_atomic(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_reader_never_sees_a_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_bytes_atomic(path, b"0" * 100_000)
    code = (
        "import sys; from pathlib import Path\n"
        "from verl.checkpoint.atomic import write_bytes_atomic\n"
        "for n in range(60): write_bytes_atomic(Path(sys.argv[1]), b'%d' % (n % 10) * 100_000)"
    )
    root = Path(verl.checkpoint.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    writer = subprocess.Popen([sys.executable, "-c", code, path], env=environment)
    seen = set()
    while writer.poll() is None:
        data = path.read_bytes()
        assert len(data) == 100_000 and len(set(data)) == 1
        seen.add(data[0])
    assert writer.returncode == 0
    assert len(seen) > 1


def test_only_remains_of_dead_processes_are_removed(tmp_path: Path) -> None:
    kept = ["a.json", ".a.json.tmp-1-0123abcd", "my.tmp-4194999", "x.tmp-4194999-0123abcd.txt"]
    for name in [*kept, ".a.json.tmp-4194999-0123abcd"]:
        (tmp_path / name).write_text("x")
    remove_stale_temporaries(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
    assert process_is_alive(os.getpid()) and not process_is_alive(4194999)


def test_the_package_imports_without_torch() -> None:
    code = "import sys, verl.checkpoint; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    root = Path(verl.checkpoint.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert shown.stdout == "[]\n"
