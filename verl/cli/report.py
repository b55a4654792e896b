"""`verl report RUN`: write the report of a run and print what it concludes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the `report` command to `app`."""
    app.command("report")(report)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directory; several are compared."),
    ],
) -> None:
    """Write RUN/report.html and RUN/report.png (one file each, nothing is loaded from elsewhere).

    With several runs of one stage: comparison.html and comparison.png in the first directory.
    """
    from verl.monitor.report import build_report, judge, load_run

    path = build_report(runs)
    for directory in runs:
        run = load_run(directory)
        typer.echo(f"{run.name}: {judge(run).text()}")
    typer.echo(f"report: {path}")
