"""Transcripts with `Human:` and `Assistant:` paragraphs (the HH-RLHF layout) to comparisons.

In: a row {chosen, rejected}, each one text. Out: a `Pair`, or `Malformed` with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl.data.pairs import Malformed, Pair, make_pair, merge_turns
from verl.data.schema import Message

COLUMNS = ("chosen", "rejected")

_SPEAKER = re.compile(r"(?:\A\s*|\r?\n\r?\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def parse_transcript(text: str) -> list[Message]:
    r"""Split a transcript at its `\n\nHuman:` and `\n\nAssistant:` paragraphs.

    Contents are stripped and may be empty; a speaker may come twice in a row. A label inside a
    paragraph is part of the text.

    Raises:
        Malformed: words before the first label, or a transcript that the human does not open.
    """
    parts = _SPEAKER.split(text)
    if len(parts) == 1 or parts[0].strip() or parts[1] != "Human":
        raise Malformed("not starting with the human")
    speakers, contents = parts[1::2], parts[2::2]
    return [
        {"role": _ROLES[speaker], "content": content.strip()}
        for speaker, content in zip(speakers, contents, strict=True)
    ]


def convert_row(row: Mapping[str, Any]) -> Pair:
    """Return the comparison in a row of two transcripts that differ in their last answer.

    Raises:
        Malformed: not two strings, not starting with the human, not ending with the assistant,
            empty answer, empty turn, differing prefixes, identical pair.
    """
    texts = [row.get(column) for column in COLUMNS]
    if not all(isinstance(text, str) for text in texts):
        raise Malformed("not two strings")
    sides = [parse_transcript(str(text)) for text in texts]
    for turns in sides:
        if turns[-1]["role"] != "assistant":
            raise Malformed("not ending with the assistant")
        if not turns[-1]["content"]:
            raise Malformed("empty answer")
    if sides[0][:-1] != sides[1][:-1]:
        raise Malformed("differing prefixes")
    if any(not turn["content"] for turn in sides[0]):
        raise Malformed("empty turn")
    # Prefixes are compared before the join: an answer cut in two differs from one that was not.
    chosen, rejected = (merge_turns(turns) for turns in sides)
    return make_pair(chosen[:-1], chosen[-1:], rejected[-1:])
