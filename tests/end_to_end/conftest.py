"""The `verl` command in processes of its own, and small data files for whole runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import verl

SERVER = Path(__file__).with_name("warm_verl.py")


class Command:
    """A running `verl` command."""

    def __init__(self, verl_command: Verl, pid: int, output: Path) -> None:
        self.server, self.pid, self.output = verl_command, pid, output

    def wait(self) -> int:
        """Exit code, or minus the signal."""
        return int(self.server.ask({"wait": self.pid}))

    def send(self, number: int) -> None:
        """Send a signal; a process that has just ended is still there until `wait`."""
        os.kill(self.pid, number)

    def running(self) -> bool:
        """False once it has ended (and waits to be waited for)."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state != "Z"

    def wait_until(
        self, condition: Callable[[], bool], seconds: float = 280, pause: float = 0.001
    ) -> bool:
        """Whether `condition` came true while the command was running."""
        end = time.monotonic() + seconds
        while self.running():
            if condition():
                return True
            assert time.monotonic() < end, f"nothing happened in {seconds} s:\n{self.text()}"
            time.sleep(pause)
        return condition()

    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text() if self.output.exists() else ""


class Verl:
    """Starts `verl` commands in new processes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        environment = os.environ | {
            "PYTHONPATH": str(Path(verl.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=environment, text=True,
        )  # fmt: skip

    def ask(self, request: dict[str, Any]) -> str:
        """Send one request to the server and return its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def start(self, *arguments: object) -> Command:
        """Start `verl ARGUMENTS` and return at once."""
        self.count += 1
        output = self.folder / f"{self.count:04d}.txt"
        words = [str(argument) for argument in arguments]
        return Command(self, int(self.ask({"start": words, "output": str(output)})), output)

    def __call__(self, *arguments: object) -> tuple[int, str]:
        """Run `verl ARGUMENTS` to its end; returns exit code and printed text."""
        command = self.start(*arguments)
        return command.wait(), command.text()

    def close(self) -> None:
        """End the server."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="session")
def run_verl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verl]:
    """`run_verl("ppo", "a.b=1")` gives (exit code, output)."""
    command = Verl(tmp_path_factory.mktemp("output"))
    yield command
    command.close()


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(user: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": user}]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Short rl, sft and rm rows: 10 to train on, 4 held out."""
    folder = tmp_path_factory.mktemp("rows")
    made: dict[str, Path] = {}
    for split, first, last in (("train", 0, 10), ("eval", 10, 14)):
        pairs = [(f"{n}+{n % 3}?", f"{n + n % 3}.", "?" * (1 + n % 4)) for n in range(first, last)]
        rows: dict[str, list[dict[str, Any]]] = {
            "rl": [{"prompt": chat(asked)} for asked, _, _ in pairs],
            "sft": [{"messages": chat(asked) + answer(good)} for asked, good, _ in pairs],
            "rm": [
                {"prompt": chat(asked), "chosen": answer(good), "rejected": answer(bad)}
                for asked, good, bad in pairs
            ],
        }
        for kind, content in rows.items():
            made[f"{kind}/{split}"] = write_jsonl(folder / f"{kind}-{split}.jsonl", content)
    return made
