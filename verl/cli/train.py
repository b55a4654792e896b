"""`verl sft`, `verl rm`, `verl ppo`: resolve the configuration, print the plan, train."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from verl.errors import ConfigError

Config = Annotated[
    str | None,
    typer.Argument(metavar="[CONFIG]", help="YAML file or preset; settings may follow or replace it."),
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
    app.command("sft")(sft)
    app.command("rm")(rm)
    app.command("ppo")(ppo)


def sft(
    config: Config = None, settings: Settings = None, resume: Resume = False, dry_run: DryRun = False
) -> None:
    """Fine-tune model.actor on the conversations of data.train."""
    run_stage("sft", config, settings or [], resume, dry_run)


def rm(
    config: Config = None, settings: Settings = None, resume: Resume = False, dry_run: DryRun = False
) -> None:
    """Train model.reward_model on the chosen/rejected pairs of data.train (Bradley-Terry)."""
    run_stage("rm", config, settings or [], resume, dry_run)


def ppo(
    config: Config = None, settings: Settings = None, resume: Resume = False, dry_run: DryRun = False
) -> None:
    """Train model.actor by PPO against model.reward_model on the prompts of data.train."""
    run_stage("ppo", config, settings or [], resume, dry_run)


def run_stage(
    stage: str, source: str | None, settings: list[str], resume: bool, dry_run: bool
) -> None:
    """Parse, print the plan, train."""
    from verl.config.load import load_config

    if source is not None and "=" in source:
        source, settings = None, [source, *settings]
    # A bare number can only be the step of `--resume STEP`: every setting has a `=`.
    steps = [word for word in settings if word.isdigit()]
    settings = [word for word in settings if not word.isdigit()]
    if len(steps) > 1 or (steps and not resume):
        raise ConfigError(f"{' '.join(steps)}: a number alone is only understood in `--resume STEP`")
    if source is None and resume:
        source = _saved_config(settings)
    resolved = load_config(source, settings)
    show_logs()
    print_plan(stage, resolved.config, full=dry_run)
    if dry_run:
        return
    from verl.trainer.base import train

    train(stage, resolved.config, int(steps[0]) if steps else resume, say=typer.echo)


def _saved_config(settings: list[str]) -> str | None:
    """The configuration saved in the run directory that `settings` name, if there is one."""
    folders = [word.partition("=")[2] for word in settings if word.startswith("run_dir=")]
    saved = Path(folders[-1]) / "config.yaml" if folders else None
    return str(saved) if saved is not None and saved.is_file() else None


def print_plan(stage: str, config, full: bool) -> None:  # type: ignore[no-untyped-def]
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
