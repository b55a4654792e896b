from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from verl.cli.data import app
from verl.data.check import check_file, summarise
from verl.errors import ConfigError, DataError

USER = {"role": "user", "content": "w w"}
BOT = {"role": "assistant", "content": "w"}
WORSE = {"role": "assistant", "content": "w w w"}


def test_every_kind_of_bad_row_is_listed(jsonl, chat_tokenizer):
    path = jsonl(
        [
            {"prompt": "w"},
            {"prmpt": "w"},
            {"prompt": None},
            {"prompt": ""},
            '{"prompt"',
            "[]",
            {"prompt": "w"},
        ]
    )
    report = check_file(path, chat_tokenizer)
    assert (report.kind, report.rows, report.bad_rows, report.ok) == ("rl", 7, 5, False)
    assert [number for number, _ in report.problems] == [2, 3, 4, 5, 6]
    assert report.problems[0][1] == "prompt: column is missing; did you mean 'prmpt'?"
    assert report.problems[3][1].startswith("broken JSON")
    assert report.duplicates == [(7, 1)]
    assert report.reasons["prompt: is null"] == 1 and report.reasons["broken JSON"] == 1


def test_only_the_first_bad_rows_are_shown_and_all_counted(jsonl, chat_tokenizer):
    path = jsonl([{"prompt": "w"}] + [{"prompt": None}] * 30)
    report = check_file(path, chat_tokenizer)
    assert len(report.problems) == 20 and report.reasons == {"prompt: is null": 30}


def test_lengths_are_those_of_training(jsonl, chat_tokenizer):
    from verl.models.chat import conversation_ids, prompt_ids, reward_ids

    pair = {"prompt": [USER], "chosen": [BOT], "rejected": [WORSE]}
    report = check_file(jsonl([pair]), chat_tokenizer)
    assert report.kind == "rm" and report.lengths == {
        "prompt": [len(prompt_ids(chat_tokenizer, [USER]))],
        "chosen": [len(reward_ids(chat_tokenizer, [USER], [BOT]))],
        "rejected": [len(reward_ids(chat_tokenizer, [USER], [WORSE]))],
    }
    talk = [USER, BOT]
    report = check_file(jsonl([{"messages": talk}]), chat_tokenizer)
    ids, _ = conversation_ids(chat_tokenizer, talk)
    assert report.lengths == {"conversation": [len(ids)]}


def test_overlong_outcome(jsonl, raw_tokenizer):
    path = jsonl([{"prompt": "w " * n} for n in (3, 8, 12)])
    over = check_file(path, raw_tokenizer, seq_length=10, response_length=3).overlong
    assert (over.limit, over.rows, over.first, over.longest, over.tokens_cut) == (7, 2, 2, 12, 6)
    assert check_file(path, raw_tokenizer, seq_length=15, response_length=3).overlong.rows == 0
    with pytest.raises(ConfigError, match="no room for a prompt"):
        check_file(path, raw_tokenizer, seq_length=3, response_length=3)


def test_b16_template_refusals_are_bad_rows(jsonl, strict_tokenizer):
    report = check_file(jsonl([{"prompt": [USER]}, {"prompt": [USER, USER]}]), strict_tokenizer)
    [(number, problem)] = report.problems
    assert number == 2 and "[user, user]" in problem


def test_b05_parquet_and_jsonl_give_the_same_report(jsonl, tmp_path, chat_tokenizer):
    rows = [{"messages": [USER, BOT]}, {"messages": [USER, BOT, USER, WORSE]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    reports = [
        check_file(path, chat_tokenizer) for path in (jsonl(rows), tmp_path / "rows.parquet")
    ]
    assert reports[0].lengths == reports[1].lengths and reports[1].ok


def test_unknown_kind(jsonl, chat_tokenizer):
    with pytest.raises(DataError, match=":1: columns question fit no kind of row"):
        check_file(jsonl([{"question": "x"}]), chat_tokenizer)
    with pytest.raises(ConfigError, match="--kind 'xx'"):
        check_file(jsonl([{"prompt": "x"}]), chat_tokenizer, kind="xx")
    report = check_file(jsonl([{"prompt": "x"}]), chat_tokenizer, kind="rm")
    assert report.bad_rows == 1 and "chosen: column is missing" in report.problems[0][1]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=60))
def test_histogram_holds_every_row_once(lengths):
    summary = summarise(lengths)
    assert sum(rows for _, _, rows in summary.bins) == len(lengths) and len(summary.bins) <= 10
    for low, high, rows in summary.bins:
        assert rows == sum(low <= length <= high for length in lengths)
    assert summary.minimum <= summary.median <= summary.p95 <= summary.maximum


def test_command(jsonl, tmp_path, chat_tokenizer):
    chat_tokenizer.save_pretrained(tmp_path / "model")
    good = jsonl([{"prompt": "w " * n} for n in range(1, 30)], "good.jsonl")
    options = ["--model", str(tmp_path / "model"), "--seq-length", "20", "--response-length", "4"]
    result = CliRunner().invoke(app, ["check", str(good), *options])
    assert result.exit_code == 0, result.output
    assert "29 rl rows, 29 good, 0 bad, 0 duplicates" in result.output
    assert "Tokens, prompt: min" in result.output and "####" in result.output
    assert "truncate_left  train on 29 rows, cutting" in result.output

    bad = jsonl([{"prompt": "w"}, {"prompt": "[bold]", "ability": 3}], "bad.jsonl")
    result = CliRunner().invoke(app, ["check", str(bad), *options])
    assert result.exit_code == 2
    assert "row 2: ability: must be text, got int" in result.output
