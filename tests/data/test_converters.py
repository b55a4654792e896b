from __future__ import annotations

import pytest

from verl.data import convert_hh, convert_preferences, convert_prompts
from verl.data.pairs import Malformed, Pair


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def test_transcript_becomes_turns():
    text = (
        "\n\nHuman: hi\n\nthere\n\nAssistant: Hello. Human: is a word\n\nHuman: ok\n\nAssistant: "
    )
    assert convert_hh.parse_transcript(text) == [
        user("hi\n\nthere"),
        bot("Hello. Human: is a word"),
        user("ok"),
        bot(""),
    ]
    assert convert_hh.parse_transcript("Human: a\r\n\r\nAssistant: b") == [user("a"), bot("b")]


@pytest.mark.parametrize("text", ["", "hello", "\n\nAssistant: x", "Note\n\nHuman: x"])
def test_transcript_must_start_with_the_human(text):
    with pytest.raises(Malformed, match="not starting with the human"):
        convert_hh.parse_transcript(text)


def test_hh_row():
    start = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    pair = convert_hh.convert_row({"chosen": start + " good", "rejected": start + " bad"})
    assert pair == Pair([user("a"), bot("b"), user("c")], [bot("good")], [bot("bad")])


Q = "\n\nHuman: q\n\nAssistant:"


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        (Q + " a", None, "not two strings"),
        (Q + " a", ["x"], "not two strings"),
        (Q + " a", Q + "  ", "empty answer"),
        (Q + " a", "\n\nHuman: other\n\nAssistant: b", "differing prefixes"),
        (Q + " a\n\nAssistant: more", Q + " b", "differing prefixes"),
        (Q + " a\n\nHuman: more", Q + " b", "not ending with the assistant"),
        (Q + " a", Q + " a ", "identical pair"),
        ("a", "b", "not starting with the human"),
        ("\n\nHuman:\n\nAssistant: a", "\n\nHuman:\n\nAssistant: b", "empty turn"),
    ],
)
def test_malformed_hh_rows(chosen, rejected, reason):
    with pytest.raises(Malformed, match=f"^{reason}$"):
        convert_hh.convert_row({"chosen": chosen, "rejected": rejected})


def test_b16_turns_of_one_speaker_are_joined():
    start = "\n\nHuman: a\n\nHuman: b\n\nAssistant: c\n\nAssistant: d\n\nHuman: e\n\nAssistant:"
    pair = convert_hh.convert_row({"chosen": start + " x", "rejected": start + " y"})
    assert pair.prompt == [user("a\n\nb"), bot("c\n\nd"), user("e")]
    # Two answers that share their first half keep it, behind the user's turn.
    start = "\n\nHuman: a\n\nAssistant: b\n\nAssistant:"
    pair = convert_hh.convert_row({"chosen": start + " x", "rejected": start + " y"})
    assert pair == Pair([user("a")], [bot("b\n\nx")], [bot("b\n\ny")])
    row = {"prompt": [user("a"), user("b")], "chosen": [bot("x"), bot("y")], "rejected": [bot("z")]}
    assert convert_preferences.convert_row(row) == Pair(
        [user("a\n\nb")], [bot("x\n\ny")], [bot("z")]
    )


EXPECTED = Pair([user("q")], [bot("good")], [bot("bad")])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": " bad "},
        {"prompt": [user("q")], "chosen": "good", "rejected": "bad"},
        {"prompt": [user("q")], "chosen": [bot("good")], "rejected": [bot("bad")]},
        {"prompt": "q", "chosen": [user("q"), bot("good")], "rejected": [user("q"), bot("bad")]},
        {"chosen": [user("q"), bot("good")], "rejected": [user("q"), bot("bad")]},
        {"chosen": Q + " good", "rejected": Q + " bad"},
        {"prompt": Q, "chosen": " good", "rejected": " bad"},
        {"prompt": "q", "chosen": "good", "rejected": "bad", "domain": "x", "margin": None},
    ],
)
def test_preference_layouts(row):
    assert convert_preferences.convert_row(row) == EXPECTED


def test_implicit_prompt_stops_before_the_first_different_answer():
    chosen = [system("s"), user("a"), bot("b"), user("c"), bot("good")]
    rejected = [system("s"), user("a"), bot("b"), user("c"), bot("bad"), user("d"), bot("e")]
    pair = convert_preferences.convert_row({"chosen": chosen, "rejected": rejected})
    assert pair == Pair(chosen[:4], [bot("good")], rejected[4:])
    # The system message belongs to the prompt although the prompt column lacks it.
    whole = {
        "chosen": [system("s"), user("q"), bot("x")],
        "rejected": [system("s"), user("q"), bot("y")],
    }
    assert convert_preferences.convert_row({"prompt": "q", **whole}).prompt == [
        system("s"),
        user("q"),
    ]


@pytest.mark.parametrize(
    ("extra", "margin"),
    [
        ({"margin": 2}, 2.0),
        ({"score_chosen": 8.5, "score_rejected": 6}, 2.5),
        ({"margin": 1.0, "score_chosen": 8.5, "score_rejected": 6}, 1.0),
        ({"score_chosen": 8.5}, None),
        ({"margin": 0}, 0.0),
    ],
)
def test_margin(extra, margin):
    row = {"prompt": "q", "chosen": "good", "rejected": "bad", **extra}
    assert convert_preferences.convert_row(row).margin == margin


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": None}, "missing answer"),
        ({"prompt": "q", "chosen": "a", "rejected": " "}, "empty answer"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "identical pair"),
        ({"prompt": " ", "chosen": "a", "rejected": "b"}, "no prompt"),
        ({"prompt": [], "chosen": "a", "rejected": "b"}, "empty turn"),
        ({"prompt": "q", "chosen": [], "rejected": [bot("b")]}, "empty answer"),
        ({"prompt": "q", "chosen": [bot(" ")], "rejected": [bot("b")]}, "empty answer"),
        ({"prompt": "q", "chosen": "a", "rejected": [bot("b")]}, "one answer is text"),
        ({"prompt": [user("q"), bot("x")], "chosen": "a", "rejected": "b"}, "prompt ends with"),
        (
            {"chosen": [user("q"), bot("a")], "rejected": [user("r"), bot("b")]},
            "differing prefixes",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "big"},
            "margin is not a number",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": 1, "score_rejected": 2},
            "chosen scored below rejected",
        ),
        (
            {"prompt": [{**user("q"), "name": "Ann"}], "chosen": "a", "rejected": "b"},
            "keys other than role and content",
        ),
    ],
)
def test_malformed_preferences(row, reason):
    with pytest.raises(Malformed, match=reason):
        convert_preferences.convert_row(row)


def test_prompt_layouts():
    assert convert_prompts.convert_row({"prompt": " q "}) == [user("q")]
    assert convert_prompts.convert_row({"prompt": [system("s"), user("q")]}) == [
        system("s"),
        user("q"),
    ]
    assert convert_prompts.convert_row({"messages": [user("q"), bot("a")]}) == [user("q")]
    for row in ({"prompt": None}, {"prompt": " "}, {"prompt": []}, {"messages": [bot("a")]}):
        with pytest.raises(Malformed, match="no prompt"):
            convert_prompts.convert_row(row)
