"""A GGUF file is parsed once for configuration, weights and tokenizer, and never served stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from verl.models import gguf as gguf_once

gguf = pytest.importorskip("gguf")


class _Counting:
    """Stands for the reader: keeps what it was asked to parse."""

    parsed: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, path: Any, mode: str = "r") -> None:
        self.parsed.append((Path(path).read_text(), mode))


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    monkeypatch.setattr(_Counting, "parsed", [])
    monkeypatch.setattr(gguf, "GGUFReader", _Counting)
    gguf_once.release()
    return _Counting.parsed


def test_one_parse_within_a_context(tmp_path: Path, parsed: list[tuple[str, str]]) -> None:
    (file := tmp_path / "m.gguf").write_text("first")
    with gguf_once.read_once("m.gguf"):
        assert gguf.GGUFReader(file) is gguf.GGUFReader(str(file))
    assert parsed == [("first", "r")]


def test_kept_for_the_next_context_when_asked(
    tmp_path: Path, parsed: list[tuple[str, str]]
) -> None:
    (file := tmp_path / "m.gguf").write_text("first")
    for keep in (True, False, False):
        with gguf_once.read_once("m.gguf", keep=keep):
            gguf.GGUFReader(file)
    assert len(parsed) == 2, "kept once, then let go"


def test_a_changed_file_is_parsed_again(tmp_path: Path, parsed: list[tuple[str, str]]) -> None:
    (file := tmp_path / "m.gguf").write_text("first")
    with gguf_once.read_once("m.gguf"):
        gguf.GGUFReader(file)
        file.write_text("second, longer")
        gguf.GGUFReader(file)
    assert [text for text, _ in parsed] == ["first", "second, longer"]


def test_writing_readers_are_not_shared(tmp_path: Path, parsed: list[tuple[str, str]]) -> None:
    (file := tmp_path / "m.gguf").write_text("first")
    with gguf_once.read_once("m.gguf"):
        assert gguf.GGUFReader(file) is not gguf.GGUFReader(file, "r+")
    assert [mode for _, mode in parsed] == ["r", "r+"]


def test_the_reader_comes_back_after_an_error(parsed: list[tuple[str, str]]) -> None:
    with pytest.raises(RuntimeError), gguf_once.read_once("m.gguf"):
        assert gguf.GGUFReader is not _Counting
        raise RuntimeError
    assert gguf.GGUFReader is _Counting


def test_other_models_are_left_alone(parsed: list[tuple[str, str]]) -> None:
    with gguf_once.read_once(None):
        assert gguf.GGUFReader is _Counting
