"""What every converter returns, and how it says that a row is malformed.

A converter is a function row -> `Pair` (or -> prompt); it raises `Malformed` with a short
reason that is counted, so the same reason always has the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.data.schema import Message, message_problems, missing_column
from verl.errors import DataError


class Malformed(Exception):
    """A row that is left out; the message is the reason it is counted under."""


@dataclass(frozen=True)
class Pair:
    """One comparison: the same prompt with a better and a worse answer."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    margin: float | None = None


def require_columns(row: Mapping[str, Any], columns: tuple[str, ...], where: str) -> None:
    """Refuse a file whose first row lacks one of `columns`.

    Raises:
        DataError: with `where` (file:row) and the nearest existing name.
    """
    for column in columns:
        if column not in row:
            raise DataError(f"{where}: {missing_column(column, row)}")


def clean_messages(value: Any) -> list[Message]:
    """Return role and stripped content of each message, turns of one speaker in a row joined.

    Chat templates that insist on alternating roles refuse a file with two turns of one speaker
    in a row; joining them with a blank line keeps every word.

    Raises:
        Malformed: not a list of messages, an empty turn, or keys this version cannot store.
    """
    if not isinstance(value, list):
        raise Malformed("not a list of messages")
    if any(isinstance(message, dict) and message.keys() - {"role", "content"} for message in value):
        raise Malformed("message with keys other than role and content")
    problems = message_problems("messages", value)
    if problems:
        raise Malformed("empty turn" if problems[0].endswith("is empty") else "invalid message")
    return merge_turns([{"role": m["role"], "content": m["content"].strip()} for m in value])


def merge_turns(messages: list[Message]) -> list[Message]:
    """Join turns of one speaker that follow each other, with a blank line between them."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            text = f"{merged[-1]['content']}\n\n{message['content']}"
            merged[-1] = {"role": message["role"], "content": text}
        else:
            merged.append(message)
    return merged


def make_pair(
    prompt: list[Message],
    chosen: list[Message],
    rejected: list[Message],
    margin: float | None = None,
) -> Pair:
    """Check the parts of a comparison and return it.

    Raises:
        Malformed: no prompt, no user turn before the answer, an answer that is not the
            assistant's, or two equal answers.
    """
    if not prompt:
        raise Malformed("no prompt")
    if prompt[-1]["role"] == "assistant":
        raise Malformed("prompt ends with the assistant")
    for answer in (chosen, rejected):
        if not answer:
            raise Malformed("empty answer")
        if answer[0]["role"] != "assistant":
            raise Malformed("differing prefixes")
        if answer[-1]["role"] != "assistant":
            raise Malformed("not ending with the assistant")
    if chosen == rejected:
        raise Malformed("identical pair")
    return Pair(prompt, chosen, rejected, margin)
