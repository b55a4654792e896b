"""metrics.jsonl: what is written, what is refused, and what survives kills and resumes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.monitor.log import MetricLog, next_segment, read_metrics


def train(log: MetricLog, *steps: int) -> None:
    for step in steps:
        log.log(step, "train", {"score/mean": float(step)})


def steps_of(run_dir: Path) -> list[tuple[int, str, int]]:
    return [(r["step"], r["kind"], r["segment"]) for r in read_metrics(run_dir)]


def test_a_line_has_the_documented_form(tmp_path: Path) -> None:
    with MetricLog(tmp_path, segment=3) as log:
        log.log(7, "train", {"score/mean": 1.5, "policy/loss": math.nan, "kl/coef": math.inf})
    line = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    time = record.pop("time")
    assert record == {
        "step": 7, "kind": "train", "segment": 3, "score/mean": 1.5, "policy/loss": None,
        "kl/coef": None, "non_finite": ["policy/loss", "kl/coef"],
    }  # fmt: skip
    assert abs(time - os.stat(tmp_path / "metrics.jsonl").st_mtime) < 60
    assert line.endswith("\n") and line.count("\n") == 1


def test_a_step_is_on_disk_before_the_log_is_closed(tmp_path: Path) -> None:
    log = MetricLog(tmp_path)
    train(log, 1)
    assert steps_of(tmp_path) == [(1, "train", 0)]
    log.sync()
    log.close()


def test_unknown_metric_is_refused_with_a_suggestion_and_writes_nothing(tmp_path: Path) -> None:
    message = r"'scroe/mean'.*did you mean 'score/mean'"
    with MetricLog(tmp_path) as log, pytest.raises(ValueError, match=message):
        log.log(1, "train", {"kl/coef": 0.1, "scroe/mean": 1.0})
    assert read_metrics(tmp_path) == []


def test_value_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with MetricLog(tmp_path) as log, pytest.raises(ValueError, match="'kl/coef' is None"):
        log.log(1, "train", {"kl/coef": None})  # type: ignore[dict-item]


def test_kind_is_checked(tmp_path: Path) -> None:
    with MetricLog(tmp_path) as log, pytest.raises(ValueError, match="'valid'"):
        log.log(1, "valid", {})  # type: ignore[arg-type]


@pytest.mark.parametrize("again", [1, 2])
def test_steps_must_increase_per_kind(tmp_path: Path, again: int) -> None:
    with MetricLog(tmp_path) as log:
        train(log, 1, 2)
        log.log(1, "eval", {"eval/win_rate": 0.5})
        with pytest.raises(ValueError, match=f"train step {again} logged after step 2"):
            train(log, again)


def test_torn_last_line_is_left_out_and_then_removed(tmp_path: Path) -> None:
    with MetricLog(tmp_path) as log:
        train(log, 1, 2)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert steps_of(tmp_path) == [(1, "train", 0)]
    with MetricLog(tmp_path, next_segment(tmp_path)) as log:
        train(log, 2)
    assert steps_of(tmp_path) == [(1, "train", 0), (2, "train", 1)]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_last_line_that_only_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    with MetricLog(tmp_path) as log:
        train(log, 1)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    with MetricLog(tmp_path, 1) as log:
        train(log, 2)
    assert steps_of(tmp_path) == [(1, "train", 0), (2, "train", 1)]


def test_damage_in_the_middle_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "kind": "train", "segment": 0}\n{"step": 2\n\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_metrics(tmp_path)


def test_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    assert next_segment(tmp_path) == 0


def test_h10_steps_done_again_after_a_resume_stand_in_the_file_once(tmp_path: Path) -> None:
    """Checkpoint at 2, crash at 4, resume."""
    with MetricLog(tmp_path) as log:
        train(log, 1, 2, 3, 4)
        log.log(4, "eval", {"eval/win_rate": 0.6})
    assert next_segment(tmp_path) == 1
    with MetricLog(tmp_path, 1, after_step=2) as log:
        train(log, 3)
    expected = [(1, "train", 0), (2, "train", 0), (3, "train", 1)]
    assert steps_of(tmp_path) == expected
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_readers_see_steps_once_even_if_the_file_has_them_twice(tmp_path: Path) -> None:
    with MetricLog(tmp_path) as log:
        train(log, 1, 2, 3, 4)
        log.log(4, "eval", {"eval/win_rate": 0.6})
    with MetricLog(tmp_path, 1) as log:
        log.log(2, "eval", {"eval/win_rate": 0.5})
        train(log, 3)
    assert steps_of(tmp_path) == [
        (1, "train", 0), (2, "train", 0), (2, "eval", 1), (3, "train", 1),
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(crash=st.integers(1, 12), checkpoint=st.integers(0, 12), cut=st.integers(0, 60))
def test_any_crash_and_resume_equals_the_straight_run(
    tmp_path_factory: pytest.TempPathFactory, crash: int, checkpoint: int, cut: int
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    checkpoint = min(checkpoint, crash - 1)
    with MetricLog(run_dir) as log:
        train(log, *range(1, crash + 1))
    path = run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
    with MetricLog(run_dir, next_segment(run_dir), after_step=checkpoint) as log:
        train(log, *range(checkpoint + 1, 13))
    assert [(r["step"], r["score/mean"]) for r in read_metrics(run_dir)] == [
        (step, float(step)) for step in range(1, 13)
    ]


def test_kill_9_tears_the_last_line_at_most(tmp_path: Path) -> None:
    program = (
        "import itertools, sys\nfrom verl.monitor.log import MetricLog\n"
        f"log = MetricLog({str(tmp_path)!r})\n"
        "for step in itertools.count(1):\n"
        "    log.log(step, 'train', {'score/mean': step})\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(50)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    steps = [record["step"] for record in read_metrics(tmp_path)]
    assert steps[:50] == list(range(1, 51)) == [int(line) for line in told]
    assert steps == list(range(1, len(steps) + 1))
