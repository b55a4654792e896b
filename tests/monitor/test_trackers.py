"""H01: a tracker that fails or hangs never stops training, and the local log is complete."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from verl.errors import ConfigError
from verl.monitor.log import MetricLog, read_metrics
from verl.monitor.trackers import TRACKERS, IsolatedTracker, open_trackers


class Recorder:
    """A tracker that keeps what it gets and does what a test asks at a step."""

    def __init__(self, at_step: Callable[[int], None] = lambda step: None) -> None:
        self.steps: list[int] = []
        self.closed = False
        self._at_step = at_step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._at_step(step)
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def run_ten_steps(run_dir: Path, tracker: IsolatedTracker) -> float:
    started = time.monotonic()
    with MetricLog(run_dir, trackers=[tracker]) as log:
        for step in range(1, 11):
            log.log(step, "train", {"score/mean": step})
            time.sleep(0.002)
    return time.monotonic() - started


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def assert_log_is_complete(run_dir: Path) -> None:
    assert [record["step"] for record in read_metrics(run_dir)] == list(range(1, 11))


def test_healthy_tracker_gets_every_step_in_order_and_is_closed(tmp_path, caplog) -> None:
    recorder = Recorder()
    run_ten_steps(tmp_path, IsolatedTracker("good", lambda: recorder))
    assert recorder.steps == list(range(1, 11)) and recorder.closed
    assert warnings_of(caplog) == []


def test_tracker_that_fails_at_the_start(tmp_path, caplog) -> None:
    def create() -> Recorder:
        raise RuntimeError("no account")

    run_ten_steps(tmp_path, IsolatedTracker("bad", create))
    assert_log_is_complete(tmp_path)
    (warning,) = warnings_of(caplog)
    assert "'bad'" in warning and "while starting: RuntimeError: no account" in warning


def test_tracker_that_fails_at_step_2(tmp_path, caplog) -> None:
    def fail(step: int) -> None:
        if step >= 2:
            raise OSError("disk quota")

    recorder = Recorder(fail)
    run_ten_steps(tmp_path, IsolatedTracker("bad", lambda: recorder))
    assert recorder.steps == [1]
    assert_log_is_complete(tmp_path)
    (warning,) = warnings_of(caplog)
    assert "at step 2: OSError: disk quota" in warning


@pytest.mark.parametrize("queue_size", [3, 100])
def test_tracker_that_hangs(tmp_path, caplog, queue_size: int) -> None:
    release = threading.Event()
    recorder = Recorder(lambda step: release.wait(30) and None)
    tracker = IsolatedTracker("slow", lambda: recorder, queue_size=queue_size, close_seconds=0.2)
    elapsed = run_ten_steps(tmp_path, tracker)
    assert elapsed < 5 and tracker.dropped
    assert_log_is_complete(tmp_path)
    assert len(warnings_of(caplog)) == 1
    release.set()


def test_unknown_tracker_is_a_configuration_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"monitor\.trackers.*'wandbb'.*tensorboard"):
        open_trackers(["wandbb"], tmp_path)


def test_no_trackers_asked_for(tmp_path) -> None:
    assert open_trackers([], tmp_path) == []


def test_tensorboard_is_the_default_and_shows_resumed_steps_once(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    # A trainer has torch loaded; imported on the tracker's thread it could exceed close_seconds.
    pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert "tensorboard" in TRACKERS
    for segment, first, last in ((0, 1, 4), (1, 3, 5)):
        trackers = open_trackers(None, tmp_path, first_step=first)
        with MetricLog(tmp_path, segment, trackers, after_step=first - 1) as log:
            for step in range(first, last + 1):
                loss = float("nan") if step == 5 else 1.0 * segment
                log.log(step, "train", {"score/mean": step + segment / 10, "policy/loss": loss})
    accumulator = EventAccumulator(str(tmp_path / "logs" / "tensorboard"))
    accumulator.Reload()
    shown = [(event.step, round(event.value, 3)) for event in accumulator.Scalars("score/mean")]
    assert shown == [(1, 1.0), (2, 2.0), (3, 3.1), (4, 4.1), (5, 5.1)]
    assert [event.step for event in accumulator.Scalars("policy/loss")] == [1, 2, 3, 4]
