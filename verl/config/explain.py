"""What a setting, a section or a metric means, as plain text for `verl config explain`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from verl.config.keys import all_keys, missing_key, section_of
from verl.config.schema import Config
from verl.config.section import Section
from verl.errors import ConfigError


def explain_setting(key: str) -> str:
    """Type, range, default and meaning of a setting, or the keys of a section.

    Raises:
        ConfigError: no such key; names the nearest one.
    """
    problem = missing_key(key)
    if problem:
        raise ConfigError(problem)
    fields = dict(all_keys())
    while key not in fields:  # a key inside a setting that is a mapping
        key = key.rpartition(".")[0]
    section = section_of(key)
    return _explain_section(key, section, fields[key]) if section else _explain(key, fields[key])


def explain_metric(name: str, glossary: Mapping[str, Any]) -> str:
    """Unit, meaning, healthy range and advice of a metric.

    Args:
        name: a key of `glossary`.
        glossary: metric name to an entry with `unit`, `meaning`, `healthy` and `advice`.

    Raises:
        ConfigError: no such metric; names the nearest ones.
    """
    if name not in glossary:
        close = difflib.get_close_matches(name, glossary, n=3, cutoff=0.5)
        hint = (
            f"; did you mean {' or '.join(close)}?" if close else "; metrics are in docs/metrics.md"
        )
        raise ConfigError(f"unknown metric {name!r}{hint}")
    entry = glossary[name]
    rows = [("unit", entry.unit), ("healthy", entry.healthy), ("advice", entry.advice)]
    return "\n".join([name, f"  {entry.meaning}", *_rows(rows)])


def _explain(key: str, field: FieldInfo) -> str:
    rows = [
        ("type", type_name(field.annotation)),
        ("range", _range(field)),
        ("default", _default(field)),
    ]
    return "\n".join([key, f"  {field.description}", *_rows(rows)])


def _explain_section(key: str, section: type[Section], field: FieldInfo) -> str:
    names = section.model_fields
    width = max(map(len, names))
    lines = [key, f"  {field.description}"]
    if field.default is None and field.default_factory is None:
        lines += ["", f"  default: null; `{key}.NAME=VALUE` turns it on"]
    lines += ["", "  keys:"]
    lines += [f"    {name:<{width}}  {inner.description}" for name, inner in names.items()]
    return "\n".join(lines)


def _rows(rows: list[tuple[str, str]]) -> list[str]:
    return ["", *[f"  {label + ':':<9}{value}" for label, value in rows if value]]


def type_name(annotation: Any) -> str:
    """The type as a user would write its values: `int`, `text`, `one of a, b`, `null`."""
    plain = {
        str: "text",
        bool: "true or false",
        int: "integer",
        float: "number",
        type(None): "null",
    }
    if annotation in plain:
        return plain[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return parts[0] if len(parts) == 1 else "one of " + ", ".join(map(str, parts))
    if origin is list:
        return f"list of {type_name(parts[0])}"
    if origin is tuple:
        return f"list of {len(parts)} {type_name(parts[0])}s"
    if origin is dict:
        return "mapping"
    if hasattr(annotation, "__metadata__"):
        return type_name(annotation.__origin__)
    return " or ".join(type_name(part) for part in parts)


def _bounds(field: FieldInfo) -> list[Any]:
    """Constraints of the field itself and of the parts of its annotation."""
    found = list(field.metadata)
    for part in get_args(field.annotation):
        for item in getattr(part, "__metadata__", ()):
            found += item.metadata if isinstance(item, FieldInfo) else [item]
    return found


def _range(field: FieldInfo) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return ", ".join(
        dict.fromkeys(
            f"{sign} {getattr(bound, name)}"
            for bound in _bounds(field)
            for name, sign in signs.items()
            if getattr(bound, name, None) is not None
        )
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none, it must be given"
    value = field.get_default(call_default_factory=True)
    return value if isinstance(value, str) else json.dumps(value)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors that complete and check YAML."""
    return Config.model_json_schema()
