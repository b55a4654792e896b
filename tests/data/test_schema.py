from __future__ import annotations

import pytest

from verl.data.schema import arrow_schema, content_digest, kind_of, row_problems

USER = {"role": "user", "content": "hi"}
BOT = {"role": "assistant", "content": "hello"}
BAD = {"role": "assistant", "content": "no"}


def test_valid_rows_have_no_problems():
    assert row_problems("sft", {"messages": [USER, BOT]}) == []
    pair = {"prompt": [USER], "chosen": [BOT], "rejected": [BAD]}
    assert row_problems("rm", pair) == []
    assert row_problems("rm", {**pair, "margin": None}) == []
    assert row_problems("rm", {**pair, "margin": 0.5, "domain": "x"}) == []
    assert row_problems("rl", {"prompt": "hi"}) == []
    full = {
        "data_source": "x",
        "prompt": [USER],
        "ability": "y",
        "reward_model": {"style": "model", "ground_truth": ""},
        "extra_info": {"split": "train", "index": 0},
    }
    assert row_problems("rl", full) == []


@pytest.mark.parametrize(
    ("kind", "row", "problem"),
    [
        ("rl", {"prmpt": "x"}, "prompt: column is missing; did you mean 'prmpt'?"),
        ("rl", {"prompt": None}, "prompt: is null"),
        ("rl", {"prompt": ""}, "prompt: is empty"),
        ("rl", {"prompt": []}, "prompt: is empty"),
        ("rl", {"prompt": 3}, "prompt: must be a list of messages, got int"),
        ("rl", {"prompt": [{"role": "user"}]}, "prompt[0].content: is missing or null"),
        ("rl", {"prompt": [{"role": "user", "content": " "}]}, "prompt[0].content: is empty"),
        (
            "rl",
            {"prompt": [USER, BOT]},
            "prompt: ends with an assistant message; the response goes after the prompt",
        ),
        (
            "rl",
            {"prompt": "x", "reward_model": {"style": "modle"}},
            "reward_model.style: 'modle' is not one of model, rule",
        ),
        (
            "rl",
            {"prompt": "x", "reward_model": {"style": "rule"}},
            "reward_model.ground_truth: is needed where style is 'rule'",
        ),
        (
            "sft",
            {"messages": [USER, {"rol": "assistant", "content": "x"}]},
            "messages[1].role: column is missing; columns here: content, rol",
        ),
        (
            "sft",
            {"messages": [{"role": "human", "content": "x"}]},
            "messages[0].role: 'human' is not one of system, user, assistant, tool",
        ),
        (
            "sft",
            {"messages": [BOT, USER]},
            "messages: must end with an assistant message, ends with 'user'",
        ),
        (
            "rm",
            {"prompt": [USER], "chosen": [BOT], "rejected": [BOT]},
            "rejected: is identical to chosen",
        ),
        (
            "rm",
            {"prompt": [USER], "chosen": [BOT], "rejected": [BAD], "margin": float("nan")},
            "margin: must be a finite number, got nan",
        ),
        (
            "rm",
            {"prompt": [USER], "chosen": "hello", "rejected": [BAD]},
            "chosen: must be a list of messages, got str",
        ),
    ],
)
def test_problem_names_the_column(kind, row, problem):
    assert row_problems(kind, row) == [problem]


def test_kind_is_told_from_columns():
    assert kind_of(["prompt", "chosen", "rejected", "margin"]) == "rm"
    assert kind_of(["messages"]) == "sft"
    assert kind_of(["prompt", "data_source"]) == "rl"
    assert kind_of(["question"]) is None


def test_arrow_schemas_have_the_documented_columns():
    assert arrow_schema("sft").names == ["messages"]
    assert arrow_schema("rm").names == ["prompt", "chosen", "rejected", "margin"]
    assert arrow_schema("rl").names == [
        "data_source", "prompt", "ability", "reward_model", "extra_info",
    ]  # fmt: skip


def test_digest_ignores_key_order_and_sees_content():
    assert content_digest({"a": 1, "b": 2}) == content_digest({"b": 2, "a": 1})
    assert content_digest([USER]) != content_digest([BOT])
