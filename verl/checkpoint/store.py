"""Checkpoints of one run as directories `step_000120`, each complete and durable or never chosen.

In: a callback that writes files into an empty directory. Out: that directory under its final
name with a manifest; afterwards the way back to it: latest, best, by step, verified.
One process writes to a root at a time (`RunDirectory.lock`); any number may read.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl.checkpoint.atomic import (
    fsync_directory,
    remove_entry,
    remove_stale_temporaries,
    stale_temporaries,
    temporary_sibling,
    write_json_atomic,
)
from verl.checkpoint.manifest import (
    build_manifest,
    hash_problems,
    look_of,
    plain_info,
    read_manifest,
    size_problems,
    write_manifest,
)
from verl.errors import CheckpointError

logger = logging.getLogger(__name__)

# `step_N.old-…` holds the earlier state of step N while a new one takes its place.
_NAME = re.compile(r"step_(\d{6,})(\.old-\d+-[0-9a-f]{8})?")


class CheckpointStore:
    """The checkpoints below `root`, of which `prune` keeps the newest `keep`."""

    def __init__(self, root: Path, keep: int) -> None:
        if keep < 1:
            raise CheckpointError(
                f"checkpoints to keep is {keep}; it must be at least 1, or {root} would lose all"
            )
        self.root = Path(root)
        self.keep = keep
        self._writing: set[Path] = set()
        # Directory → what its files looked like when their hashes were last found right.
        self._verified: dict[Path, tuple[Any, ...]] = {}

    def save(self, step: int, write: Callable[[Path], None], info: dict[str, Any]) -> Path:
        """Save one checkpoint and return its directory.

        An earlier checkpoint of the same step stays readable until the new one is durable, and
        stays as it is when both have the same manifest.

        Args:
            step: number of completed training steps, ≥ 0.
            write: writes the state as plain files into the directory it is given.
            info: small JSON facts for the manifest.

        Raises:
            CheckpointError: the content cannot be a checkpoint, or the disk refused it.
                Whatever `write` raises passes through, except `OSError`, which becomes a
                CheckpointError. In every case the earlier checkpoints are untouched.
        """
        if step < 0:
            raise CheckpointError(f"cannot save step {step}: a step is a count, 0 or more")
        final = self.root / _name(step)
        info = plain_info(info, final)
        try:
            return self._save(step, final, write, info)
        except OSError as error:
            raise CheckpointError(
                f"step {step} could not be saved as {final} ({error}); earlier checkpoints are "
                "untouched. Check the free space and the permissions there, then use --resume"
            ) from error

    def _save(
        self, step: int, final: Path, write: Callable[[Path], None], info: dict[str, Any]
    ) -> Path:
        if not self.root.is_dir():
            self.root.mkdir(parents=True, exist_ok=True)
            fsync_directory(self.root.parent)
        temporary = temporary_sibling(final)
        self._writing.add(temporary)
        try:
            temporary.mkdir()
            write(temporary)
            manifest = build_manifest(temporary, step, info)
            write_manifest(temporary, manifest)
            if not self._is_same(final, manifest):
                self._put_in_place(temporary, final)
        finally:
            if temporary.exists():
                remove_entry(temporary)
            self._writing.discard(temporary)
        self._verified[final] = look_of(final, manifest)
        return final

    def _is_same(self, final: Path, manifest: dict[str, Any]) -> bool:
        with suppress(CheckpointError):
            return read_manifest(final) == manifest and not self._problems(final, hashes=True)
        return False

    def _put_in_place(self, temporary: Path, final: Path) -> None:
        replaced = None
        if final.exists() or final.is_symlink():
            # A full directory cannot be renamed over; under its `.old-` name it is still found.
            replaced = temporary_sibling(final, "old")
            final.rename(replaced)
        temporary.rename(final)
        fsync_directory(self.root)
        if replaced is not None:
            self._discard(replaced)

    def steps(self) -> list[int]:
        """Return the complete steps, ascending: manifest intact, sizes match (no hashing)."""
        return sorted(self._complete())

    def latest(self) -> int | None:
        """Return the highest step whose every byte verifies, or None.

        Logs a warning for each newer directory that is incomplete or damaged.
        """
        complete = self._complete()
        chosen = None
        for step in sorted(complete, reverse=True):
            if not self._problems(complete[step], hashes=True):
                chosen = step
                break
        self._warn_about_skipped(-1 if chosen is None else chosen)
        return chosen

    def path(self, step: int) -> Path:
        """Return the directory of the complete checkpoint `step`.

        Raises:
            CheckpointError: there is none; the message names the steps there are.
        """
        complete = self._complete()
        if step not in complete:
            existing = ", ".join(map(str, sorted(complete))) or "none"
            found = self.verify(step) if (self.root / _name(step)).exists() else []
            detail = f" ({'; '.join(found)})" if found else ""
            raise CheckpointError(
                f"{self.root} has no complete checkpoint of step {step}{detail}; "
                f"complete steps: {existing}"
            )
        return complete[step]

    def info(self, step: int) -> dict[str, Any]:
        """Return the `info` that was saved with the complete checkpoint `step`."""
        info: dict[str, Any] = read_manifest(self.path(step))["info"]
        return info

    def verify(self, step: int) -> list[str]:
        """Read every byte of `step` and return what is wrong with it; empty means sound."""
        directory = self._complete().get(step, self.root / _name(step))
        return self._problems(directory, hashes=True, trust=False)

    def prune(self, protect: Collection[int] = ()) -> list[int]:
        """Delete complete checkpoints beyond the newest `keep`; return the deleted steps.

        Call it after a save. The best step, the steps in `protect` and at least one checkpoint
        whose every byte verifies stay. Damaged directories stay too, since only a person can say
        what they are worth; remains of killed saves go.
        """
        self._clean_up()
        complete = self._complete()
        newest_first = sorted(complete, reverse=True)
        best = self.best()
        kept = set(newest_first[: self.keep]) | set(protect) | ({best[0]} if best else set())
        for step in newest_first:
            kept.add(step)
            if not self._problems(complete[step], hashes=True):
                break
        removed = sorted(set(complete) - kept)
        for step in removed:
            self._discard(complete[step])
        return removed

    def discard_after(self, step: int) -> list[int]:
        """Delete the checkpoints newer than `step`; for a run that goes back to `step`.

        Otherwise a later resume would pick one of the abandoned steps as the latest. The record
        of the best step goes with it if it is one of them.

        Raises:
            CheckpointError: `step` does not verify, so nothing is deleted.
        """
        problems = self._problems(self.path(step), hashes=True)
        if problems:
            raise CheckpointError(f"cannot go back to step {step}: {'; '.join(problems)}")
        best = self.best()
        if best is not None and best[0] > step:
            (self.root / "best.json").unlink()
        newer = [(n, path) for n, path in self._directories() if n > step]
        for _, directory in newer:
            self._discard(directory)
        return sorted({n for n, _ in newer})

    def mark_best(self, step: int, metric: float) -> None:
        """Record `step` as the best so far, durably; it is then safe from `prune`.

        Raises:
            CheckpointError: `step` is not complete or `metric` is not finite.
        """
        self.path(step)
        if not math.isfinite(metric):
            raise CheckpointError(f"step {step} cannot be the best: its metric is {metric}")
        write_json_atomic(self.root / "best.json", {"step": step, "metric": metric})

    def best(self) -> tuple[int, float] | None:
        """Return (step, metric) of the best checkpoint, or None if none was marked.

        Raises:
            CheckpointError: best.json is damaged.
        """
        path = self.root / "best.json"
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_bytes())
            return int(content["step"]), float(content["metric"])
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error!r}); delete it to go on without a best checkpoint"
            ) from error

    def _directories(self) -> list[tuple[int, Path]]:
        """Return (step, directory) of everything that bears a checkpoint's name."""
        found = []
        for entry in sorted(self.root.iterdir()) if self.root.is_dir() else []:
            match = _NAME.fullmatch(entry.name)
            if match and entry.is_dir() and entry.name.startswith(_name(int(match.group(1)))):
                found.append((int(match.group(1)), entry))
        return found

    def _complete(self) -> dict[int, Path]:
        """Return the directory of each complete step; `step_N` comes before `step_N.old-…`."""
        complete: dict[int, Path] = {}
        for step, directory in self._directories():
            if step not in complete and not self._problems(directory, hashes=False):
                complete[step] = directory
        return complete

    def _problems(self, directory: Path, hashes: bool, trust: bool = True) -> list[str]:
        """Compare `directory` with its manifest.

        Args:
            hashes: also compare the content; skipped for a directory whose files have the same
                inodes, sizes and times as when this object last found them right.
            trust: False reads the content in any case.
        """
        try:
            manifest = read_manifest(directory)
            step = int(_NAME.fullmatch(directory.name).group(1))  # type: ignore[union-attr]
            if manifest["step"] != step:
                return [f"{directory} holds step {manifest['step']}; it was renamed"]
            problems = size_problems(directory, manifest)
            if problems or not hashes:
                return problems
            look = look_of(directory, manifest)
            if trust and self._verified.get(directory) == look:
                return []
            problems = hash_problems(directory, manifest)
        except (CheckpointError, OSError) as error:
            return [str(error)]
        if not problems:
            self._verified[directory] = look
        return problems

    def _warn_about_skipped(self, chosen: int) -> None:
        for step, directory in self._directories():
            problems = self._problems(directory, hashes=True) if step > chosen else []
            if problems:
                logger.warning("skipping checkpoint %s: %s", directory, "; ".join(problems))
        for directory in stale_temporaries(self.root, self._writing):
            match = re.match(r"step_(\d+)\.tmp-", directory.name)
            if match and int(match.group(1)) > chosen:
                logger.warning("skipping checkpoint %s: its save did not finish", directory)

    def _clean_up(self) -> None:
        """Finish what a killed save or prune left: put back or drop `.old-`, drop the rest."""
        remove_stale_temporaries(self.root, self._writing)
        complete = self._complete()
        for step, directory in self._directories():
            final = self.root / _name(step)
            if directory == final:
                continue
            if complete.get(step) == directory:
                if final.exists():
                    self._discard(final)
                directory.rename(final)
                fsync_directory(self.root)
            else:
                self._discard(directory)

    def _discard(self, directory: Path) -> None:
        # The rename makes the removal one step: no half-deleted checkpoint keeps its name.
        doomed = temporary_sibling(self.root / directory.name.split(".")[0], "deleted")
        directory.rename(doomed)
        fsync_directory(self.root)
        remove_entry(doomed)
        self._verified.pop(directory, None)


def _name(step: int) -> str:
    return f"step_{step:06d}"
