"""Entry of the `verl` command: the table of commands, and how errors become exit codes.

A command's module is imported when that command runs, so `verl --help` stays instant. A module
offers its command as `app` (a typer application) or adds it in `register(app)`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import verl
from verl.errors import VerlError

#: Command, in the order of the path from preferences to an aligned model: its module and its help.
COMMANDS: dict[str, tuple[str, str]] = {
    "quickstart": (
        "verl.cli.quickstart",
        "The whole path on this machine, from data to report.",
    ),
    "prepare": ("verl.cli.prepare", "Turn preference or prompt files into the three data splits."),
    "data": ("verl.cli.data", "Look at data files before training on them."),
    "sft": ("verl.cli.train", "Fine-tune a base model on the chosen answers."),
    "rm": ("verl.cli.train", "Train a reward model on chosen and rejected answers."),
    "ppo": ("verl.cli.train", "Train a policy against a reward model."),
    "generate": ("verl.cli.evaluate", "Answer prompts with a model."),
    "eval": ("verl.cli.evaluate", "Score a run or a model on held-out prompts."),
    "report": ("verl.cli.report", "Write the HTML report of runs."),
    "export": ("verl.cli.evaluate", "Save a checkpoint in Hugging Face format."),
    "config": ("verl.cli.config", "Show, describe and explain settings and metrics."),
    "doctor": ("verl.cli.doctor", "Check whether this machine can run the main job."),
}


def load_command(name: str) -> Any:
    """Import the module of command `name` and return its click command."""
    module = importlib.import_module(COMMANDS[name][0])
    shelf = typer.Typer(add_completion=False, rich_markup_mode=None)
    if hasattr(module, "register"):
        module.register(shelf)
    else:
        shelf.add_typer(module.app, name=name)
    return typer.main.get_group(shelf).commands[name]


class LazyGroup(TyperGroup):
    """Lists commands from the table and imports only the one that runs."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, text) in COMMANDS.items():
            self.add_command(TyperCommand(name=name, help=text, callback=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Replace the listed command by the real one."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name and found else None, rest


app = typer.Typer(
    cls=LazyGroup,
    name="verl",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"verl {verl.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
    traceback: bool = typer.Option(
        False, "--traceback", help="Show where in the code an error arose (also VERL_TRACEBACK=1)."
    ),
) -> None:
    """From human preferences to an aligned language model.

    Exit codes: 0 done; 2 usage, configuration or data; 3 environment or placement; 4 training
    stopped by an alert or non-finite steps; 130 interrupted (state saved).
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `verl` with `arguments` (default: the command line) and exit with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Accepted anywhere, because it is added to the end of a command that has just failed.
    traceback = "--traceback" in given or os.environ.get("VERL_TRACEBACK", "0") not in ("", "0")
    given = [argument for argument in given if argument != "--traceback"]
    try:
        typer.main.get_command(app).main(args=given, prog_name="verl")
    except VerlError as error:
        if traceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
