"""RunDirectory: refusing to mix runs, the lock, and cutting a run back to a step."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verl.checkpoint
from verl.checkpoint.run_directory import RunDirectory
from verl.errors import RunDirectoryError

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(verl.checkpoint.__file__).parents[2])}


def opened(path: Path) -> RunDirectory:
    run = RunDirectory(path)
    run.create_or_open(resume=False)
    run.config.write_text("train: {}\n")
    return run


def test_a_new_run_has_the_documented_layout(tmp_path: Path) -> None:
    run = opened(tmp_path / "runs" / "a")
    assert sorted(os.listdir(run.path)) == [
        "checkpoints",
        "config.yaml",
        "export",
        "logs",
        "samples",
    ]
    assert (run.metrics.name, run.report.name) == ("metrics.jsonl", "report.html")


def test_an_earlier_run_needs_resume_or_another_place(tmp_path: Path) -> None:
    opened(tmp_path / "a")
    with pytest.raises(RunDirectoryError, match=r"a holds an earlier run.*--resume.*run_dir="):
        RunDirectory(tmp_path / "a").create_or_open(resume=False)
    RunDirectory(tmp_path / "a").create_or_open(resume=True)


def test_a_folder_of_something_else_is_never_used(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    for resume in (False, True):
        with pytest.raises(RunDirectoryError, match="do not belong to a run.*run_dir="):
            RunDirectory(tmp_path).create_or_open(resume)
    with pytest.raises(RunDirectoryError, match="is not a folder"):
        RunDirectory(tmp_path / "thesis.tex").create_or_open(False)
    with (
        pytest.raises(RunDirectoryError, match="cannot be used"),
        RunDirectory(tmp_path / "thesis.tex" / "run").lock(),
    ):
        pass
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_killed_before_its_first_file_starts_anew(
    tmp_path: Path, resume: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(tmp_path / "a")
    with run.lock():
        run.create_or_open(resume=False)
    (run.path / ".config.yaml.tmp-4194999-0123abcd").write_text("tr")
    with caplog.at_level(logging.WARNING):
        RunDirectory(run.path).create_or_open(resume)
    assert ("nothing to resume" in caplog.text) == resume
    assert sorted(os.listdir(run.path)) == [".lock", "checkpoints", "export", "logs", "samples"]


HOLD = """
import sys, time
from pathlib import Path
from verl.checkpoint.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(60)
"""

HOLD_WITH_FORKED_CHILD = """
import os, sys, time
from pathlib import Path
from verl.checkpoint.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).lock():
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.1)
    print(child, flush=True)
    time.sleep(60)
"""


def start(code: str, path: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, path], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_second_process_is_told_who_holds_the_run_and_kill_frees_it(tmp_path: Path) -> None:
    process, said = start(HOLD, tmp_path / "a")
    assert said == "held"
    try:
        expected = f"in use by process {process.pid} on host {socket.gethostname()}.*run_dir="
        with pytest.raises(RunDirectoryError, match=expected), RunDirectory(tmp_path / "a").lock():
            pytest.fail("two processes hold one run")
    finally:
        process.kill()
        process.communicate()
    with RunDirectory(tmp_path / "a").lock():
        holder = json.loads((tmp_path / "a" / ".lock").read_text())
        assert holder == {"pid": os.getpid(), "host": socket.gethostname()}


def test_a_forked_worker_that_outlives_the_run_does_not_hold_the_lock(tmp_path: Path) -> None:
    process, child = start(HOLD_WITH_FORKED_CHILD, tmp_path / "a")
    try:
        with (
            pytest.raises(RunDirectoryError, match=str(process.pid)),
            RunDirectory(tmp_path / "a").lock(),
        ):
            pytest.fail("two processes hold one run")
        process.kill()
        process.wait()
        os.kill(int(child), 0)
        with RunDirectory(tmp_path / "a").lock():
            pass
    finally:
        os.kill(int(child), signal.SIGKILL)
        process.communicate()


def test_the_lock_is_exclusive_within_a_process_and_ends_with_its_block(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    mine = f"process {os.getpid()} "
    with first.lock(), pytest.raises(RunDirectoryError, match=mine), second.lock():
        pytest.fail("two locks on one run")
    with pytest.raises(KeyError), second.lock():
        raise KeyError("x")
    with first.lock():
        pass


def lines(*steps: int | None) -> bytes:
    records = [{"note": "segment"} if step is None else {"step": step, "é": 0.5} for step in steps]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return text.encode()


def test_trim_drops_later_metrics_and_samples(tmp_path: Path) -> None:
    run = opened(tmp_path / "a")
    run.metrics.write_bytes(lines(None, 1, 2, 2, 3, 4))
    for name in ("step_0.jsonl", "step_2.jsonl", "step_3.jsonl", "step_000004_greedy.jsonl"):
        (run.samples / name).write_text("{}\n")
    (run.samples / "step_12").mkdir()
    (run.samples / "readme.txt").write_text("x")
    run.trim_after(2)
    assert run.metrics.read_bytes() == lines(None, 1, 2, 2)
    assert sorted(os.listdir(run.samples)) == ["readme.txt", "step_0.jsonl", "step_2.jsonl"]
    run.trim_after(2)
    assert run.metrics.read_bytes() == lines(None, 1, 2, 2)
    run.trim_after(0)
    assert run.metrics.read_bytes() == lines(None)


@settings(max_examples=50, deadline=None)
@given(count=st.integers(0, 6), cut=st.integers(0, 6), torn_at=st.integers(0, 40))
def test_a_killed_and_trimmed_file_is_a_prefix_of_the_uninterrupted_one(
    tmp_path_factory: pytest.TempPathFactory, count: int, cut: int, torn_at: int
) -> None:
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    next_line = lines(count + 1)
    run.metrics.write_bytes(lines(*range(1, count + 1)) + next_line[:torn_at])
    written = count + (torn_at >= len(next_line) - 1)
    run.trim_after(cut)
    assert run.metrics.read_bytes() == lines(*range(1, min(written, cut) + 1))


def test_a_last_line_of_zeros_is_torn_too(tmp_path: Path) -> None:
    run = opened(tmp_path / "a")
    run.metrics.write_bytes(lines(1, 2) + b"\0" * 30)
    run.trim_after(5)
    assert run.metrics.read_bytes() == lines(1, 2)


@pytest.mark.parametrize("damage", [b'{"step": 2, "x', b"[1]", b'{"step": "two"}'])
def test_damage_inside_the_metrics_is_an_error_with_its_line(tmp_path: Path, damage: bytes) -> None:
    run = opened(tmp_path / "a")
    content = lines(1) + damage + b"\n" + lines(3)
    run.metrics.write_bytes(content)
    with pytest.raises(RunDirectoryError, match="metrics.jsonl line 2 .*delete that line"):
        run.trim_after(1)
    assert run.metrics.read_bytes() == content


def test_trim_of_a_run_without_metrics_does_nothing(tmp_path: Path) -> None:
    opened(tmp_path / "a").trim_after(3)
    RunDirectory(tmp_path / "absent").trim_after(3)


def test_finished_is_remembered_until_the_run_goes_back(tmp_path: Path) -> None:
    run = opened(tmp_path / "a")
    assert run.finished() is None
    run.mark_finished(5)
    assert RunDirectory(run.path).finished() == 5
    run.trim_after(5)
    assert run.finished() == 5
    run.trim_after(4)
    assert run.finished() is None
    run.state.write_text("{")
    with pytest.raises(RunDirectoryError, match="state.json is damaged"):
        run.finished()
