"""YAML text to plain values that remember their line, and back.

In: the text of a configuration file or of one override. Out: nested dictionaries plus the place
of every key. Scalars follow YAML 1.2 (`1e-5` is a number, `on` and `010` mean nothing special),
keys must be unique, and no tag can build anything but plain values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import yaml

from verl.errors import ConfigError

_NULL, _BOOL, _INT, _FLOAT = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float")
)
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
#: Tag, whole pattern, and the first characters a scalar of that tag can have ("" is the empty one).
_SCALARS = [
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (_INT, r"[-+]?[0-9]+", list("-+0123456789")),
    (
        _FLOAT,
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
]


class _Loader(yaml.SafeLoader):
    """Safe loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes what `_Loader` would read as something else than text."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}


for _class in (_Loader, _Dumper):
    for _tag, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor(_INT, lambda loader, node: int(loader.construct_scalar(node)))


def parse_yaml(text: str, place: Callable[[int], str]) -> tuple[Any, dict[str, str]]:
    """Return the value of `text` and, for every dotted key in it, `place(line)` (lines from 1).

    Raises `ConfigError` for text that is not YAML, for a key given twice, for a key that is not a
    name, and for tags other than YAML's plain ones.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        places: dict[str, str] = {}
        return (None if node is None else _value(loader, node, (), place, places, ())), places
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = place(mark.line + 1 if mark else 1)
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{place(1)}: not valid YAML: {error}") from None
    finally:
        loader.dispose()


def dump_yaml(value: Any) -> str:
    """Write plain values as YAML that `parse_yaml` reads back unchanged."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def _value(
    loader: _Loader,
    node: yaml.Node,
    path: tuple[str, ...],
    place: Callable[[int], str],
    places: dict[str, str],
    open_nodes: tuple[int, ...],
) -> Any:
    """Build the value of `node` at `path`; `open_nodes` are the nodes that contain it."""
    where = place(node.start_mark.line + 1)
    if id(node) in open_nodes:
        raise ConfigError(f"{where}: {'.'.join(path)!r} contains itself through a YAML alias")
    inside = (*open_nodes, id(node))
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _COLLECTIONS:
        raise ConfigError(f"{where}: not valid YAML here: the tag {node.tag!r} is not allowed")
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, item, path, place, places, inside) for item in node.value]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node, deep=True)
    mapping: dict[str, Any] = {}
    first_line: dict[str, str] = {}
    for key_node, value_node in node.value:
        line = place(key_node.start_mark.line + 1)
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{line}: a key must be a name, not a list or a mapping")
        key = key_node.value
        dotted = ".".join([*path, key])
        if key in mapping:
            raise ConfigError(
                f"{line}: key {dotted!r} is given twice, first at {first_line[key]}; keep one of them"
            )
        places[dotted], first_line[key] = line, line
        mapping[key] = _value(loader, value_node, (*path, key), place, places, inside)
    return mapping
