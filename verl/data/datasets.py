"""Data sets that the trainers read: rows by index, prompts for the tutorial's loop.

In: a file and the kind of its rows, or a configuration. Out: checked rows as plain dicts;
every error names file and row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from verl.config.load import as_config
from verl.data.row_store import open_store
from verl.data.schema import HINTS, REQUIRED, Kind, Message, kind_of, missing_column, row_problems
from verl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from verl.config import Config


class RowDataset(Dataset):
    """Rows of one kind by index, read from disk when asked for.

    Args:
        path: a .jsonl, .jsonl.gz or .parquet file.
        kind: `sft`, `rm` or `rl`; the columns of the file must fit it.
        max_rows: use only the first rows.

    Raises:
        DataError: the file cannot be read, lacks a column, or has no rows.
    """

    def __init__(self, path: str | Path, kind: Kind, max_rows: int | None = None) -> None:
        self.path, self.kind, self.max_rows = Path(path), kind, max_rows
        self._store = open_store(self.path)
        if not len(self._store):
            raise DataError(f"{path}: has no rows")
        self.columns = self._store.columns()
        for column in REQUIRED[kind]:
            if column not in self.columns:
                found = kind_of(self.columns)
                other = f" (its columns are those of {found} rows)" if found else ""
                raise DataError(
                    f"{self.where(0)}: {missing_column(column, self.columns)}{other}; {HINTS[kind]}"
                )

    def __len__(self) -> int:
        return min(len(self._store), self.max_rows or len(self._store))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`; a row that breaks the schema raises `DataError` with its place."""
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path}: row index {index} of {len(self)} rows")
        row = self._store.row(index)
        problems = row_problems(self.kind, row)
        if problems:
            raise DataError(
                f"{self.where(index)}: {'; '.join(problems)}. "
                f"`verl data check {self.path}` lists every bad row"
            )
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process opens the file itself; sending memory-mapped rows would copy them.
        return type(self), (self.path, self.kind, self.max_rows)

    def where(self, index: int) -> str:
        """Return `file:line` of a row, for messages."""
        return f"{self.path}:{self._store.number(index)}"

    def fingerprint(self) -> str:
        """Return a hash of the file's bytes and of the part that is used."""
        digest = hashlib.blake2b(f"{self.kind}/{self.max_rows}/".encode(), digest_size=16)
        with self.path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()


class PromptText(str):
    """What the user asks, as text, carrying the whole conversation before the answer.

    Attributes:
        messages: the chat messages of the prompt, or None where the file has plain text.
    """

    messages: list[Message] | None

    def __new__(cls, text: str, messages: list[Message] | None = None) -> PromptText:
        """Make the text; `messages` does not take part in comparison or hashing."""
        self = super().__new__(cls, text)
        self.messages = messages
        return self


def prompt_text(prompt: str | list[Message]) -> PromptText:
    """Return the last user message of a prompt, or the plain text itself."""
    if isinstance(prompt, str):
        return PromptText(prompt)
    asked = [message["content"] for message in prompt if message["role"] == "user"]
    return PromptText(asked[-1] if asked else prompt[-1].get("content", ""), prompt)


class PromptDataset(Dataset):
    """Prompts for `torch.utils.data.DataLoader`; an item is {"prompt": `PromptText`}.

    The default collation of a DataLoader turns a batch into {"prompt": [PromptText, ...]}.

    Args:
        file_path: a file of rl rows, or of {"prompt": text} rows.
        tokenizer: when given, every prompt is tokenised once now, so that one the chat template
            refuses, or one longer than `prompt_length`, is met here and not in training.
        prompt_length: longest prompt in tokens; needs `tokenizer`.
        overlong: `error`, `drop` or `truncate_left` (the rollout cuts), as in `data.overlong`.
        max_rows: use only the first rows.

    Raises:
        DataError: the file or a prompt cannot be used.
    """

    def __init__(
        self,
        file_path: str | Path,
        tokenizer: Any = None,
        prompt_length: int | None = None,
        overlong: str = "error",
        max_rows: int | None = None,
    ) -> None:
        if prompt_length is not None and tokenizer is None:
            raise ConfigError("PromptDataset: prompt_length is in tokens, so it needs a tokenizer")
        self.rows = RowDataset(file_path, "rl", max_rows)
        self.tokenizer = tokenizer
        self._kept: list[int] | range = range(len(self.rows))
        if tokenizer is not None:
            from verl.data.lengths import tokenize_prompts

            self._kept, _ = tokenize_prompts(self.rows, tokenizer, prompt_length, overlong)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> dict[str, PromptText]:
        """Return {"prompt": text with `.messages`} of prompt `index`."""
        return {"prompt": prompt_text(self.rows[self._kept[index]]["prompt"])}


class DataProvider:
    """The data sets that a configuration names.

    Args:
        config: the tree, or a plain mapping of its settings; `{}` gives the defaults.

    Raises:
        ConfigError: a mapping with an unknown key or a value of the wrong type.
    """

    def __init__(self, config: Config | Mapping[str, Any]) -> None:
        self.config = as_config(config)

    def train(self, kind: Kind) -> RowDataset:
        """Return the rows of `data.train`, at most `data.max_rows`."""
        return self._open("train", kind, self.config.data.max_rows)

    def eval(self, kind: Kind) -> RowDataset:
        """Return the rows of `data.eval`."""
        return self._open("eval", kind, None)

    def _open(self, name: str, kind: Kind, max_rows: int | None) -> RowDataset:
        path = getattr(self.config.data, name)
        if path is None:
            raise ConfigError(
                f"data.{name} is not set; name a file of {kind} rows, for instance "
                f"data.{name}=data/{kind}/{'train' if name == 'train' else 'test'}.parquet"
            )
        try:
            return RowDataset(path, kind, max_rows)
        except DataError as error:
            raise DataError(f"data.{name}: {error}") from None
