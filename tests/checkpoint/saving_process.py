"""A process that saves checkpoints until it is killed; run as a script by test_store_kill.py.

`loop ROOT JOURNAL` saves and prunes for ever, noting each finished save in JOURNAL.
`crash_points FOLDER` runs the same three saves once per change of a file and dies before that one;
each attempt has its own root FOLDER/N. It ends when an attempt gets through.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from verl.checkpoint.store import CheckpointStore

FILES = ("actor/model.bin", "critic/model.bin", "state.json")


def content(step: int, generation: str, pause: float = 0.0) -> Callable[[Path], None]:
    """Return a writer of three files that all say `step:generation`, with a pause between."""

    def write(directory: Path) -> None:
        for name in FILES:
            (directory / name).parent.mkdir(exist_ok=True)
            with open(directory / name, "w", encoding="ascii") as handle:
                for _ in range(4):
                    handle.write(f"{step}:{generation}\n" * 500)
                    time.sleep(random.random() * pause)

    return write


def loop(root: Path, journal: Path) -> None:
    store = CheckpointStore(root, keep=2)
    step = (store.latest() or 0) + 1
    with open(journal, "ab", buffering=0) as notes:
        while True:
            for generation in ("first", "second"):
                store.save(step, content(step, generation, pause=0.001), {"by": generation})
                notes.write(f"{step} {generation}\n".encode())
            store.prune()
            step += 1


def crash_points(folder: Path) -> None:
    before = CheckpointStore(folder / "before", keep=1)
    before.save(1, content(1, "old"), {})
    before.save(2, content(2, "old"), {})
    attempt = 0
    while True:
        attempt += 1
        root = folder / str(attempt)
        shutil.copytree(before.root, root)
        pid = os.fork()
        if pid == 0:
            sys.addaudithook(die_before(attempt, str(root)))
            work = CheckpointStore(root, keep=1)
            work.save(2, content(2, "new"), {})
            work.mark_best(2, 0.5)
            work.save(3, content(3, "new"), {})
            work.prune()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            if status:
                raise SystemExit(f"attempt {attempt} ended with status {status}")
            return


def die_before(nth: int, root: str) -> Callable[[str, tuple[object, ...]], None]:
    """Return an audit hook that kills this process before its nth change of a file below `root`."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir") or (
            event == "open" and int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR)
        )
        # Inside rmtree the names are relative to an open folder, so they do not show the root.
        if changes and (event in ("os.remove", "os.rmdir") or root in str(arguments[0])):
            seen += 1
            if seen == nth:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


if __name__ == "__main__":
    {"loop": loop, "crash_points": crash_points}[sys.argv[1]](*map(Path, sys.argv[2:]))
