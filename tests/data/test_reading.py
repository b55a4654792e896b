from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl.data.reading import open_source, plain_row, read_rows, scan_rows
from verl.errors import DataError

# B07: CJK, a joined emoji, U+2028 (a line end for str.splitlines), U+0085, NUL, a lone \r.
ROWS = [
    {"prompt": "你好，世界"},
    {"prompt": "family 👩‍👩‍👧"},
    {"prompt": "a\u2028b\u0085c"},
    {"prompt": "nul \x00 and \r end"},
    {"prompt": "last"},
]
LINES = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]


def forms(folder):
    """The same rows in every form that a file can have."""
    plain = b"\n".join(LINES) + b"\n"
    contents = {
        "plain.jsonl": plain,
        "bom.jsonl": b"\xef\xbb\xbf" + plain,
        "crlf.jsonl": b"\r\n".join(LINES) + b"\r\n",
        "blank.jsonl": plain + b"\n  \n",
        "open_end.jsonl": b"\n".join(LINES),
        "zip.jsonl.gz": gzip.compress(b"\xef\xbb\xbf" + plain),
    }
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    return [*contents, "rows.parquet"]


def test_b07_every_form_gives_the_same_rows(tmp_path):
    expected = list(enumerate(ROWS, start=1))
    for name in forms(tmp_path):
        assert list(read_rows(tmp_path / name)) == expected, name


def test_line_numbers_count_blank_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf\n{"prompt":"x"}\n\n{"prompt":"y"}\n')
    assert list(read_rows(tmp_path / "a.jsonl")) == [(2, {"prompt": "x"}), (4, {"prompt": "y"})]


TOOL_ROW = {
    "prompt": [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"name": "f", "arguments": {"list": ["a", "b"], "flag": True}}],
        },
    ],
    "tools": [{"name": "f", "strict": False}],
}


def test_b05_nested_values_are_the_same_from_parquet_and_jsonl(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(TOOL_ROW) + "\n")
    pq.write_table(pa.Table.from_pylist([TOOL_ROW]), tmp_path / "a.parquet")
    [(_, from_jsonl)] = read_rows(tmp_path / "a.jsonl")
    [(_, from_parquet)] = read_rows(tmp_path / "a.parquet")
    # The user's message has no tool_calls; in parquet the struct field is null.
    assert from_parquet == from_jsonl == TOOL_ROW
    # A template that tests a list for truth, as tool templates do, gets a list.
    assert type(from_parquet["prompt"][1]["tool_calls"][0]["arguments"]["list"]) is list
    assert from_parquet["prompt"][1]["tool_calls"][0]["arguments"]["flag"] is True


def test_b05_numpy_values_become_plain():
    row = {
        "tools": np.array(
            [{"names": np.array(["a", "b"]), "strict": np.bool_(True)}], dtype=object
        ),
        "score": np.float32(0.5),
        "index": np.int64(3),
        "maybe": None,
    }
    done = plain_row(row)
    assert done == {
        "tools": [{"names": ["a", "b"], "strict": True}],
        "score": 0.5,
        "index": 3,
        "maybe": None,
    }
    assert type(done["score"]) is float and type(done["index"]) is int
    assert type(done["tools"][0]["strict"]) is bool


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "x"', "broken JSON"),
        (b"[1, 2]", "must be an object, got list"),
        (b'"text"', "must be an object, got str"),
        (b'{"prompt": "\xff"}', "not UTF-8 (byte 13 of the line)"),
        (b'{"score": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "\\ud83d"}', "half of a surrogate pair"),
        (b"[" * 100_000, "broken JSON"),
    ],
)
def test_unreadable_line_names_file_and_line(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "ok"}\n\n' + line + b"\n" + b'{"prompt": "ok"}\n')
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert reason in str(caught.value)
    # A check goes on behind the bad line.
    assert [number for number, _ in scan_rows(path)] == [1, 3, 4]


def test_a_surrogate_pair_is_one_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "\\ud83d\\ude00"}\n')
    assert list(read_rows(tmp_path / "a.jsonl")) == [(1, {"prompt": "😀"})]


def test_a_json_array_file_is_recognised(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('[{"prompt": "x"}]')
    with pytest.raises(DataError, match="looks like one JSON array"):
        list(read_rows(path))


def test_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(DataError, match=r"trian.jsonl: no such file; did you mean .*train.jsonl\?"):
        list(read_rows(tmp_path / "trian.jsonl"))


def test_wrong_extension_and_folder(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt\n")
    with pytest.raises(DataError, match=r"rows.csv: unknown extension; use one of .jsonl"):
        list(read_rows(tmp_path / "rows.csv"))
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(DataError, match=r"is a folder, name one file; files in it: rows.jsonl"):
        list(read_rows(tmp_path))


def test_damaged_parquet(tmp_path):
    good = tmp_path / "good.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": f"text {i}" * 50} for i in range(500)]), good)
    data = good.read_bytes()
    for name, content in {
        "text.parquet": b"not parquet",
        "empty.parquet": b"",
        "cut.parquet": data[: len(data) // 2],
        "pages.parquet": data[:4] + b"\xff" * 200 + data[204:],
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DataError, match=name):
            list(read_rows(path))


def test_damaged_gzip(tmp_path):
    data = gzip.compress(b'{"prompt": "x"}\n' * 1000)
    for name, content in {
        "cut.jsonl.gz": data[:-20],
        "text.jsonl.gz": b'{"prompt": "x"}\n',
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: damaged gzip"):
            list(read_rows(tmp_path / name))


def test_a_source_that_looks_like_a_file_is_never_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="data/rows.jsonl: no such file"):
        list(open_source("data/rows.jsonl"))


def test_unreachable_hub_id_is_a_data_error():
    code = "from verl.data.reading import open_source; list(open_source('someone/some-set'))"
    # Its own process: the hub's client reads the switch when it is first imported.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stderr=-1, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "verl.errors.DataError: someone/some-set: no such file here, and the hub"
    )


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TEXT, min_size=1, max_size=5))
def test_any_text_is_the_same_from_jsonl_and_parquet(tmp_path, texts):
    rows = [{"prompt": text} for text in texts]
    (tmp_path / "a.jsonl").write_bytes(
        b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    expected = list(enumerate(rows, start=1))
    assert list(read_rows(tmp_path / "a.jsonl")) == expected
    assert list(read_rows(tmp_path / "a.parquet")) == expected
