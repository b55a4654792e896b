from __future__ import annotations

import logging

import pytest

from verl.data.datasets import RowDataset
from verl.data.lengths import (
    apply_length_limit,
    keep_rows,
    limited_prompt_ids,
    tokenize_prompts,
)
from verl.errors import ConfigError, DataError


def words(count):
    return " ".join(f"w{i}" for i in range(count))


def test_b01_policies_on_a_558_token_prompt(raw_tokenizer):
    ids = list(range(558))
    assert apply_length_limit(ids, 512, "truncate_left", "f:1") == ids[46:]
    assert apply_length_limit(ids, 512, "drop", "f:1") is None
    with pytest.raises(DataError, match=r"limit of 512 tokens: f:1 \(558 tokens\)"):
        apply_length_limit(ids, 512, "error", "f:1")
    assert apply_length_limit(ids, 558, "error", "f:1") == ids
    assert apply_length_limit(ids, None, "error", "f:1") == ids
    with pytest.raises(ConfigError, match="data.overlong: 'middle' is not one of error, drop"):
        apply_length_limit(ids, 512, "middle", "f:1")
    # What the rollout gets is the end of what the tokenizer gave.
    full = raw_tokenizer(words(558))["input_ids"]
    cut = limited_prompt_ids(raw_tokenizer, words(558), 512, "truncate_left", "f:1")
    assert len(cut) == 512 and cut == full[-512:]


def test_b03_the_limit_itself_is_kept(jsonl, raw_tokenizer, caplog):
    path = jsonl([{"prompt": words(n)} for n in (1023, 1024, 1025)])
    rows = RowDataset(path, "rl")
    with pytest.raises(DataError, match=rf"^1 row.* 1024 tokens: {path}:3 \(1025 tokens\)"):
        tokenize_prompts(rows, raw_tokenizer, 1024, "error")
    with caplog.at_level(logging.WARNING, "verl.data"):
        assert tokenize_prompts(rows, raw_tokenizer, 1024, "drop") == ([0, 1], 1)
    assert "1 of 3 rows are longer than 1024 tokens and are left out" in caplog.text
    assert tokenize_prompts(rows, raw_tokenizer, 1024, "truncate_left") == ([0, 1, 2], 0)
    assert tokenize_prompts(rows, raw_tokenizer, 1025, "error") == ([0, 1, 2], 0)
    assert tokenize_prompts(rows, raw_tokenizer, None) == ([0, 1, 2], 0)


def test_error_counts_all_long_rows_and_names_the_first(jsonl, raw_tokenizer):
    path = jsonl([{"prompt": words(5 + n)} for n in range(8)])
    with pytest.raises(DataError) as caught:
        tokenize_prompts(RowDataset(path, "rl"), raw_tokenizer, 5, "error")
    text = str(caught.value)
    assert text.startswith(f"7 row(s) longer than the limit of 5 tokens: {path}:2 (6 tokens)")
    assert "and 2 more" in text and "fit 12 tokens" in text


def test_b19_nothing_left_names_the_counts(jsonl, raw_tokenizer):
    rows = RowDataset(jsonl([{"prompt": words(9)}] * 5), "rl")
    with pytest.raises(DataError, match="no rows left: all 5 are longer than 4 tokens"):
        tokenize_prompts(rows, raw_tokenizer, 4, "drop")


def test_b16_a_refusing_template_is_met_before_step_one(jsonl, strict_tokenizer):
    system, user = ({"role": role, "content": "x"} for role in ("system", "user"))
    for prompt, roles in (([system, user], "system, user"), ([user, user], "user, user")):
        path = jsonl([{"prompt": [user]}, {"prompt": prompt}])
        with pytest.raises(DataError, match=rf"{path}:2: prompt: .*\[{roles}\]"):
            tokenize_prompts(RowDataset(path, "rl"), strict_tokenizer, 100)


def test_b26_a_bad_row_stops_the_pass_by_name(jsonl, raw_tokenizer):
    path = jsonl([{"prompt": "w"}, {"prompt": None}])
    with pytest.raises(DataError, match=rf"{path}:2: prompt: is null"):
        tokenize_prompts(RowDataset(path, "rl"), raw_tokenizer, 100)


def test_keep_rows_measures_what_it_is_told(jsonl):
    rows = RowDataset(jsonl([{"prompt": "x" * n} for n in (1, 5, 3)]), "rl")
    assert keep_rows(rows, lambda row, where: len(row["prompt"]), 3, "drop") == ([0, 2], 1)
