"""StopSignal: the first signal asks, the second exits at once with 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import verl.checkpoint
from verl.checkpoint.signals import StopSignal

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(verl.checkpoint.__file__).parents[2])}

TRAIN = """
import sys, time
from verl.checkpoint.signals import StopSignal
with StopSignal() as stop:
    print("training", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saved", flush=True)
    if sys.argv[1] == "slow":
        time.sleep(60)
sys.exit(130)
"""

WITH_FORKED_WORKER = """
import os, signal, time
from verl.checkpoint.signals import StopSignal
with StopSignal() as stop:
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(worker, signal.SIGINT)
    time.sleep(0.2)
    print(os.waitpid(worker, os.WNOHANG), flush=True)
    os.kill(worker, signal.SIGTERM)
    print(os.WTERMSIG(os.waitpid(worker, 0)[1]), stop.requested, flush=True)
"""


def start(speed: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN, speed],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "training\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_lets_the_step_finish(number: signal.Signals) -> None:
    process = start("fast")
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert out == "saved\n"
    assert err.strip() == "finishing this step, then saving; press Ctrl-C again to exit at once"
    assert process.returncode == 130


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_exits_at_once(second: signal.Signals) -> None:
    process = start("slow")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    began = time.monotonic()
    process.send_signal(second)
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert time.monotonic() - began < 2


def test_forked_workers_survive_ctrl_c_and_obey_sigterm() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", WITH_FORKED_WORKER],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert shown.stdout == f"(0, 0)\n{int(signal.SIGTERM)} False\n"


def test_earlier_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyError), StopSignal() as stop:
        assert signal.getsignal(signal.SIGINT) not in before
        assert not stop.requested
        raise KeyError("x")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_the_main_thread_it_does_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def train() -> None:
        with StopSignal() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [(False, True)]
    assert signal.getsignal(signal.SIGINT) is before
