"""What a reward model reads: template, pair form, cut of long conversations."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import CHATML, byte_tokenizer
from verl.models.chat import prompt_ids, reward_ids, reward_input

QUESTION = [{"role": "user", "content": "hi"}]


def text(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def word_tokenizer(words: str) -> Any:
    """A WordPiece tokenizer as BERT has it: [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, then `words`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words.split()]
    core = Tokenizer(models.WordPiece({w: i for i, w in enumerate(names)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def test_conversation_is_a_finished_turn_of_the_template() -> None:
    tokenizer = byte_tokenizer()
    read = reward_input(tokenizer, QUESTION, "hello")
    assert text(tokenizer, read.ids) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    )
    assert read.type_ids is None
    assert not read.truncated


def test_prompt_ids_are_a_prefix_of_what_is_scored() -> None:
    tokenizer = byte_tokenizer()
    prompt = prompt_ids(tokenizer, QUESTION)
    assert reward_ids(tokenizer, QUESTION, "hello")[: len(prompt)] == prompt


def test_response_given_as_messages_reads_like_its_text() -> None:
    tokenizer = byte_tokenizer()
    turns = [{"role": "assistant", "content": "hello"}]
    assert reward_ids(tokenizer, "hi", turns) == reward_ids(tokenizer, QUESTION, "hello")


def test_b10_one_bos_in_reward_input() -> None:
    tokenizer = byte_tokenizer("<|endoftext|>" + CHATML)
    tokenizer.bos_token = "<|endoftext|>"
    ids = reward_ids(tokenizer, QUESTION, "hello")
    assert ids.count(0) == 1
    assert ids[0] == 0


def test_without_a_template_prompt_response_and_eos_once() -> None:
    tokenizer = byte_tokenizer(None)
    assert text(tokenizer, reward_ids(tokenizer, "hi ", "yes")) == "hi yes<|im_end|>"
    assert text(tokenizer, reward_ids(tokenizer, "hi ", "yes<|im_end|>")) == "hi yes<|im_end|>"


@pytest.mark.parametrize("limit", [1, 2, 5, 12])
def test_cut_keeps_the_end_of_the_response(limit: int) -> None:
    tokenizer = byte_tokenizer()
    whole = reward_ids(tokenizer, QUESTION, "hello")
    read = reward_input(tokenizer, QUESTION, "hello", max_length=limit)
    assert read.ids == whole[-limit:]
    assert read.truncated


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_cut_keeps_a_leading_bos(limit: int) -> None:
    tokenizer = byte_tokenizer("<|endoftext|>" + CHATML)
    tokenizer.bos_token = "<|endoftext|>"
    whole = reward_ids(tokenizer, QUESTION, "hello")
    ids = reward_ids(tokenizer, QUESTION, "hello", max_length=limit)
    assert len(ids) == limit
    assert ids == ([0, *whole[1 - limit :]] if limit > 1 else whole[-1:])


def test_c12_encoders_read_question_and_answer_as_a_pair() -> None:
    tokenizer = word_tokenizer("why because so")
    read = reward_input(tokenizer, "why", "because so")
    assert read.ids == [2, 4, 3, 5, 6, 3]
    assert read.type_ids == [0, 0, 0, 1, 1, 1]


def test_c12_cut_pair_keeps_cls_the_end_and_its_segments() -> None:
    tokenizer = word_tokenizer("why because so")
    read = reward_input(tokenizer, "why why why", "because so", max_length=5)
    assert read == ([2, 3, 5, 6, 3], [0, 0, 1, 1, 1], True)


def test_template_that_rewrites_the_prompt_is_still_scored() -> None:
    tokenizer = byte_tokenizer(
        "{{ messages | length }}{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    ids = reward_ids(tokenizer, QUESTION, "yes")
    assert text(tokenizer, ids) == "2hi<|im_end|>yes<|im_end|>"
