"""Small real tokenizers and files for the data tests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHATML = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
STRICT = (
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{{ m['content'] }} {% endfor %}"
)


def word_tokenizer(template: str | None) -> Any:
    """One token per word between spaces, so lengths are easy to state."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<|im_start|>", "<|im_end|>", "w", "user", "assistant", "system"]
    words += [f"w{i}" for i in range(2000)]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def raw_tokenizer() -> Any:
    return word_tokenizer(None)


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    return word_tokenizer(CHATML)


@pytest.fixture(scope="session")
def strict_tokenizer() -> Any:
    return word_tokenizer(STRICT)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write rows (objects, or text as it stands) as a jsonl file and return its path."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in rows]
        data = "".join(line + "\n" for line in lines).encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write
