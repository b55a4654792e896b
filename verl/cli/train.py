"""`verl sft`, `verl rm`, `verl ppo`: resolve the configuration, print the plan, train."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl.errors import ConfigError, RunDirectoryError

if TYPE_CHECKING:
    from verl.config.schema import Config as ConfigTree

#: Lets `--train.seed=1` and `+train.seed=1` reach the loader, whose error names the right spelling.
PASS_THROUGH = {"ignore_unknown_options": True}

Config = Annotated[
    str | None,
    typer.Argument(
        metavar="[CONFIG]", help="YAML file or preset; settings may follow or replace it."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings over the file, e.g. train.seed=1."),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue the run in run_dir from its latest complete checkpoint; "
        "`--resume STEP` goes back to that step.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved configuration and the plan, and stop.")
]


def register(app: typer.Typer) -> None:
    """Add the three training commands to `app`."""
    for command in (sft, rm, ppo):
        app.command(command.__name__, context_settings=PASS_THROUGH)(command)


def sft(
    config: Config = None,
    settings: Settings = None,
    resume: Resume = False,
    dry_run: DryRun = False,
) -> None:
    """Fine-tune model.actor on the conversations of data.train."""
    run_stage("sft", config, settings or [], resume, dry_run)


def rm(
    config: Config = None,
    settings: Settings = None,
    resume: Resume = False,
    dry_run: DryRun = False,
) -> None:
    """Train model.reward_model on the chosen/rejected pairs of data.train (Bradley-Terry)."""
    run_stage("rm", config, settings or [], resume, dry_run)


def ppo(
    config: Config = None,
    settings: Settings = None,
    resume: Resume = False,
    dry_run: DryRun = False,
) -> None:
    """Train model.actor by PPO against model.reward_model on the prompts of data.train."""
    run_stage("ppo", config, settings or [], resume, dry_run)


def run_stage(
    stage: str, source: str | None, settings: list[str], resume: bool, dry_run: bool
) -> None:
    """Parse, print the plan, train."""
    from verl.config.load import load_config

    source, settings, step = sort_words(source, settings, resume)
    if source is None and resume:
        source = _saved_config(settings)
    resolved = load_config(source, settings)
    show_logs()
    print_plan(stage, resolved.config, full=dry_run)
    if dry_run:
        return
    from verl.trainer.base import train

    train(stage, resolved.config, resume if step is None else step, say=typer.echo)


def is_setting(word: str) -> bool:
    """Whether a word of the command line is `key=value`, or an option-like try at one.

    A file's path may hold a `=` too, behind a slash or a backslash.
    """
    return re.match(r"[-+~]|[^/\\]*=", word) is not None


def sort_words(
    source: str | None, settings: list[str], resume: bool
) -> tuple[str | None, list[str], int | None]:
    """Tell the words of a command line apart, in whatever order they came.

    Returns:
        The configuration file or preset, the settings, and the step of `--resume STEP`. A bare
        number can only be that step: every setting has a `=`.

    Raises:
        ConfigError: two files, two steps, or a step without --resume.
    """
    words = settings if source is None else [source, *settings]
    steps = [word for word in words if word.isdigit()]
    assignments = [word for word in words if is_setting(word)]
    files = [word for word in words if not word.isdigit() and not is_setting(word)]
    if len(steps) > 1 or (steps and not resume):
        raise ConfigError(
            f"{' '.join(steps)}: a number alone is only understood in `--resume STEP`"
        )
    if len(files) > 1:
        raise ConfigError(
            f"{files[1]!r} has no '='; write KEY=VALUE (the configuration is already {files[0]!r})"
        )
    return (
        files[0] if files else None,
        assignments,
        int(steps[0]) if steps else None,
    )


def _saved_config(settings: list[str]) -> str | None:
    """The configuration saved in the run directory (that of `settings`, or the default).

    Raises:
        RunDirectoryError: there is none, and `settings` name nothing else to start from.
    """
    from verl.config.schema import get_default_config

    folders = [word.partition("=")[2] for word in settings if word.startswith("run_dir=")]
    folder = Path(folders[-1] if folders else get_default_config().run_dir)
    saved = folder / "config.yaml"
    if saved.is_file():
        return str(saved)
    if len(folders) == len(settings):
        raise RunDirectoryError(f"nothing to resume: {folder} holds no run; set run_dir to one")
    return None


def print_plan(stage: str, config: ConfigTree, full: bool) -> None:
    """The resolved settings that differ from the defaults (all with `full`), then the plan."""
    from verl.config.check import check
    from verl.config.load import settings_of
    from verl.config.schema import get_default_config
    from verl.trainer.plan import plan_lines

    for warning in check(config, stage):
        typer.echo(f"warning: {warning}", err=True)
    defaults = dict(settings_of(get_default_config()))
    typer.echo("settings" if full else "settings that differ from the defaults")
    for key, value in settings_of(config):
        if full or value != defaults.get(key):
            typer.echo(f"  {key} = {value}")
    for line in plan_lines(config, stage):
        typer.echo(line)


def show_logs() -> None:
    """Send warnings of the package to stderr, one line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    package = logging.getLogger("verl")
    if not package.handlers:
        package.addHandler(handler)
        package.propagate = False
    package.setLevel(logging.INFO)
