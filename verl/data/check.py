"""Reads a data file as training would and reports everything that is wrong with it.

In: a file, a tokenizer, length limits. Out: a `CheckReport` with bad rows, lengths in tokens,
duplicates, and what each policy of `data.overlong` would do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.data.reading import scan_rows
from verl.data.schema import HINTS, KINDS, Kind, content_digest, kind_of, row_problems
from verl.errors import ConfigError, DataError, ModelError

#: What a kind's length limit applies to.
LIMITED: dict[Kind, tuple[str, ...]] = {
    "sft": ("conversation",),
    "rm": ("chosen", "rejected"),
    "rl": ("prompt",),
}


@dataclass
class OverlongOutcome:
    """What a limit does to the good rows of a file.

    Attributes:
        limit: tokens allowed.
        first: number of the first row that is too long, None when there is none.
        rows: rows that are too long.
        longest: tokens of the longest row.
        tokens_cut: tokens that `truncate_left` would take away.
    """

    limit: int
    first: int | None = None
    rows: int = 0
    longest: int = 0
    tokens_cut: int = 0

    def see(self, number: int, lengths: list[int]) -> None:
        """Take in the lengths (in tokens) of one row."""
        longest = max(lengths)
        self.longest = max(self.longest, longest)
        if longest > self.limit:
            self.first = self.first or number
            self.rows += 1
            self.tokens_cut += sum(max(0, length - self.limit) for length in lengths)


@dataclass
class CheckReport:
    """Findings about one file.

    Attributes:
        problems: (row number, reason) of the first `shown` bad rows.
        reasons: bad rows per reason, positions in lists left out.
        lengths: tokens of every good row, per part (prompt, chosen, rejected, conversation).
        duplicates: (row number, number of the earlier equal row).
    """

    path: Path
    kind: Kind
    overlong: OverlongOutcome
    rows: int = 0
    bad_rows: int = 0
    problems: list[tuple[int, str]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    duplicates: list[tuple[int, int]] = field(default_factory=list)

    @property
    def good_rows(self) -> int:
        """Rows that training could use."""
        return self.rows - self.bad_rows

    @property
    def ok(self) -> bool:
        """Whether there are rows and none is bad."""
        return self.rows > 0 and not self.bad_rows


def check_file(
    path: str | Path,
    tokenizer: Any,
    kind: Kind | None = None,
    seq_length: int = 1024,
    response_length: int = 256,
    shown: int = 20,
) -> CheckReport:
    """Check every row of `path` against the schema of `kind` and against `tokenizer`.

    Args:
        kind: told from the columns of the first readable row when None.
        seq_length: longest conversation; prompts of rl rows get seq_length - response_length.
        shown: bad rows kept with their reasons; all are counted.

    Raises:
        DataError: the file as a whole cannot be read, or its kind cannot be told.
        ConfigError: the limits leave no room for a prompt, or `kind` is unknown.
    """
    path = Path(path)
    kind = kind or _detect_kind(path)
    if kind not in KINDS:
        raise ConfigError(f"--kind {kind!r} is not one of {', '.join(KINDS)}")
    limit = seq_length - response_length if kind == "rl" else seq_length
    if limit < 1:
        raise ConfigError(
            f"seq_length {seq_length} leaves no room for a prompt beside response_length "
            f"{response_length}"
        )
    report = CheckReport(path, kind, OverlongOutcome(limit))
    seen: dict[bytes, int] = {}
    for number, row in scan_rows(path):
        report.rows += 1
        problems = _check_row(report, tokenizer, number, row)
        if problems:
            report.bad_rows += 1
            report.reasons.update({_reason(problem) for problem in problems})
            if len(report.problems) < shown:
                report.problems.append((number, "; ".join(problems)))
        elif not isinstance(row, DataError):
            earlier = seen.setdefault(content_digest(_identity(kind, row)), number)
            if earlier != number:
                report.duplicates.append((number, earlier))
    return report


def _detect_kind(path: Path) -> Kind:
    for number, row in scan_rows(path):
        if isinstance(row, DataError):
            continue
        kind = kind_of(row)
        if kind is None:
            hints = "; ".join(HINTS.values())
            raise DataError(
                f"{path}:{number}: columns {', '.join(sorted(row))} fit no kind of row: {hints}. "
                "Name the kind with --kind to see what is missing"
            )
        return kind
    raise DataError(f"{path}: has no readable row")


def _check_row(
    report: CheckReport, tokenizer: Any, number: int, row: Mapping[str, Any] | DataError
) -> list[str]:
    """Return the problems of a row, or take its lengths into the report."""
    if isinstance(row, DataError):
        return [str(row).removeprefix(f"{report.path}:{number}: ")]
    problems = row_problems(report.kind, row)
    if problems:
        return problems
    try:
        lengths = token_lengths(tokenizer, report.kind, row)
    except (ModelError, TypeError, ValueError) as error:
        # Templates that add message parts fail with TypeError where a part is missing.
        return [str(error)]
    for part, length in lengths.items():
        report.lengths.setdefault(part, []).append(length)
    report.overlong.see(number, [lengths[part] for part in LIMITED[report.kind]])
    return []


def token_lengths(tokenizer: Any, kind: Kind, row: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of each part of a valid row, counted as training counts them.

    Raises:
        ModelError: the chat template refuses the row or is missing.
    """
    from verl.models.chat import conversation_ids, prompt_ids, reward_ids

    if kind == "sft":
        return {"conversation": len(conversation_ids(tokenizer, row["messages"])[0])}
    lengths = {"prompt": len(prompt_ids(tokenizer, row["prompt"]))}
    if kind == "rm":
        for side in ("chosen", "rejected"):
            lengths[side] = len(reward_ids(tokenizer, row["prompt"], row[side]))
    return lengths


def _identity(kind: Kind, row: Mapping[str, Any]) -> Any:
    columns = {"sft": ("messages",), "rm": ("prompt", "chosen", "rejected"), "rl": ("prompt",)}
    return [row[column] for column in columns[kind]]


def _reason(problem: str) -> str:
    """A problem without the parts that differ from row to row, to count it under."""
    place, _, rest = problem.partition(": ")
    column = place.partition("[")[0]
    if problem.startswith("broken JSON"):
        return "broken JSON"
    text = rest or problem
    for mark in ("; did you mean", "; columns here", ", got ", " (byte "):
        text = text.partition(mark)[0]
    return f"{column}: {text}" if rest else text


@dataclass(frozen=True)
class LengthSummary:
    """Order statistics of token counts and a histogram of equal-width bins.

    Attributes:
        bins: (lowest, highest, rows) with both ends included.
    """

    count: int
    minimum: int
    median: int
    p95: int
    maximum: int
    bins: list[tuple[int, int, int]]


def summarise(lengths: list[int], max_bins: int = 10) -> LengthSummary:
    """Return the summary of a list of token counts that is not empty."""
    ordered = sorted(lengths)
    count, low, high = len(ordered), ordered[0], ordered[-1]
    width = -(-(high - low + 1) // max_bins)
    tally = Counter((length - low) // width for length in ordered)
    bins = [
        (low + width * i, min(high, low + width * (i + 1) - 1), tally[i])
        for i in range((high - low) // width + 1)
    ]
    at = [ordered[min(count - 1, int(share * count))] for share in (0.5, 0.95)]
    return LengthSummary(count, low, at[0], at[1], high, bins)
