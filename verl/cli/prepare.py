"""`verl prepare …`: preferences or prompts to the files that training reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from verl.data.prepare import PrepareReport

app = typer.Typer(help="Make training files from preferences or prompts.", no_args_is_help=True)

Sources = Annotated[
    list[str],
    typer.Argument(metavar="SOURCE...", help="Files (.jsonl, .jsonl.gz, .parquet) or hub ids."),
]
Out = Annotated[Path, typer.Option("--out", help="Folder to write; all of it or nothing.")]
HubSplit = Annotated[str, typer.Option("--split", help="Split of a hub data set to read.")]
TestFraction = Annotated[
    float, typer.Option("--test-fraction", help="Share of the prompts held out; 0 for none.")
]
Seed = Annotated[int, typer.Option("--seed", help="Another seed holds out other prompts.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Read only the first rows.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an earlier output in --out.")]


@app.command("hh-rlhf")
def hh_rlhf(
    source: Sources,
    out: Out,
    split: HubSplit = "train",
    test_fraction: TestFraction = 0.1,
    seed: Seed = 0,
    limit: Limit = None,
    force: Force = False,
) -> None:
    """Transcripts `chosen` and `rejected` with Human: and Assistant: paragraphs."""
    _run("hh-rlhf", source, out, split, test_fraction, seed, limit, force)


@app.command("preferences")
def preferences(
    source: Sources,
    out: Out,
    split: HubSplit = "train",
    test_fraction: TestFraction = 0.1,
    seed: Seed = 0,
    limit: Limit = None,
    force: Force = False,
) -> None:
    """`chosen` and `rejected` as text, messages or conversations, with or without `prompt`."""
    _run("preferences", source, out, split, test_fraction, seed, limit, force)


@app.command("prompts")
def prompts(
    source: Sources,
    out: Out,
    split: HubSplit = "train",
    test_fraction: TestFraction = 0.1,
    seed: Seed = 0,
    limit: Limit = None,
    force: Force = False,
) -> None:
    """`prompt` as text or messages, or `messages`; writes rl files only."""
    _run("prompts", source, out, split, test_fraction, seed, limit, force)


def _run(
    layout: str,
    sources: list[str],
    out: Path,
    split: str,
    test_fraction: float,
    seed: int,
    limit: int | None,
    force: bool,
) -> None:
    from rich.console import Console

    from verl.data.prepare import LAYOUTS, prepare

    report = prepare(
        LAYOUTS[layout],
        sources,
        out,
        split=split,
        test_fraction=test_fraction,
        seed=seed,
        limit=limit,
        force=force,
    )
    _print_report(report, Console(highlight=False, markup=False, soft_wrap=True))


def _print_report(report: PrepareReport, console: Any) -> None:
    lines = [("rows read", report.read, ""), ("kept", report.kept, "")]
    for reason, count in report.dropped.most_common():
        places = ", ".join(report.examples[reason][:3])
        lines.append((f"dropped: {reason}", count, f"at {places}"))
    for kind, count in sorted(report.duplicates.items()):
        lines.append((f"duplicates left out of {kind}", count, ""))
    for name, rows in report.files.items():
        lines.append((f"{name}.parquet", rows, ""))
    width = max(len(label) for label, _, _ in lines)
    for label, count, note in lines:
        console.print(f"{label:<{width}}  {count:>7}  {note}".rstrip())
    console.print(f"Written to {report.out}. Next:")
    console.print("  " + _next_command(report))


def _next_command(report: PrepareReport) -> str:
    kind, stage = ("sft", "sft") if "sft/train" in report.files else ("rl", "ppo")
    folder = report.out / kind
    command = f"verl {stage} CONFIG.yaml data.train={folder / 'train.parquet'}"
    if f"{kind}/test" in report.files:
        command += f" data.eval={folder / 'test.parquet'}"
    return command
