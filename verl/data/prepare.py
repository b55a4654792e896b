"""From a source of preferences or prompts to split files: convert, split, deduplicate, write.

In: sources and a converter. Out: the files of DIR and a `PrepareReport` that accounts for
every row read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from verl.data import convert_hh, convert_preferences, convert_prompts
from verl.data.pairs import Malformed, Pair, require_columns
from verl.data.reading import open_source
from verl.data.schema import Kind, Message, content_digest
from verl.data.split import SPLITS, PromptSplit, Split
from verl.data.write import SplitWriter, refuse_output
from verl.errors import DataError

_SHOWN_ROWS = 5


@dataclass(frozen=True)
class Layout:
    """A kind of source: how its rows are converted and which files come out.

    Attributes:
        name: the subcommand of `verl prepare`.
        convert: row -> `Pair`, or -> messages of a prompt; raises `Malformed`.
        columns: what the first row must have (a function, since layouts may share a column).
        kinds: the files written.
        ability: the `ability` of its rl rows.
    """

    name: str
    convert: Callable[[Mapping[str, Any]], Pair | list[Message]]
    columns: Callable[[Mapping[str, Any]], tuple[str, ...]]
    kinds: tuple[Kind, ...]
    ability: str


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("hh-rlhf", convert_hh.convert_row, lambda row: convert_hh.COLUMNS,
               ("sft", "rm", "rl"), "dialogue"),
        Layout("preferences", convert_preferences.convert_row,
               lambda row: convert_preferences.COLUMNS, ("sft", "rm", "rl"), "general"),
        Layout("prompts", convert_prompts.convert_row,
               lambda row: (convert_prompts.column_of(row),), ("rl",), "general"),
    )
}  # fmt: skip


@dataclass
class PrepareReport:
    """What became of every row: `read` = `kept` + all of `dropped`.

    Attributes:
        dropped: rows left out, per reason.
        examples: places (file:row) of the first rows per reason.
        duplicates: rows left out of one kind of file because it has them already.
        files: rows per file, such as {"rm/train": 1346}.
        out: the folder written.
    """

    out: Path
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    duplicates: Counter[str] = field(default_factory=Counter)
    files: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        """Count a malformed row."""
        self.dropped[reason] += 1
        if self.dropped[reason] <= _SHOWN_ROWS:
            self.examples.setdefault(reason, []).append(where)


def prepare(
    layout: Layout,
    sources: list[str],
    out: Path,
    *,
    split: str = "train",
    test_fraction: float = 0.1,
    seed: int = 0,
    limit: int | None = None,
    force: bool = False,
) -> PrepareReport:
    """Convert `sources` and write the split files into the folder `out`, all or nothing.

    Args:
        split: which split of a hub data set is read.
        test_fraction: expected share of prompts in the test files; 0 writes train files only.
        seed: draws the test prompts.
        limit: read only the first rows.
        force: replace an earlier output of this command.

    Raises:
        DataError: a source cannot be read, no row is left, or `out` cannot be written.
        ConfigError: `test_fraction` is out of range.
    """
    refuse_output(out, force, sources)
    chooser = PromptSplit.of_fraction(test_fraction, seed)
    may_repair = True
    while True:
        with SplitWriter(out) as writer:
            rows = islice(_numbered(sources, split), limit)
            report = _convert_all(layout, rows, chooser, writer, out)
            repaired = chooser.repaired() if may_repair else None
            if repaired is None:
                writer.commit(_manifest(layout, sources, test_fraction, seed, limit, report))
                return report
        # Only a handful of prompts can all fall on one side: reading them again costs nothing.
        chooser, may_repair = repaired, False


def _numbered(sources: list[str], split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    def one(source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        return ((f"{source}:{number}", row) for number, row in open_source(source, split))

    return chain.from_iterable(map(one, sources))


def _convert_all(
    layout: Layout,
    rows: Iterator[tuple[str, Mapping[str, Any]]],
    chooser: PromptSplit,
    writer: SplitWriter,
    out: Path,
) -> PrepareReport:
    report = PrepareReport(out)
    for kind in layout.kinds:
        for split in SPLITS if chooser.threshold else SPLITS[:1]:
            writer.open_file(kind, split)
    sink = _Sink(layout, writer, report)
    for where, row in rows:
        if not report.read:
            require_columns(row, layout.columns(row), where)
        report.read += 1
        try:
            converted = layout.convert(row)
        except Malformed as error:
            report.drop(str(error), where)
            continue
        report.kept += 1
        prompt = converted.prompt if isinstance(converted, Pair) else converted
        sink.add(converted, prompt, chooser(prompt))
    report.files = dict(writer.rows)
    if not report.kept:
        raise DataError(f"no row left to write: {_account(report)}")
    return report


def _account(report: PrepareReport) -> str:
    if not report.read:
        return "the source has no rows"
    reasons = (
        f"{count} {reason} (e.g. {report.examples[reason][0]})"
        for reason, count in report.dropped.most_common()
    )
    return f"{report.read} read, dropped: {'; '.join(reasons)}"


class _Sink:
    """Turns a converted row into rows of the three kinds, each distinct row once."""

    def __init__(self, layout: Layout, writer: SplitWriter, report: PrepareReport) -> None:
        self.layout, self.writer, self.report = layout, writer, report
        self.seen: dict[str, set[bytes]] = {kind: set() for kind in layout.kinds}

    def add(self, converted: Pair | list[Message], prompt: list[Message], split: Split) -> None:
        if isinstance(converted, Pair):
            pair = {"prompt": prompt, "chosen": converted.chosen, "rejected": converted.rejected}
            if self.is_new("rm", pair):
                self.writer.add("rm", split, {**pair, "margin": converted.margin})
            messages = [*prompt, *converted.chosen]
            if self.is_new("sft", messages):
                self.writer.add("sft", split, {"messages": messages})
        if self.is_new("rl", prompt):
            self.writer.add("rl", split, self.rl_row(prompt, split))

    def is_new(self, kind: Kind, content: Any) -> bool:
        digest = content_digest(content)
        if digest in self.seen[kind]:
            self.report.duplicates[kind] += 1
            return False
        self.seen[kind].add(digest)
        return True

    def rl_row(self, prompt: list[Message], split: Split) -> dict[str, Any]:
        return {
            "data_source": self.layout.name,
            "prompt": prompt,
            "ability": self.layout.ability,
            "reward_model": {"style": "model", "ground_truth": ""},
            "extra_info": {"split": split, "index": self.writer.rows[f"rl/{split}"]},
        }


def _manifest(
    layout: Layout,
    sources: list[str],
    test_fraction: float,
    seed: int,
    limit: int | None,
    report: PrepareReport,
) -> dict[str, Any]:
    """How the folder was made, so that it can be made again."""
    return {
        "command": f"verl prepare {layout.name}",
        "sources": sources,
        "test_fraction": test_fraction,
        "seed": seed,
        "limit": limit,
        "rows_read": report.read,
        "rows_kept": report.kept,
        "dropped": dict(report.dropped),
        "duplicates": dict(report.duplicates),
        "files": report.files,
    }
