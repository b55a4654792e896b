from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from verl.cli.prepare import app
from verl.data.prepare import LAYOUTS, prepare
from verl.data.reading import read_rows
from verl.data.schema import arrow_schema, content_digest, row_problems
from verl.data.split import PromptSplit
from verl.errors import ConfigError, DataError

REAL = Path(__file__).parents[3] / "shared" / "data" / "hh-harmless-1500.jsonl.gz"


def transcript(question, answer):
    return f"\n\nHuman: {question}\n\nAssistant: {answer}"


def hh_row(i, answer="good", worse="bad"):
    return {"chosen": transcript(f"q{i}", answer), "rejected": transcript(f"q{i}", worse)}


def rows_of(path):
    return [row for _, row in read_rows(path)]


def test_hh_writes_six_valid_files(jsonl, tmp_path):
    bad = [
        hh_row(500, "x", "x"),
        hh_row(501, "x", ""),
        {"chosen": 1, "rejected": "x"},
        {"chosen": transcript("a", "x"), "rejected": transcript("b", "y")},
        {"chosen": transcript("a", "x") + "\n\nHuman: z", "rejected": transcript("a", "y")},
    ]
    rows = [hh_row(i) for i in range(100)] + bad + [hh_row(0), hh_row(0, "good", "worse")]
    report = prepare(LAYOUTS["hh-rlhf"], [str(jsonl(rows))], tmp_path / "out")
    assert (report.read, report.kept) == (107, 102)
    assert report.dropped == {
        "identical pair": 1,
        "empty answer": 1,
        "not two strings": 1,
        "differing prefixes": 1,
        "not ending with the assistant": 1,
    }
    assert report.examples["empty answer"] == [f"{tmp_path / 'rows.jsonl'}:102"]
    assert report.duplicates == {"rm": 1, "sft": 2, "rl": 2}
    prompts = {}
    for kind in ("sft", "rm", "rl"):
        for split in ("train", "test"):
            path = tmp_path / "out" / kind / f"{split}.parquet"
            assert pq.read_schema(path).equals(arrow_schema(kind))
            found = rows_of(path)
            assert [p for row in found for p in row_problems(kind, row)] == []
            assert report.files[f"{kind}/{split}"] == len(found) > 0
            asked = [row["messages"][:-1] if kind == "sft" else row["prompt"] for row in found]
            prompts[kind, split] = [content_digest(prompt) for prompt in asked]
    train, test = set(prompts["rl", "train"]), set(prompts["rl", "test"])
    assert not train & test and len(train | test) == 100
    for kind in ("sft", "rm"):
        assert set(prompts[kind, "train"]) == train and set(prompts[kind, "test"]) == test
    first = rows_of(tmp_path / "out/rl/test.parquet")[0]
    assert first["data_source"] == "hh-rlhf" and first["ability"] == "dialogue"
    assert first["reward_model"] == {"style": "model", "ground_truth": ""}
    assert first["extra_info"] == {"split": "test", "index": 0}


def test_output_is_the_same_in_every_run(jsonl, tmp_path):
    source = str(jsonl([hh_row(i) for i in range(50)]))
    for name in ("a", "b"):
        prepare(LAYOUTS["hh-rlhf"], [source], tmp_path / name)
    prepare(LAYOUTS["hh-rlhf"], [source], tmp_path / "c", seed=1)
    test = [rows_of(tmp_path / name / "rm/test.parquet") for name in "abc"]
    assert test[0] == test[1] != test[2]


def test_every_pair_of_a_prompt_is_in_the_same_split(jsonl, tmp_path):
    rows = [hh_row(i, f"good {n}") for n in range(4) for i in range(60)]
    prepare(LAYOUTS["hh-rlhf"], [str(jsonl(rows))], tmp_path / "out", test_fraction=0.5)
    for kind, column in (("rm", "prompt"), ("sft", "messages")):
        train, test = (
            {row[column][0]["content"] for row in rows_of(tmp_path / f"out/{kind}/{split}.parquet")}
            for split in ("train", "test")
        )
        assert len(train) + len(test) == 60 and not train & test


def test_a_prompt_keeps_its_split_when_the_data_grow(jsonl, tmp_path):
    small, large = (str(jsonl([hh_row(i) for i in range(n)], f"{n}.jsonl")) for n in (60, 90))
    prepare(LAYOUTS["hh-rlhf"], [small], tmp_path / "small")
    prepare(LAYOUTS["hh-rlhf"], [large], tmp_path / "large")
    before, after = (
        {str(row["prompt"]) for row in rows_of(tmp_path / name / "rl/test.parquet")}
        for name in ("small", "large")
    )
    assert before <= after


def test_few_prompts_leave_no_split_empty(jsonl, tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]
    for seed in range(6):
        for fraction in (0.01, 0.99):
            out = tmp_path / f"{seed}-{fraction}"
            report = prepare(
                LAYOUTS["prompts"], [str(jsonl(rows))], out, test_fraction=fraction, seed=seed
            )
            assert sum(report.files.values()) == 3 and min(report.files.values()) >= 1


def test_fraction_zero_writes_train_only_and_one_is_refused(jsonl, tmp_path):
    source = str(jsonl([{"prompt": "a"}]))
    report = prepare(LAYOUTS["prompts"], [source], tmp_path / "out", test_fraction=0)
    assert report.files == {"rl/train": 1}
    assert not (tmp_path / "out/rl/test.parquet").exists()
    with pytest.raises(ConfigError, match="--test-fraction 1"):
        prepare(LAYOUTS["prompts"], [source], tmp_path / "two", test_fraction=1)


def test_split_share_is_about_the_fraction():
    split = PromptSplit.of_fraction(0.2, seed=0)
    test = sum(split(f"prompt {i}") == "test" for i in range(5000))
    assert 900 < test < 1100


def test_b26_missing_column_names_file_line_and_nearest(jsonl, tmp_path):
    source = jsonl([{"prmpt": "x"}])
    with pytest.raises(DataError, match=rf"{source}:1: prompt: column is missing; did you mean"):
        prepare(LAYOUTS["prompts"], [str(source)], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_b26_later_bad_rows_are_dropped_and_counted(jsonl, tmp_path):
    rows = [{"prompt": "x"}, {"prmpt": "y"}, {"prompt": None}, {"prompt": ""}, {"prompt": "z"}]
    source = jsonl(rows)
    report = prepare(LAYOUTS["prompts"], [str(source)], tmp_path / "out")
    assert report.kept == 2 and report.dropped == {"no prompt": 3}
    assert report.examples["no prompt"] == [f"{source}:2", f"{source}:3", f"{source}:4"]


def test_nothing_left_names_the_reasons(jsonl, tmp_path):
    source = jsonl([hh_row(0, "x", "x"), hh_row(1, "", "x")])
    with pytest.raises(DataError, match="no row left to write: 2 read, dropped: 1 identical pair"):
        prepare(LAYOUTS["hh-rlhf"], [str(source)], tmp_path / "out")
    with pytest.raises(DataError, match="the source has no rows"):
        prepare(LAYOUTS["hh-rlhf"], [str(jsonl([], "e.jsonl"))], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_broken_line_writes_nothing(jsonl, tmp_path):
    source = jsonl([hh_row(i) for i in range(3000)] + ['{"chosen": "cut'])
    with pytest.raises(DataError, match=f"{source}:3001: broken JSON"):
        prepare(LAYOUTS["hh-rlhf"], [str(source)], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_existing_output_is_refused_without_force(jsonl, tmp_path):
    source, out = str(jsonl([{"prompt": f"p{i}"} for i in range(30)])), tmp_path / "out"
    prepare(LAYOUTS["prompts"], [source], out)
    before = (out / "rl/train.parquet").read_bytes()
    with pytest.raises(DataError, match="is not empty; .* --force"):
        prepare(LAYOUTS["prompts"], [source], out)
    with pytest.raises(DataError, match="broken JSON"):
        prepare(LAYOUTS["prompts"], [str(jsonl(["{"], "broken.jsonl"))], out, force=True)
    assert (out / "rl/train.parquet").read_bytes() == before
    report = prepare(LAYOUTS["prompts"], [source], out, limit=10, force=True)
    assert report.read == 10
    assert len(rows_of(out / "rl/train.parquet")) == report.files["rl/train"] < 11
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"out", "rows.jsonl", "broken.jsonl"}


def test_force_never_deletes_foreign_files(jsonl, tmp_path):
    source, out = str(jsonl([{"prompt": "a"}, {"prompt": "b"}])), tmp_path / "out"
    prepare(LAYOUTS["prompts"], [source], out)
    (out / "rl" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"also holds rl/notes.txt"):
        prepare(LAYOUTS["prompts"], [source], out, force=True)
    assert (out / "rl" / "notes.txt").read_text() == "mine"
    inside = str(out / "rl" / "train.parquet")
    with pytest.raises(DataError, match="lies inside --out"):
        prepare(LAYOUTS["prompts"], [inside], out, force=True)
    with pytest.raises(DataError, match="is a file; --out names a folder"):
        prepare(LAYOUTS["prompts"], [source], Path(source))


def read_and_stop(folder, out, sig):
    """Start a real run on a pipe, give it rows but no end, and stop it with a signal."""
    pipe = folder / "pipe.jsonl"
    os.mkfifo(pipe)
    code = (
        "import sys; from pathlib import Path; from verl.data.prepare import LAYOUTS, prepare\n"
        "prepare(LAYOUTS['prompts'], [sys.argv[1]], Path(sys.argv[2]), force=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(pipe), str(out)], stderr=-1)
    with pipe.open("wb") as stream:
        # More than the kernel's pipe buffer, so the process is inside its loop afterwards.
        stream.write(b'{"prompt": "%s"}\n' % (b"x" * 100_000) * 5)
        stream.flush()
        process.send_signal(sig)
        process.communicate(timeout=60)
    pipe.unlink()
    assert process.returncode != 0


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_leaves_the_old_output(jsonl, tmp_path, sig):
    source, out = str(jsonl([{"prompt": f"p{i}"} for i in range(30)])), tmp_path / "out"
    prepare(LAYOUTS["prompts"], [source], out)
    before = (out / "rl/train.parquet").read_bytes()
    read_and_stop(tmp_path, out, sig)
    assert (out / "rl/train.parquet").read_bytes() == before
    names = {path.name for path in tmp_path.iterdir()}
    assert (names == {"out", "rows.jsonl"}) == (sig == signal.SIGINT)
    # What a killed run left behind goes with the next one.
    prepare(LAYOUTS["prompts"], [source], out, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "rows.jsonl"}


def test_several_sources_and_parquet_output_as_source(jsonl, tmp_path):
    a, b = jsonl([{"prompt": "a"}], "a.jsonl"), jsonl([{"prompt": "b"}], "b.jsonl.gz")
    report = prepare(LAYOUTS["prompts"], [str(a), str(b)], tmp_path / "one", test_fraction=0)
    assert report.files == {"rl/train": 2}
    again = [str(tmp_path / "one/rl/train.parquet")]
    report = prepare(LAYOUTS["prompts"], again, tmp_path / "two", test_fraction=0)
    assert rows_of(tmp_path / "two/rl/train.parquet") == [
        {**row, "data_source": "prompts"} for row in rows_of(tmp_path / "one/rl/train.parquet")
    ]


def test_margins_reach_the_rm_file(jsonl, tmp_path):
    rows = [
        {"prompt": "a", "chosen": "x", "rejected": "y", "score_chosen": 3, "score_rejected": 1},
        {"prompt": "b", "chosen": "x", "rejected": "y", "domain": "ignored"},
    ]
    prepare(LAYOUTS["preferences"], [str(jsonl(rows))], tmp_path / "out", test_fraction=0)
    found = rows_of(tmp_path / "out/rm/train.parquet")
    assert [row["margin"] for row in found] == [2.0, None]


def test_command_prints_the_account_and_the_next_step(jsonl, tmp_path):
    source = jsonl([hh_row(i) for i in range(40)] + [hh_row(99, "x", "")])
    result = CliRunner().invoke(app, ["hh-rlhf", str(source), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    counts = {
        line.rpartition("  ")[0].strip(): line.split()[-1] for line in result.output.splitlines()
    }
    assert counts["rows read"] == "41" and counts["kept"] == "40"
    assert "dropped: empty answer" in result.output
    assert f"at {source}:41" in result.output
    assert f"verl sft CONFIG.yaml data.train={tmp_path}/out/sft/train.parquet" in result.output
    manifest = json.loads((tmp_path / "out/prepare.json").read_text())
    assert manifest["rows_read"] == 41 and manifest["dropped"] == {"empty answer": 1}


@pytest.mark.skipif(not REAL.exists(), reason="the real HH-RLHF sample is not beside this checkout")
def test_real_hh_sample(tmp_path):
    report = prepare(LAYOUTS["hh-rlhf"], [str(REAL)], tmp_path / "out")
    assert (report.read, report.kept) == (1500, 1495)
    assert report.dropped == {"empty answer": 4, "differing prefixes": 1}
    assert report.files["rm/train"] + report.files["rm/test"] == 1495
    assert 100 < report.files["rm/test"] < 200
    found = rows_of(tmp_path / "out/rm/train.parquet")
    assert [p for row in found for p in row_problems("rm", row)] == []
    for row in found:
        roles = [message["role"] for message in row["prompt"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
