"""Read what a report needs from a run directory.

In: a run directory, finished or not. Out: `RunData`. Only JSON and YAML are read, never a model.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from verl.errors import RunDirectoryError
from verl.monitor.log import FILE_NAME, read_metrics

Stage = Literal["ppo", "sft", "rm"]
_SAMPLE_FILE = re.compile(r"step_(\d+)\.jsonl")


@dataclass(frozen=True)
class RunData:
    """A run as far as it has come.

    Attributes:
        directory: where it lies.
        stage: `ppo`, `sft` or `rm`, told from the metrics it logged.
        train, eval: records by kind, one per step, steps increasing.
        config: the resolved configuration, {} when there is none.
        config_text: the same as text, for display.
        samples: rows of the last samples file.
        samples_step: step of that file, None when there is none.
        notes: what could not be read and why.
    """

    directory: Path
    stage: Stage
    train: list[dict[str, Any]]
    eval: list[dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)
    samples_step: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.directory.resolve().name

    @property
    def last_step(self) -> int:
        """The newest step in any record."""
        return max(record["step"] for record in self.train + self.eval)

    def setting(self, key: str) -> Any:
        """The value at a dotted configuration key, None when it is not there."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def series(self, name: str, kind: str | None = None) -> tuple[list[int], list[float]]:
        """Steps and values of a metric; NaN where it was not finite.

        `kind` restricts to train or eval records; by default both are looked at.
        """
        records = {"train": self.train, "eval": self.eval}.get(kind or "", self.train + self.eval)
        points = [
            (record["step"], math.nan if record[name] is None else float(record[name]))
            for record in records
            if name in record
        ]
        return [step for step, _ in points], [value for _, value in points]

    def resumes(self) -> list[int]:
        """First train step of every segment but the first."""
        pairs = zip(self.train, self.train[1:], strict=False)
        return [later["step"] for earlier, later in pairs if earlier["segment"] < later["segment"]]


def load_run(directory: Path | str) -> RunData:
    """Read a run directory.

    Raises:
        RunDirectoryError: it has no metrics.jsonl, or an empty or damaged one; names it.
    """
    directory = Path(directory)
    path = directory / FILE_NAME
    if not path.is_file():
        what = "has no metrics.jsonl" if directory.is_dir() else "does not exist"
        raise RunDirectoryError(
            f"{directory}: {what}; name the directory of a run that `verl sft`, `verl rm` or "
            "`verl ppo` has started (run_dir in its configuration)"
        )
    try:
        records = read_metrics(directory)
    except ValueError as error:
        raise RunDirectoryError(str(error)) from error
    if not records:
        raise RunDirectoryError(f"{path}: no step has been logged yet; wait for the first one")
    notes: list[str] = []
    config, text = _read_config(directory / "config.yaml", notes)
    step, samples = _read_last_samples(directory / "samples", notes)
    return RunData(
        directory=directory,
        stage=_stage(records),
        train=[record for record in records if record["kind"] == "train"],
        eval=[record for record in records if record["kind"] == "eval"],
        config=config,
        config_text=text,
        samples=samples,
        samples_step=step,
        notes=tuple(notes),
    )


def _stage(records: list[dict[str, Any]]) -> Stage:
    names = {name for record in records for name in record}
    if any(name.startswith("sft/") for name in names) or "eval/perplexity" in names:
        return "sft"
    if any(name.startswith("rm/") for name in names) or "eval/accuracy" in names:
        return "rm"
    return "ppo"


def _read_config(path: Path, notes: list[str]) -> tuple[dict[str, Any], str]:
    import yaml

    if not path.is_file():
        notes.append("config.yaml is missing, so settings and alert limits are not shown.")
        return {}, ""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        notes.append(f"config.yaml could not be read: {error}")
        return {}, text
    return (config if isinstance(config, dict) else {}), text


def _read_last_samples(
    directory: Path, notes: list[str]
) -> tuple[int | None, list[dict[str, Any]]]:
    files = {
        int(match.group(1)): path
        for path in (directory.iterdir() if directory.is_dir() else ())
        if (match := _SAMPLE_FILE.fullmatch(path.name))
    }
    if not files:
        return None, []
    step = max(files)
    rows, damaged = [], 0
    for line in files[step].read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            damaged += 1
            continue
        if isinstance(row, dict):
            rows.append(row)
    if damaged:
        notes.append(f"{damaged} line(s) of {files[step].name} are not JSON and are left out.")
    rows.sort(key=lambda row: (row.get("index", 0), str(row.get("mode", ""))))
    return step, rows
