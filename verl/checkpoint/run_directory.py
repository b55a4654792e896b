"""The folder of one run: its layout, its lock, and cutting it back to the step of a resume.

In: a path and whether the run is resumed. Out: the places of config, metrics, samples, logs,
checkpoints, export and report, such that a resumed run leaves what an uninterrupted one would.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from verl.checkpoint.atomic import (
    fsync_directory,
    remove_entry,
    remove_stale_temporaries,
    stale_temporaries,
    write_bytes_atomic,
    write_json_atomic,
)
from verl.errors import RunDirectoryError

logger = logging.getLogger(__name__)

_SAMPLE = re.compile(r"step_(\d+)(?:\D.*)?")


class RunDirectory:
    """One run's folder. Take `lock()` first, then `create_or_open`, then the rest."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        self.report = self.path / "report.html"
        self.state = self.path / "state.json"
        self._lock_file = self.path / ".lock"

    def create_or_open(self, resume: bool) -> None:
        """Make the folders of a new run, or open those of an earlier one.

        A resume where nothing was saved yet (killed before its first files) starts anew, with a
        warning.

        Raises:
            RunDirectoryError: the place holds an earlier run and `resume` is off, holds something
                that is not a run, or cannot be created.
        """
        holds_files = self._holds_files()
        if holds_files and not self._is_run():
            raise RunDirectoryError(
                f"{self.path} holds files that do not belong to a run; "
                "choose an empty or new folder with run_dir=PATH"
            )
        if holds_files and not resume:
            raise RunDirectoryError(
                f"{self.path} holds an earlier run; continue it with --resume, "
                "or choose another folder with run_dir=PATH"
            )
        if resume and not holds_files:
            logger.warning("nothing to resume in %s: starting from the first step", self.path)
        folders = (self.samples, self.logs, self.checkpoints, self.export)
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error
        for folder in (self.path, *folders):
            remove_stale_temporaries(folder)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold this folder for this process; the operating system frees it when the process ends.

        Raises:
            RunDirectoryError: another process holds it (named by process id and host), or the
                file system has no locks.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = open(self._lock_file, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._unusable(error) from error
        with handle:
            self._acquire(handle)
            # The lock belongs to the open file, which a forked worker would share and keep alive
            # after this process is killed; so the worker's copy is closed as it starts.
            os.register_at_fork(after_in_child=handle.close)
            holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
            handle.truncate(0)
            handle.write(holder.encode())
            try:
                yield
            finally:
                # Not unlinked: a process that opened this file would then lock a nameless one.
                if not handle.closed:
                    handle.truncate(0)

    def _acquire(self, handle: BinaryIO) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunDirectoryError(
                f"{self.path} is in use by {self._holder()}; "
                "wait for it, stop it, or choose another folder with run_dir=PATH"
            ) from error
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path} is on a file system without file locks ({error.strerror}); "
                "choose a local folder with run_dir=PATH"
            ) from error

    def _holder(self) -> str:
        try:
            holder = json.loads(self._lock_file.read_bytes())
            return f"process {holder['pid']} on host {holder['host']}"
        except (ValueError, TypeError, KeyError):
            return "another process (it has just started and not written its id yet)"

    def trim_after(self, step: int) -> None:
        """Drop metrics, samples and the `finished` mark of steps after `step`.

        Call it before anything opens `metrics.jsonl` for appending: the file is replaced. Lines
        without a step stay. A torn last line, from a kill while it was written, goes.

        Raises:
            RunDirectoryError: a line other than the last is not a metrics record.
        """
        finished = self.finished()
        if finished is not None and finished > step:
            self.state.unlink()
            fsync_directory(self.path)
        if self.metrics.exists():
            data = self.metrics.read_bytes()
            kept = b"".join(line + b"\n" for line in self._lines_until(data, step))
            if kept != data:
                write_bytes_atomic(self.metrics, kept)
        if not self.samples.is_dir():
            return
        for entry in sorted(self.samples.iterdir()):
            match = _SAMPLE.fullmatch(entry.name)
            if match and int(match.group(1)) > step:
                remove_entry(entry)
        fsync_directory(self.samples)

    def _lines_until(self, data: bytes, step: int) -> Iterator[bytes]:
        lines = data.split(b"\n")
        # The last piece is empty when the file ends with a line end.
        last = len(lines) if lines[-1] else len(lines) - 1
        for number, line in enumerate(lines[:last], start=1):
            try:
                line_step = _step_of(line)
            except (ValueError, TypeError) as error:
                if number == last:
                    return
                raise RunDirectoryError(
                    f"{self.metrics} line {number} is not a metrics record ({error}); "
                    "correct or delete that line, then resume"
                ) from error
            if line_step is None or line_step <= step:
                yield line

    def mark_finished(self, step: int) -> None:
        """Record durably that the whole run is done, with `step` as its last step."""
        write_json_atomic(self.state, {"finished": step})

    def finished(self) -> int | None:
        """Return the last step of a run that is done, or None while it is not.

        Raises:
            RunDirectoryError: state.json is damaged.
        """
        if not self.state.exists():
            return None
        try:
            return int(json.loads(self.state.read_bytes())["finished"])
        except (ValueError, TypeError, KeyError) as error:
            raise RunDirectoryError(
                f"{self.state} is damaged ({error!r}); delete it, then resume"
            ) from error

    def _holds_files(self) -> bool:
        if not self.path.exists():
            return False
        if not self.path.is_dir():
            raise RunDirectoryError(
                f"{self.path} is not a folder; choose another with run_dir=PATH"
            )
        ignored = {self._lock_file, *stale_temporaries(self.path)}
        return any(
            entry.is_file() or entry.is_symlink()
            for entry in self.path.rglob("*")
            if entry not in ignored
        )

    def _is_run(self) -> bool:
        return self.config.exists() or self.metrics.exists() or self.checkpoints.is_dir()

    def _unusable(self, error: OSError) -> RunDirectoryError:
        return RunDirectoryError(
            f"{self.path} cannot be used as a run directory ({error.strerror}: {error.filename}); "
            "choose another with run_dir=PATH"
        )


def _step_of(line: bytes) -> float | None:
    """Return the step of one metrics line, None if it has none."""
    record: Any = json.loads(line)
    if not isinstance(record, dict):
        raise TypeError(f"a {type(record).__name__} instead of an object")
    step = record.get("step")
    if step is not None and not isinstance(step, int | float):
        raise TypeError(f"step is {step!r}")
    return step
