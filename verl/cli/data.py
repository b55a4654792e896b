"""`verl data check`: is this file fit for training with this model?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from verl.data.check import CheckReport, LengthSummary

app = typer.Typer(help="Look into data files.", no_args_is_help=True)

_BAR_WIDTH = 40
_SHOWN_DUPLICATES = 5


@app.callback()
def _group() -> None:
    """Look into data files."""


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="A .jsonl, .jsonl.gz or .parquet file.")],
    model: Annotated[str, typer.Option("--model", help="Whose tokenizer: hub id or folder.")],
    kind: Annotated[
        str | None, typer.Option(help="sft, rm or rl. Default: told from the columns.")
    ] = None,
    seq_length: Annotated[
        int, typer.Option(min=2, help="data.seq_length: longest prompt + response, in tokens.")
    ] = 1024,
    response_length: Annotated[
        int, typer.Option(min=1, help="data.response_length, in tokens.")
    ] = 256,
    chat_template: Annotated[
        str | None, typer.Option(help="`chatml`, `plain` or a Jinja file; for models without one.")
    ] = None,
    gguf_file: Annotated[
        str | None, typer.Option(help="Name of the GGUF file inside the model folder.")
    ] = None,
) -> None:
    """Check every row against the schema and the tokenizer; exit code 2 when a row is bad."""
    from rich.console import Console

    from verl.data.check import check_file
    from verl.data.reading import file_form
    from verl.models.chat import load_tokenizer

    file_form(file)  # A missing file is told before the tokenizer is loaded.
    tokenizer = load_tokenizer(model, gguf_file=gguf_file, chat_template=chat_template)
    report = check_file(file, tokenizer, kind, seq_length, response_length)  # type: ignore[arg-type]
    _print_report(report, Console(highlight=False, markup=False, soft_wrap=True))
    if not report.ok:
        raise typer.Exit(2)


def _print_report(report: CheckReport, console: Any) -> None:
    from verl.data.check import summarise

    console.print(
        f"{report.path}: {report.rows} {report.kind} rows, {report.good_rows} good, "
        f"{report.bad_rows} bad, {len(report.duplicates)} duplicates"
    )
    if not report.rows:
        console.print("  the file has no rows")
    for number, problem in report.problems:
        console.print(f"  row {number}: {problem}")
    if report.bad_rows > len(report.problems):
        console.print(f"  … and {report.bad_rows - len(report.problems)} more bad rows")
    if report.reasons:
        console.print("Bad rows per reason:")
        for reason, count in report.reasons.most_common():
            console.print(f"  {count:>6}  {reason}")
    if report.duplicates:
        shown = report.duplicates[:_SHOWN_DUPLICATES]
        pairs = ", ".join(f"row {number} = row {earlier}" for number, earlier in shown)
        more = ", …" if len(report.duplicates) > len(shown) else ""
        console.print(f"Duplicates: {pairs}{more}")
    for part, lengths in report.lengths.items():
        _print_lengths(part, summarise(lengths), console)
    if report.good_rows:
        _print_limits(report, console)


def _print_lengths(part: str, summary: LengthSummary, console: Any) -> None:
    console.print(
        f"Tokens, {part}: min {summary.minimum}, median {summary.median}, p95 {summary.p95}, "
        f"max {summary.maximum}"
    )
    tallest = max(rows for _, _, rows in summary.bins)
    width = len(str(summary.maximum))
    for low, high, rows in summary.bins:
        bar = "#" * -(-_BAR_WIDTH * rows // tallest)
        console.print(f"  {low:>{width}}-{high:<{width}} {bar:<{_BAR_WIDTH}} {rows}")


def _print_limits(report: CheckReport, console: Any) -> None:
    over = report.overlong
    what = "prompt" if report.kind == "rl" else "conversation"
    if not over.rows:
        console.print(f"Every {what} fits the limit of {over.limit} tokens.")
        return
    console.print(
        f"Longer than the limit of {over.limit} tokens: {over.rows} of {report.good_rows} rows "
        f"(longest {over.longest}, first at row {over.first}). data.overlong would:"
    )
    console.print("  error          stop before the first step")
    console.print(f"  drop           train on {report.good_rows - over.rows} rows")
    console.print(
        f"  truncate_left  train on {report.good_rows} rows, cutting {over.tokens_cut} tokens"
    )
