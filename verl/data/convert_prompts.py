"""Plain prompts to chat messages.

In: a row {prompt} (text or messages) or {messages}. Out: the messages of the prompt, or
`Malformed` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.data.convert_preferences import prompt_messages
from verl.data.pairs import Malformed, clean_messages
from verl.data.schema import Message


def column_of(row: Mapping[str, Any]) -> str:
    """Return the column that holds the prompt; `prompt` where there is neither."""
    return "messages" if "messages" in row and "prompt" not in row else "prompt"


def convert_row(row: Mapping[str, Any]) -> list[Message]:
    """Return the prompt of a row as messages that end before the assistant speaks.

    The final answer of a whole conversation in `messages` is left off.

    Raises:
        Malformed: no prompt, an empty turn, or a prompt that ends with the assistant.
    """
    column = column_of(row)
    value = row.get(column)
    if value is None or value == []:
        raise Malformed("no prompt")
    if column == "messages":
        messages = clean_messages(value)
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
    else:
        messages = prompt_messages(value)
    if not messages:
        raise Malformed("no prompt")
    if messages[-1]["role"] == "assistant":
        raise Malformed("prompt ends with the assistant")
    return messages
