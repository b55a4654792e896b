"""metrics.jsonl: the local record of a run, complete whatever happens to other trackers.

In: metrics per step. Out: one JSON line each, flushed at once; readers see every step once even
when a killed run left steps behind that a resumed one did again.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from verl.checkpoint.atomic import fsync_directory, write_bytes_atomic
from verl.monitor.glossary import GLOSSARY, unknown_metric_message

FILE_NAME = "metrics.jsonl"
Kind = Literal["train", "eval"]


class Sink(Protocol):
    """What a metric log needs of a tracker; see `verl.monitor.trackers`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step; must neither block nor raise."""

    def close(self) -> None:
        """Write what is pending."""


class MetricLog:
    """Append-only writer of metrics.jsonl that also feeds the trackers."""

    def __init__(
        self,
        run_dir: Path | str,
        segment: int = 0,
        trackers: Iterable[Sink] = (),
        *,
        after_step: int | None = None,
    ) -> None:
        """Open the file of `run_dir`, removing a torn last line that a kill left.

        Args:
            segment: 0 for a new run, one more on each resume (`next_segment`).
            after_step: on resume, the step of the checkpoint. Records of later steps are taken
                out: those steps will be done again and must stand in the file once.
        """
        if segment < 0:
            raise ValueError(f"segment is {segment}; it counts resumes and starts at 0")
        self.path = Path(run_dir) / FILE_NAME
        self.segment = segment
        self._trackers = list(trackers)
        self._last: dict[str, int] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _repair(self.path, after_step)
        # Unbuffered and appended in one write: a kill tears the last line at most.
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        fsync_directory(self.path.parent)

    def log(self, step: int, kind: Kind, metrics: Mapping[str, float]) -> None:
        """Write one line and hand the metrics to the trackers.

        Args:
            step: larger than the last step of this `kind`.
            kind: `train` or `eval`.
            metrics: name -> number (or a tensor of one element); names from the glossary.

        Raises:
            ValueError: unknown kind or metric name, a step that does not increase, or a value
                that is no number.
        """
        if kind not in ("train", "eval"):
            raise ValueError(f"kind of record is {kind!r}; it must be 'train' or 'eval'")
        last = self._last.get(kind)
        if last is not None and step <= last:
            raise ValueError(f"{kind} step {step} logged after step {last}; steps must increase")
        values = {name: _number(name, value) for name, value in metrics.items()}
        record: dict[str, Any] = {
            "step": int(step),
            "kind": kind,
            "segment": self.segment,
            "time": time.time(),
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
        }
        non_finite = [name for name, value in values.items() if not math.isfinite(value)]
        if non_finite:
            record["non_finite"] = non_finite
        self._file.write((json.dumps(record, allow_nan=False) + "\n").encode("utf-8"))
        self._last[kind] = int(step)
        for tracker in self._trackers:
            tracker.log(int(step), values)

    def sync(self) -> None:
        """Make everything logged so far durable; call it before a checkpoint is complete."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file and the trackers; the log cannot be used afterwards."""
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> MetricLog:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """Return the records of a run, each (kind, step) once, in the order of their steps.

    A torn last line is left out. Where a resumed segment starts at step s, records of earlier
    segments from s on are superseded. A missing file gives an empty list.

    Raises:
        ValueError: a line before the last one is not a JSON object; names file and line.
    """
    path = Path(run_dir) / FILE_NAME
    if not path.exists():
        return []
    return _without_superseded(_parse_lines(path))


def next_segment(run_dir: Path | str) -> int:
    """The segment number a run started or resumed now should use."""
    path = Path(run_dir) / FILE_NAME
    segments = [record["segment"] for record in _parse_lines(path)] if path.exists() else []
    return max(segments, default=-1) + 1


def _number(name: str, value: Any) -> float:
    if name not in GLOSSARY:
        raise ValueError(unknown_metric_message(name))
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {name!r} is {value!r}; it must be a number") from error


def _parse_lines(path: Path) -> list[dict[str, Any]]:
    return [record for _, record in _lines_and_records(path)]


def _lines_and_records(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Every complete line with the record it holds."""
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _parse(line)
        if record is not None:
            records.append((line, record))
        elif number < len(lines):  # The last element has no newline after it: it may be torn.
            raise ValueError(
                f"{path}, line {number}: not a metrics record (a JSON object with step, kind and "
                "segment); remove the line to go on without it"
            )
    return records


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    complete = isinstance(record, dict) and {"step", "kind", "segment"} <= record.keys()
    return record if complete else None


def _without_superseded(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Walk from the newest segment to the oldest, keeping what lies before its successors."""
    kept: dict[tuple[str, int], dict[str, Any]] = {}
    redone = {"train": math.inf, "eval": math.inf}
    for segment in sorted({record["segment"] for record in records}, reverse=True):
        own = [record for record in records if record["segment"] == segment]
        for record in own:
            if record["step"] < redone[record["kind"]]:
                kept[record["kind"], record["step"]] = record
        for record in own:
            # Training step s again makes the old evaluation of s void; an evaluation of the
            # checkpoint that a resume starts from does not undo that checkpoint's training step.
            for kind in ("eval",) if record["kind"] == "eval" else ("train", "eval"):
                redone[kind] = min(redone[kind], record["step"])
    # The evaluation of step n describes the policy after train step n.
    return sorted(kept.values(), key=lambda record: (record["step"], record["kind"] == "eval"))


def _repair(path: Path, after_step: int | None) -> None:
    """Drop a torn last line and records after `after_step`; rewrite only if something changes."""
    if not path.exists():
        return
    kept = [
        line
        for line, record in _lines_and_records(path)
        if after_step is None or record["step"] <= after_step
    ]
    wanted = b"".join(line + b"\n" for line in kept)
    if wanted != path.read_bytes():
        write_bytes_atomic(path, wanted)
