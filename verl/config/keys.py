"""Walking the schema by dotted key: which keys exist, what they accept, what was probably meant."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from verl.config.schema import Config
from verl.config.section import Section, section_class, unknown_key_message


def all_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every section and setting below `section` as (dotted key, field), in the schema's order."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        yield key, field
        inner = section_class(field.annotation)
        if inner is not None:
            yield from all_keys(inner, key + ".")


def section_of(key: str, section: type[Section] = Config) -> type[Section] | None:
    """The section class at dotted `key`, or None where the key is a setting or does not exist."""
    current: type[Section] | None = section
    for name in key.split("."):
        field = current.model_fields.get(name) if current else None
        current = section_class(field.annotation) if field else None
    return current


def accepts_null(annotation: Any) -> bool:
    """Whether None is a value of a field with this annotation."""
    if get_origin(annotation) in (Union, types.UnionType):
        return type(None) in get_args(annotation)
    return annotation is type(None)


def missing_key(key: str) -> str | None:
    """None for a key that exists; else why it does not, with the key that was probably meant.

    Keys below a setting that is itself a mapping (`resource.actor.gpu`) exist.
    """
    section: type[Section] | None = Config
    walked: list[str] = []
    annotation: Any = None
    names = key.split(".")
    while section is not None and len(walked) < len(names):
        name = names[len(walked)]
        field = section.model_fields.get(name)
        if field is None:
            return _suggestion(key) or unknown_key_message(section, name, ".".join(walked))
        walked.append(name)
        annotation = field.annotation
        section = section_class(annotation)
    if len(walked) < len(names) and not _is_mapping(annotation):
        return f"unknown key {key!r}: {'.'.join(walked)!r} is a single setting, nothing is below it"
    return None


def _suggestion(key: str) -> str | None:
    """Names the real key when a single slip anywhere in the dotted path explains `key`."""
    if "." not in key:
        return None
    known = [name for name, _ in all_keys()]
    close = difflib.get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.9)
    return f"unknown key {key!r}; did you mean {close[0]!r}?" if close else None


def _is_mapping(annotation: Any) -> bool:
    if get_origin(annotation) is dict:
        return True
    return any(_is_mapping(part) for part in get_args(annotation))
