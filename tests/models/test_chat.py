"""Conversations to ids for the policy: prompts, trained tokens, stop tokens, templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CHATML, byte_tokenizer
from verl.data.datasets import PromptText
from verl.errors import ModelError
from verl.models.chat import (
    answer_end,
    conversation_ids,
    decode_response,
    load_tokenizer,
    plain_text,
    prompt_ids,
    render,
    stop_ids,
)

#: Llama-2's rules: no system turn, user and assistant alternate.
STRICT = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ m['content'] }}<|im_end|>{% endfor %}"
)
#: Hides what the assistant said before the last turn, as templates with thoughts do.
REWRITING = (
    "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}"
    "{% else %}(hidden){% endif %}<|im_end|>{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ciao"},
]


def with_bos(template: str | None) -> Any:
    """A tokenizer that puts <|endoftext|> before and <|im_end|> after every text it is given."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer(template)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>",
        special_tokens=[("<|endoftext|>", 0), ("<|im_end|>", 2)],
    )
    return tokenizer


def text(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_messages_end_where_the_assistant_begins() -> None:
    tokenizer = byte_tokenizer()
    ids = prompt_ids(tokenizer, [{"role": "user", "content": "hi"}])
    assert text(tokenizer, ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_b10_exactly_one_bos_when_the_template_writes_it() -> None:
    tokenizer = with_bos("<|endoftext|>" + CHATML)
    ids = prompt_ids(tokenizer, [{"role": "user", "content": "hi"}])
    assert ids.count(0) == 1
    assert ids[0] == 0


def test_b10_no_bos_when_the_template_writes_none() -> None:
    tokenizer = with_bos(CHATML)
    assert 0 not in prompt_ids(tokenizer, [{"role": "user", "content": "hi"}])
    ids, _ = conversation_ids(tokenizer, CHAT)
    assert 0 not in ids


def test_b09_messages_without_a_template_name_the_option() -> None:
    with pytest.raises(ModelError, match=r"no chat template.*`chat_template`.*chatml"):
        prompt_ids(byte_tokenizer(None), [{"role": "user", "content": "hi"}])


def test_plain_string_is_a_user_turn_or_raw_text() -> None:
    tokenizer = byte_tokenizer()
    assert prompt_ids(tokenizer, "hi") == prompt_ids(tokenizer, [{"role": "user", "content": "hi"}])
    assert text(tokenizer, prompt_ids(byte_tokenizer(None), "hi")) == "hi"


def test_raw_text_keeps_the_tokenizers_bos_but_not_an_eos_after_the_prompt() -> None:
    tokenizer = with_bos(None)
    assert text(tokenizer, prompt_ids(tokenizer, "hi")) == "<|endoftext|>hi"


def test_prompt_text_of_a_data_loader_keeps_its_conversation() -> None:
    tokenizer = byte_tokenizer()
    assert prompt_ids(tokenizer, PromptText("bye", CHAT[:4])) == prompt_ids(tokenizer, CHAT[:4])


@pytest.mark.parametrize(
    ("messages", "roles", "cause"),
    [
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
         "system, user", "System role not supported"),
        ([{"role": "user", "content": "u"}, {"role": "user", "content": "v"}],
         "user, user", "must alternate"),
    ],
)  # fmt: skip
def test_b16_refusal_of_a_strict_template_names_roles_and_cause(
    messages: list[dict[str, str]], roles: str, cause: str
) -> None:
    with pytest.raises(ModelError, match=rf"refuses the roles \[{roles}\].*{cause}"):
        prompt_ids(byte_tokenizer(STRICT), messages)


def test_loss_is_on_every_answer_and_its_end_token_only() -> None:
    tokenizer = byte_tokenizer()
    ids, mask = conversation_ids(tokenizer, CHAT)
    assert text(tokenizer, ids) == render(tokenizer, CHAT, generation_prompt=False)
    trained = [token for token, learn in zip(ids, mask, strict=True) if learn]
    assert text(tokenizer, trained) == "hello<|im_end|>ciao<|im_end|>"


def test_train_on_last_leaves_earlier_answers_alone() -> None:
    tokenizer = byte_tokenizer()
    ids, mask = conversation_ids(tokenizer, CHAT, train_on="last")
    assert ids == conversation_ids(tokenizer, CHAT)[0]
    trained = [token for token, learn in zip(ids, mask, strict=True) if learn]
    assert text(tokenizer, trained) == "ciao<|im_end|>"


def test_turns_after_the_last_answer_are_left_out() -> None:
    tokenizer = byte_tokenizer()
    longer = [*CHAT, {"role": "user", "content": "more"}]
    assert conversation_ids(tokenizer, longer) == conversation_ids(tokenizer, CHAT)


@pytest.mark.parametrize("last", [2, 4])
def test_prompt_ids_are_a_prefix_of_the_conversation(last: int) -> None:
    tokenizer = byte_tokenizer()
    prompt = prompt_ids(tokenizer, CHAT[:last])
    assert conversation_ids(tokenizer, CHAT[: last + 1])[0][: len(prompt)] == prompt


def test_prompt_is_a_prefix_even_where_tokens_would_merge_across_the_border() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab={"E": 0, ":": 1, "a": 2, ":a": 3}, merges=[(":", "a")]))
    core.decoder = decoders.Fuse()
    core.pre_tokenizer = pre_tokenizers.Split("E", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="E")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ ':' if m['role'] == 'assistant' }}{{ m['content'] }}E"
        "{% endfor %}{{ ':' if add_generation_prompt }}"
    )
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    assert prompt_ids(tokenizer, chat[:1]) == [2, 0, 1]
    assert conversation_ids(tokenizer, chat) == (
        [2, 0, 1, 2, 0],
        [False, False, False, True, True],
    )


def test_template_that_rewrites_earlier_turns_is_refused_unless_only_the_last_is_trained() -> None:
    tokenizer = byte_tokenizer(REWRITING)
    with pytest.raises(ModelError, match="rewrites earlier turns"):
        conversation_ids(tokenizer, CHAT[1:])
    ids, _ = conversation_ids(tokenizer, CHAT[1:], train_on="last")
    assert text(tokenizer, ids) == "hi<|im_end|>(hidden)<|im_end|>bye<|im_end|>ciao<|im_end|>"


def test_stop_ids_find_the_end_of_turn_token_beside_eos() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    assert stop_ids(tokenizer) == (0, 2)
    assert stop_ids(tokenizer, extra=(7,)) == (0, 2, 7)
    tokenizer.chat_template = None  # no turn end any more, and none remembered
    assert stop_ids(tokenizer) == (0,)


def test_answer_ends_at_the_first_stop_token() -> None:
    tokenizer = byte_tokenizer()
    assert answer_end(tokenizer, [5, 6, 2, 9, 2]) == 3
    assert answer_end(tokenizer, [5, 6]) == 2


def test_decoded_response_has_no_special_tokens_and_no_outer_space() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(" héllo 👍\n<|im_end|>", add_special_tokens=False)["input_ids"]
    assert decode_response(tokenizer, ids) == "héllo 👍"


def test_messages_as_plain_text() -> None:
    assert plain_text(CHAT[1:2]) == "hi"
    assert plain_text(CHAT[1:3]) == "User: hi\n\nAssistant: hello"


def test_built_in_templates_and_files_replace_the_tokenizers_own(tmp_path: Path) -> None:
    byte_tokenizer(None).save_pretrained(tmp_path)
    plain = load_tokenizer(str(tmp_path), chat_template="plain")
    assert (
        render(plain, CHAT[:3], generation_prompt=True)
        == "System: be kind\n\nUser: hi\n\nAssistant: hello<|im_end|>\n\nAssistant:"
    )
    assert load_tokenizer(str(tmp_path), chat_template="chatml").chat_template == CHATML
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    assert render(load_tokenizer(str(tmp_path), chat_template=str(own)), CHAT[:1], False) == (
        "[be kind]"
    )


def test_unknown_template_and_missing_tokenizer_say_what_is_possible(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="'llama9' is neither a file nor one of: chatml, plain"):
        load_tokenizer(str(tmp_path), chat_template="llama9")
    with pytest.raises(ModelError, match="cannot load a tokenizer from .*nowhere"):
        load_tokenizer(str(tmp_path / "nowhere"))
