"""Conversations to token ids: the one place where text becomes model input.

In: chat messages (or plain text) and a tokenizer. Out: ids for the policy's prompt, for SFT, and
for the reward model. Training, evaluation and PPO call the same functions.

A conversation is tokenised turn by turn, so the ids of a prompt are always a prefix of the ids of
prompt + response, and what was sampled is what is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from verl.errors import ModelError

Message = dict[str, Any]
Prompt = str | list[Message]

#: Templates that can be named in `chat_template`.
BUILTIN_TEMPLATES: dict[str, str] = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{{ message['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "Assistant: {{ message['content'] }}{{ eos_token }}\n\n"
        "{% else %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
}


class RewardInput(NamedTuple):
    """What a reward model reads: token ids and, for encoders trained on pairs, segment ids."""

    ids: list[int]
    type_ids: list[int] | None
    truncated: bool


def load_tokenizer(
    path: str,
    gguf_file: str | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load a tokenizer and set its chat template when one is named.

    Raises:
        ModelError: nothing loadable at `path`, or `chat_template` is neither a built-in name
            (`chatml`, `plain`) nor a file.
    """
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if gguf_file:
        options["gguf_file"] = gguf_file
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"cannot load a tokenizer from {path!r}: {error}. "
            "Give a hub id or a folder that holds tokenizer files."
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = _template_text(chat_template)
    return tokenizer


def _template_text(name: str) -> str:
    if name in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[name]
    file = Path(name)
    if not file.is_file():
        known = ", ".join(sorted(BUILTIN_TEMPLATES))
        raise ModelError(f"chat_template {name!r} is neither a file nor one of: {known}")
    return file.read_text(encoding="utf-8")


def render(tokenizer: Any, messages: Sequence[Message], generation_prompt: bool) -> str:
    """Return the template's text for `messages`; errors of the template name roles and cause."""
    from jinja2.exceptions import TemplateError

    if tokenizer.chat_template is None:
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, and the prompt is "
            "a list of messages. Set `chat_template` of that model to `plain`, `chatml` or a "
            "Jinja file."
        )
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation_prompt
        )
    except TemplateError as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ModelError(
            f"the chat template of {tokenizer.name_or_path!r} refuses the roles [{roles}]: {error}"
        ) from error


def _encode(tokenizer: Any, text: str) -> list[int]:
    # The template has already written every special token it wants, a BOS included.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _open_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of plain text with the tokenizer's BOS, but without an EOS it would add at the end."""
    ids = list(tokenizer(text)["input_ids"])
    end = tokenizer.eos_token_id
    added = ids[-1:] == [end] and _encode(tokenizer, text)[-1:] != [end]
    return ids[:-1] if added else ids


def as_messages(tokenizer: Any, prompt: Prompt) -> list[Message] | None:
    """Messages of a prompt; None for plain text that a tokenizer without template takes as is."""
    # Prompts of a data loader are text that carries its conversation.
    prompt = getattr(prompt, "messages", None) or prompt
    if not isinstance(prompt, str):
        return list(prompt)
    if tokenizer.chat_template is None:
        return None
    return [{"role": "user", "content": str(prompt)}]


def prompt_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Ids of a prompt that ends where the assistant is to begin.

    Messages go through the chat template with its generation prompt. A plain string is one user
    turn when there is a template, and the raw text with the tokenizer's own BOS when there is none.
    """
    messages = as_messages(tokenizer, prompt)
    if messages is None:
        return _open_ids(tokenizer, str(prompt))
    return _encode(tokenizer, render(tokenizer, messages, generation_prompt=True))


def conversation_ids(
    tokenizer: Any,
    messages: Sequence[Message],
    train_on: Literal["assistant", "last"] = "assistant",
) -> tuple[list[int], list[bool]]:
    """Ids of a conversation and, per token, whether it carries loss.

    Loss is on an assistant turn's text and the token that ends the turn, never on the header
    before it or the white space after it.
    """
    ids: list[int] = []
    mask: list[bool] = []
    done = ""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    # With "last" everything before the last answer is one prompt, tokenised as in `prompt_ids`.
    for index in answers if train_on == "assistant" else answers[-1:]:
        before = render(tokenizer, messages[:index], generation_prompt=True)
        after = render(tokenizer, messages[: index + 1], generation_prompt=False)
        context = _encode(tokenizer, _rest(tokenizer, before, done))
        answer = _encode(tokenizer, _rest(tokenizer, after, before))
        end = answer_end(tokenizer, answer)
        ids += context + answer
        mask += [False] * len(context) + [True] * end + [False] * (len(answer) - end)
        done = after
    return ids, mask


def _rest(tokenizer: Any, text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise ModelError(
            f"the chat template of {tokenizer.name_or_path!r} rewrites earlier turns when a later "
            "one is added, so prompt and response cannot be told apart. Set `chat_template` to one "
            "that only appends."
        )
    return text[len(prefix) :]


def answer_end(tokenizer: Any, ids: Sequence[int]) -> int:
    """Number of leading ids up to and including the token that ends the turn."""
    stops = set(stop_ids(tokenizer))
    for index, token in enumerate(ids):
        if token in stops:
            return index + 1
    return len(ids)


def stop_ids(tokenizer: Any, extra: Sequence[int] = ()) -> tuple[int, ...]:
    """Ids that end a response: end of sequence, the template's end of turn, and `extra`."""
    found = set(extra)
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    turn_end = _turn_end_id(tokenizer)
    if turn_end is not None:
        found.add(turn_end)
    return tuple(sorted(found))


def _turn_end_id(tokenizer: Any) -> int | None:
    """The special token that the template writes right after an assistant's text, if any."""
    cached = getattr(tokenizer, "_verl_turn_end", None)
    if cached is not None and cached[0] == tokenizer.chat_template:
        return cached[1]
    found = None
    if tokenizer.chat_template is not None:
        marker = "verl"
        ask = [{"role": "user", "content": marker}]
        text = render(tokenizer, [*ask, {"role": "assistant", "content": marker}], False)
        tail = _encode(tokenizer, text[text.rindex(marker) + len(marker) :])
        special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
        found = next((token for token in tail if token in special), None)
    tokenizer._verl_turn_end = (tokenizer.chat_template, found)
    return found


def reward_input(
    tokenizer: Any, prompt: Prompt, response: str | Sequence[Message], max_length: int | None = None
) -> RewardInput:
    """What the reward model reads for one conversation.

    With a chat template: the template's text of prompt and response, as a finished turn. Without
    one: the encoder's pair form (question, answer) where the tokenizer makes segment ids, else
    prompt, response and the end-of-sequence token. A conversation longer than `max_length` loses
    its beginning, never the end of the response.
    """
    if tokenizer.chat_template is None:
        ids, types = _pair_ids(tokenizer, prompt, response)
    else:
        ids, types = _chat_ids(tokenizer, prompt, response), None
    truncated = max_length is not None and len(ids) > max_length
    if truncated and max_length is not None:
        lead = min(_leading_special(tokenizer, ids), max_length - 1)
        start = len(ids) - (max_length - lead)
        ids = ids[:lead] + ids[start:]
        types = types[:lead] + types[start:] if types is not None else None
    return RewardInput(ids, types, truncated)


def reward_ids(
    tokenizer: Any, prompt: Prompt, response: str | Sequence[Message], max_length: int | None = None
) -> list[int]:
    """The ids of `reward_input`."""
    return reward_input(tokenizer, prompt, response, max_length).ids


def _leading_special(tokenizer: Any, ids: Sequence[int]) -> int:
    """1 when the sequence starts with a BOS or CLS token, which a cut must keep."""
    starts = {tokenizer.bos_token_id, tokenizer.cls_token_id} - {None}
    return int(bool(ids) and ids[0] in starts)


def _chat_ids(tokenizer: Any, prompt: Prompt, response: str | Sequence[Message]) -> list[int]:
    messages = as_messages(tokenizer, prompt) or []
    turns = (
        [{"role": "assistant", "content": response}]
        if isinstance(response, str)
        else list(response)
    )
    before = render(tokenizer, messages, generation_prompt=True)
    after = render(tokenizer, [*messages, *turns], generation_prompt=False)
    if not after.startswith(before):
        return _encode(tokenizer, after)
    return _encode(tokenizer, before) + _encode(tokenizer, after[len(before) :])


def _pair_ids(
    tokenizer: Any, prompt: Prompt, response: str | Sequence[Message]
) -> tuple[list[int], list[int] | None]:
    question = prompt if isinstance(prompt, str) else plain_text(prompt)
    answer = response if isinstance(response, str) else plain_text(response)
    if tokenizer.cls_token_id is not None or tokenizer.sep_token_id is not None:
        encoded = tokenizer(question, answer)
        return list(encoded["input_ids"]), encoded.get("token_type_ids")
    ids = _open_ids(tokenizer, question) + _encode(tokenizer, answer)
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(int(tokenizer.eos_token_id))
    return ids, None


def plain_text(messages: Sequence[Message]) -> str:
    """Messages as text for models without a chat template: a lone turn is its content."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{m['role'].capitalize()}: {m['content']}" for m in messages)


def decode_response(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of a response without special tokens, for scoring and reading; never re-encoded."""
    return tokenizer.decode(list(ids), skip_special_tokens=True).strip()
