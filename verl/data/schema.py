"""The three row kinds (`sft`, `rm`, `rl`): what a row must look like, and how it is stored.

In: a row as plain Python values. Out: a list of problems, each naming its column, and the
arrow schema that the converters write.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

if TYPE_CHECKING:
    import pyarrow as pa

Kind = Literal["sft", "rm", "rl"]
KINDS: tuple[Kind, ...] = get_args(Kind)

ROLES = ("system", "user", "assistant", "tool")
REWARD_STYLES = ("model", "rule")

#: Columns without which a row of the kind has no meaning.
REQUIRED: dict[Kind, tuple[str, ...]] = {
    "sft": ("messages",),
    "rm": ("prompt", "chosen", "rejected"),
    "rl": ("prompt",),
}

HINTS: dict[Kind, str] = {
    "sft": "an sft row is {messages: [{role, content}, ...]}",
    "rm": "an rm row is {prompt, chosen, rejected: lists of messages}; "
    "`verl prepare preferences` makes it from other layouts",
    "rl": "an rl row is {prompt: text or list of messages}; "
    "`verl prepare prompts` makes the full row",
}


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


def kind_of(columns: Iterable[str]) -> Kind | None:
    """Tell the kind of a file from its columns, or None when they fit none."""
    names = set(columns)
    for kind in ("rm", "sft", "rl"):
        if names.issuperset(REQUIRED[kind]):
            return kind
    return None


def missing_column(name: str, columns: Iterable[str]) -> str:
    """Say that column `name` is missing and which existing column was probably meant."""
    present = sorted(str(column) for column in columns)
    near = difflib.get_close_matches(name, present, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else f"; columns here: {', '.join(present)}"
    return f"{name}: column is missing{hint}"


def row_problems(kind: Kind, row: Mapping[str, Any]) -> list[str]:
    """Return every reason why `row` is not a valid row of `kind`; each starts with the column.

    An `rl` row needs only its prompt (text or messages); the other columns are checked where
    they are present. A null in an optional column counts as absent.
    """
    problems = []
    for column in REQUIRED[kind]:
        if column not in row:
            problems.append(missing_column(column, row))
        elif row[column] is None:
            problems.append(f"{column}: is null")
    if problems:
        return problems
    return {"sft": _sft_problems, "rm": _rm_problems, "rl": _rl_problems}[kind](row)


def message_problems(column: str, value: Any) -> list[str]:
    """Return what is wrong with a list of messages, naming `column` and the position in it."""
    if not isinstance(value, list):
        return [f"{column}: must be a list of messages, got {type(value).__name__}"]
    if not value:
        return [f"{column}: is empty"]
    problems = []
    for position, message in enumerate(value):
        where = f"{column}[{position}]"
        if not isinstance(message, dict):
            problems.append(f"{where}: must be {{role, content}}, got {type(message).__name__}")
            continue
        problems += _role_problems(where, message)
        problems += _content_problems(where, message)
    return problems


def _role_problems(where: str, message: Mapping[str, Any]) -> list[str]:
    role = message.get("role")
    if role is None:
        return [missing_column(f"{where}.role", message)]
    if role not in ROLES:
        return [f"{where}.role: {role!r} is not one of {', '.join(ROLES)}"]
    return []


def _content_problems(where: str, message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    if content is None:
        # A call of a tool may stand alone: the template renders `tool_calls` instead.
        return [] if message.get("tool_calls") else [f"{where}.content: is missing or null"]
    if not isinstance(content, str):
        return [f"{where}.content: must be text, got {type(content).__name__}"]
    if not content.strip() and not message.get("tool_calls"):
        return [f"{where}.content: is empty"]
    return []


def _ends_with(column: str, messages: list[Message], *, assistant: bool) -> list[str]:
    role = messages[-1]["role"]
    if assistant and role != "assistant":
        return [f"{column}: must end with an assistant message, ends with {role!r}"]
    if not assistant and role == "assistant":
        return [f"{column}: ends with an assistant message; the response goes after the prompt"]
    return []


def _sft_problems(row: Mapping[str, Any]) -> list[str]:
    problems = message_problems("messages", row["messages"])
    return problems or _ends_with("messages", row["messages"], assistant=True)


def _rm_problems(row: Mapping[str, Any]) -> list[str]:
    problems: list[str] = []
    for column in REQUIRED["rm"]:
        found = message_problems(column, row[column])
        problems += found or _ends_with(column, row[column], assistant=column != "prompt")
    if not problems and row["chosen"] == row["rejected"]:
        problems.append("rejected: is identical to chosen")
    margin = row.get("margin")
    if margin is not None and not is_number(margin):
        problems.append(f"margin: must be a finite number, got {margin!r}")
    return problems


def _rl_problems(row: Mapping[str, Any]) -> list[str]:
    prompt = row["prompt"]
    if isinstance(prompt, str):
        problems = [] if prompt.strip() else ["prompt: is empty"]
    else:
        problems = message_problems("prompt", prompt)
        problems = problems or _ends_with("prompt", prompt, assistant=False)
    for column in ("data_source", "ability"):
        if row.get(column) is not None and not isinstance(row[column], str):
            problems.append(f"{column}: must be text, got {type(row[column]).__name__}")
    problems += _reward_problems(row.get("reward_model"))
    if row.get("extra_info") is not None and not isinstance(row["extra_info"], dict):
        problems.append(f"extra_info: must be an object, got {type(row['extra_info']).__name__}")
    return problems


def _reward_problems(reward: Any) -> list[str]:
    if reward is None:
        return []
    if not isinstance(reward, dict):
        return [f"reward_model: must be {{style, ground_truth}}, got {type(reward).__name__}"]
    style = reward.get("style")
    if style not in REWARD_STYLES:
        return [f"reward_model.style: {style!r} is not one of {', '.join(REWARD_STYLES)}"]
    if style == "rule" and reward.get("ground_truth") is None:
        return ["reward_model.ground_truth: is needed where style is 'rule'"]
    return []


def is_number(value: Any) -> bool:
    """Whether `value` is a finite int or float (a bool is not a number)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def content_digest(value: Any) -> bytes:
    """16 bytes that are equal for equal plain values; finds duplicates without keeping rows."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def arrow_schema(kind: Kind) -> pa.Schema:
    """Return the arrow schema that files of `kind` are written with."""
    import pyarrow as pa

    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    if kind == "sft":
        return pa.schema([("messages", messages)])
    if kind == "rm":
        return pa.schema(
            [
                ("prompt", messages),
                ("chosen", messages),
                ("rejected", messages),
                ("margin", pa.float64()),
            ]
        )
    return pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", messages),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64())])),
        ]
    )
