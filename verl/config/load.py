"""From a preset or YAML file and `a.b.c=value` overrides to one checked tree.

In: the name of a file or preset and the overrides of a command line. Out: the configuration and,
for every setting, where its value came from. Later sources win: defaults, file, overrides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from verl.config.check import check
from verl.config.keys import accepts_null, missing_key, section_of
from verl.config.schema import Config
from verl.config.section import Section, describe_validation_error
from verl.config.yaml_tree import dump_yaml, parse_yaml
from verl.errors import ConfigError

__all__ = ["Resolved", "as_config", "check", "load_config", "preset_names", "resolved_text"]

PRESETS = Path(__file__).parent / "presets"
DEFAULT = "default"
COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Resolved:
    """A checked tree; `origins` maps every dotted setting to `default`, `FILE:LINE` or `command line`."""

    config: Config
    origins: dict[str, str]


def load_config(source: str | None = None, overrides: Sequence[str] = ()) -> Resolved:
    """Resolve defaults, then `source`, then `overrides`.

    Args:
        source: path of a YAML file, or the name of a preset; None for the defaults alone.
        overrides: `a.b.c=value` texts; the value is YAML, a later one wins, and `null` takes the
            setting back to its default (or to "off" where the setting can be off).

    Raises:
        ConfigError: naming the key, the nearest real key where it is unknown, and `FILE:LINE`.
    """
    tree: dict[str, Any] = {}
    places: dict[str, str] = {}
    if source is not None:
        tree, places = _read(source)
    for override in overrides:
        _apply(tree, places, override)
    tree = _completed(tree, Config)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        text = describe_validation_error(error, "", Config, origin=lambda key: _place(key, places))
        raise ConfigError(text) from None
    origins = {
        key: places.get(key, DEFAULT) if _holds(tree, key) else DEFAULT
        for key, _ in settings_of(config)
    }
    return Resolved(config, origins)


def as_config(settings: Config | Mapping[str, Any]) -> Config:
    """Return the tree itself, or the defaults with the settings of a nested mapping over them.

    Raises:
        ConfigError: an unknown key or a value of the wrong type.
    """
    if isinstance(settings, Config):
        return settings
    try:
        return Config.model_validate(dict(settings))
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error, "", Config)) from None


def resolved_text(config: Config) -> str:
    """Every setting as YAML that `load_config` reads back unchanged."""
    return dump_yaml(config.model_dump(mode="json"))


def preset_names() -> list[str]:
    """Names of the configurations that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def settings_of(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting below `section` as (dotted key, value), in the order of the schema."""
    for name in type(section).model_fields:
        value, key = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, Section):
            yield from settings_of(value, key + ".")
        else:
            yield key, value


def _read(source: str) -> tuple[dict[str, Any], dict[str, str]]:
    if source in preset_names():
        path, label = PRESETS / f"{source}.yaml", f"preset {source}"
    else:
        path, label = Path(source), source
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        presets = ", ".join(preset_names())
        raise ConfigError(
            f"no configuration file {source!r}; give the path of a YAML file"
            + (f" or the name of a preset: {presets}" if presets else "")
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {source!r}: {error}") from None
    tree, places = parse_yaml(text, lambda line: f"{label}:{line}")
    if tree is None:
        return {}, {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{label}: a configuration is a mapping of keys to values, not {_kind(tree)}"
        )
    return tree, places


def _apply(tree: dict[str, Any], places: dict[str, str], override: str) -> None:
    """Set one `a.b.c=value` in `tree`; what stood there before goes, with its places."""
    key, value, inner = _parse_override(override)
    *parents, last = key.split(".")
    node = tree
    for depth, name in enumerate(parents, start=1):
        child = node.get(name)
        if child is not None and not isinstance(child, dict):
            path = ".".join(parents[:depth])
            raise ConfigError(
                f"{path}: must be a group of settings to take {key!r} (got {child!r}) "
                f"[{places.get(path, COMMAND_LINE)}]"
            )
        if child is None:
            child = node[name] = {}
        node = child
    is_section = section_of(key) is not None
    if is_section and isinstance(value, dict) and isinstance(node.get(last), dict):
        _merge(node[last], value)
    else:
        node[last] = value
        for stale in [place for place in places if place.startswith(key + ".")]:
            del places[stale]
    names = key.split(".")
    for depth in range(1, len(names) + 1):
        prefix = ".".join(names[:depth])
        if depth == len(names) or section_of(prefix) is None:
            places[prefix] = COMMAND_LINE
    places.update({f"{key}.{below}": COMMAND_LINE for below in inner})


def _merge(old: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            _merge(old[key], value)
        else:
            old[key] = value


def _parse_override(override: str) -> tuple[str, Any, list[str]]:
    """Split and read `a.b.c=value`; returns key, value and the dotted keys inside the value."""
    written, equals, text = override.partition("=")
    key = written.strip().lstrip("+~-")
    unknown = missing_key(key) if key else f"no key in {override!r}; write key=value"
    if key != written.strip():
        sign = written.strip()[: len(written.strip()) - len(key)]
        advice = unknown or f"write {key + '=' + (text or 'VALUE')!r}"
        raise ConfigError(f"{override!r}: settings are written without {sign!r}; {advice}")
    if unknown:
        raise ConfigError(f"{unknown} [{COMMAND_LINE}]")
    if not equals:
        raise ConfigError(f"{override!r} has no '='; write '{key}=VALUE'")
    if not text.strip():
        raise ConfigError(f"{key}: no value after '='; write '{key}=null' for the default")
    value, places = parse_yaml(text, lambda line: f"{COMMAND_LINE}, {override!r}")
    return key, value, list(places)


def _completed(tree: Mapping[str, Any], section: type[Section]) -> dict[str, Any]:
    """Take defaults for each `null` of a setting that cannot be null and for required keys left out."""
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        field = section.model_fields.get(name)
        if field is None:
            kept[name] = value
            continue
        inner = section_of(name, section)
        if value is None and not accepts_null(field.annotation):
            continue
        if inner is None or not isinstance(value, dict):
            kept[name] = value
            continue
        kept[name] = _completed(value, inner)
        # A limit with its own default, such as an alert's, keeps it when only its action is given.
        default = field.get_default(call_default_factory=True)
        if isinstance(default, Section):
            for key in inner.model_fields:
                if inner.model_fields[key].is_required():
                    kept[name].setdefault(key, getattr(default, key))
    return kept


def _place(key: str, places: Mapping[str, str]) -> str | None:
    """Place of `key`, or of the nearest key above it that was written."""
    while key not in places and "." in key:
        key = key.rpartition(".")[0]
    return places.get(key)


def _holds(tree: Mapping[str, Any], key: str) -> bool:
    node: Any = tree
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return False
        node = node[name]
    return True


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"the single value {value!r}"
