"""`verl config`: the resolved tree with origins, the JSON schema, and explanations."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import typer

from verl.cli.train import PASS_THROUGH, is_setting

app = typer.Typer(no_args_is_help=True, help="Show, describe and explain settings and metrics.")


def split_source(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split `[CONFIG] key=value ...` into the file or preset, if one is given, and the overrides."""
    if arguments and not is_setting(arguments[0]):
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


@app.command(context_settings=PASS_THROUGH)
def show(
    arguments: list[str] = typer.Argument(
        None, metavar="[CONFIG] [key=value]...", help="A YAML file or preset, and overrides."
    ),
    changed: bool = typer.Option(False, "--changed", help="Leave out settings with their default."),
) -> None:
    """Print the resolved tree with the place every value came from."""
    from verl.config.load import DEFAULT, load_config, settings_of

    resolved = load_config(*split_source(arguments or []))
    rows = [
        (key, _text(value), resolved.origins[key])
        for key, value in settings_of(resolved.config)
        if not (changed and resolved.origins[key] == DEFAULT)
    ]
    for line in _tree(rows):
        typer.echo(line)


@app.command()
def schema() -> None:
    """Print the JSON schema of a configuration file, for completion in an editor."""
    from verl.config.explain import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def explain(
    key: str = typer.Argument(
        ..., help="A setting (train.ppo.kl_coef), a section (data) or a metric (kl/sequence_mean)."
    ),
) -> None:
    """Print what a setting, a section or a metric means."""
    if "/" in key:
        from verl.config.explain import explain_metric
        from verl.monitor.glossary import GLOSSARY

        typer.echo(explain_metric(key, GLOSSARY))
    else:
        from verl.config.explain import explain_setting

        typer.echo(explain_setting(key))


def _text(value: Any) -> str:
    """`value` as it is written in YAML, on one line."""
    from verl.config.yaml_tree import parse_yaml

    if isinstance(value, str) and re.fullmatch(r"[\w./-]+", value):
        plain, _ = parse_yaml(value, str)
        if plain == value:
            return value
    return json.dumps(value, ensure_ascii=False)


def _tree(rows: list[tuple[str, str, str]]) -> list[str]:
    """Lines `name: value  # origin`, indented by section, origins in one column."""
    lines: list[tuple[str, str]] = []
    open_sections: list[str] = []
    for key, value, origin in rows:
        *sections, name = key.split(".")
        shared = 0
        while shared < min(len(sections), len(open_sections)) and (
            sections[shared] == open_sections[shared]
        ):
            shared += 1
        for depth in range(shared, len(sections)):
            lines.append(("  " * depth + sections[depth] + ":", ""))
        open_sections = sections
        lines.append(("  " * len(sections) + f"{name}: {value}", origin))
    width = min(60, max((len(text) for text, origin in lines if origin), default=0))
    return [f"{text:<{width}}  # {origin}" if origin else text for text, origin in lines]
