"""A kill at any moment of a save leaves the old or the new state complete (D01, D02, D16)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import verl.checkpoint
from verl.checkpoint.store import CheckpointStore

SCRIPT = Path(__file__).with_name("saving_process.py")
FILES = ("actor/model.bin", "critic/model.bin", "state.json")
REPOSITORY = Path(verl.checkpoint.__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPOSITORY)}


def generation_of(directory: Path, step: int) -> str:
    """Return the one generation that all files of a checkpoint were written in."""
    lines = {line for name in FILES for line in (directory / name).read_text().splitlines()}
    assert len(lines) == 1, f"{directory} mixes {lines}"
    saved_step, generation = lines.pop().split(":")
    assert int(saved_step) == step
    assert all((directory / name).read_text().count("\n") == 2000 for name in FILES)
    return generation


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def test_twenty_kills_at_random_moments_always_leave_a_complete_latest(tmp_path: Path) -> None:
    root, journal = tmp_path / "checkpoints", tmp_path / "journal"
    journal.touch()
    draw = random.Random(20)
    remains = 0
    for _ in range(20):
        noted = journal.stat().st_size
        process = subprocess.Popen([sys.executable, SCRIPT, "loop", root, journal], env=ENVIRONMENT)
        while journal.stat().st_size == noted:
            assert process.poll() is None
            time.sleep(0.002)
        time.sleep(draw.random() * 0.08)
        process.kill()
        process.wait()

        step, generation = journal.read_text().split("\n")[-2].split()
        store = CheckpointStore(root, keep=2)
        latest = store.latest()
        assert latest is not None and latest in (int(step), int(step) + 1)
        assert ".tmp-" not in store.path(latest).name
        found = generation_of(store.path(latest), latest)
        if latest == int(step) and generation == "second":
            assert found == "second"
        for complete in store.steps():
            assert store.verify(complete) == []
        remains += any(".tmp-" in name or ".old-" in name for name in names(root))

    assert remains >= 5, "hardly any kill hit a save, so this test showed nothing"
    store = CheckpointStore(root, keep=2)
    store.prune()
    assert names(root) == [f"step_{step:06d}" for step in store.steps()]
    assert len(store.steps()) == 2


def test_a_kill_before_every_single_file_operation_of_a_save(tmp_path: Path) -> None:
    subprocess.run([sys.executable, SCRIPT, "crash_points", tmp_path], env=ENVIRONMENT, check=True)
    roots = [path for path in tmp_path.iterdir() if path.name != "before"]
    assert len(roots) >= 30
    outcomes = set()
    for root in roots:
        store = CheckpointStore(root, keep=1)
        latest = store.latest()
        assert latest in (2, 3), f"{root}: {names(root)}"
        directory = store.path(latest)
        outcomes.add((latest, generation_of(directory, latest)))
        assert not any(mark in directory.name for mark in (".tmp-", ".deleted-"))
        assert latest == 3 or 2 in store.steps()

        # The next process goes on from there: no remains, and keep=1 counts what it finds (D16).
        store.save(3, lambda d: (d / "state.json").write_text("3"), {})
        best = store.best()
        store.prune()
        expected = ["step_000003"] if best is None else ["best.json", "step_000002", "step_000003"]
        assert names(root) == expected
    assert outcomes == {(2, "old"), (2, "new"), (3, "new")}
