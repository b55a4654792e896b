"""The common layouts of preference data to comparisons.

In: a row with `chosen` and `rejected`, each an answer (text or messages) or a whole
conversation, with or without `prompt`. Out: a `Pair`, or `Malformed` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.data import convert_hh
from verl.data.pairs import Malformed, Pair, clean_messages, make_pair
from verl.data.schema import Message, is_number

COLUMNS = ("chosen", "rejected")


def convert_row(row: Mapping[str, Any]) -> Pair:
    """Return the comparison in a row of any of these layouts.

    - `prompt` text, answers text;
    - `prompt` text or messages, answers as messages, or as conversations that repeat the prompt;
    - no `prompt`: whole conversations, whose common beginning is the prompt;
    - no `prompt`, transcripts with `Human:` and `Assistant:` paragraphs.

    `margin`, or `score_chosen` minus `score_rejected`, becomes the margin; other columns are
    not read.

    Raises:
        Malformed: see `make_pair` and `clean_messages`; also a missing answer or a bad margin.
    """
    margin = _margin(row)
    chosen, rejected = (_answer(row.get(column)) for column in COLUMNS)
    prompt = row.get("prompt")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            pair = convert_hh.convert_row(row)
            return Pair(pair.prompt, pair.chosen, pair.rejected, margin)
        return make_pair(prompt_messages(prompt), _said(chosen), _said(rejected), margin)
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise Malformed("one answer is text, the other messages")
    if prompt is None:
        return _implicit_prompt(chosen, rejected, margin)
    start = prompt_messages(prompt)
    if chosen[0]["role"] != "assistant" and rejected[0]["role"] != "assistant":
        pair = _implicit_prompt(chosen, rejected, margin)
        # The conversations may open with a system message that the prompt column leaves out.
        if pair.prompt[-len(start) :] != start:
            raise Malformed("differing prefixes")
        return pair
    return make_pair(start, chosen, rejected, margin)


def prompt_messages(prompt: Any) -> list[Message]:
    """Return a prompt as messages: text is one user turn, or a transcript where it looks so.

    Raises:
        Malformed: empty, or neither text nor messages.
    """
    if not isinstance(prompt, str):
        return clean_messages(prompt)
    if not prompt.strip():
        raise Malformed("no prompt")
    if prompt.startswith("\n\nHuman:"):
        turns = convert_hh.parse_transcript(prompt)
        # Such prompts end with the label the answer is to follow.
        turns = turns if turns[-1]["content"] else turns[:-1]
        return clean_messages(turns)
    return [{"role": "user", "content": prompt.strip()}]


def _answer(value: Any) -> str | list[Message]:
    if value is None:
        raise Malformed("missing answer")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and not value:
        raise Malformed("empty answer")
    last = value[-1] if isinstance(value, list) else None
    if isinstance(last, dict) and last.get("role") == "assistant" and _blank(last.get("content")):
        raise Malformed("empty answer")
    return clean_messages(value)


def _blank(content: Any) -> bool:
    return content is None or (isinstance(content, str) and not content.strip())


def _said(text: str) -> list[Message]:
    if not text.strip():
        raise Malformed("empty answer")
    return [{"role": "assistant", "content": text.strip()}]


def _implicit_prompt(chosen: list[Message], rejected: list[Message], margin: float | None) -> Pair:
    if chosen == rejected:
        raise Malformed("identical pair")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise Malformed("differing prefixes")
    # One conversation can be the beginning of the other; the prompt ends before the first answer
    # in which they differ, so it never ends with the assistant.
    shorter = min(len(chosen), len(rejected))
    while shared and (shared == shorter or chosen[shared - 1]["role"] == "assistant"):
        shared -= 1
    return make_pair(chosen[:shared], chosen[shared:], rejected[shared:], margin)


def _margin(row: Mapping[str, Any]) -> float | None:
    value = row.get("margin")
    better, worse = row.get("score_chosen"), row.get("score_rejected")
    if value is None and better is not None and worse is not None:
        if not (is_number(better) and is_number(worse)):
            raise Malformed("margin is not a number")
        value = better - worse
    if value is None:
        return None
    if not is_number(value):
        raise Malformed("margin is not a number")
    if value < 0:
        raise Malformed("chosen scored below rejected")
    return float(value)
