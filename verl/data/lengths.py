"""Length limits in tokens, applied in one place.

In: token ids, a limit and the policy of `data.overlong`. Out: the ids to use, which are the ids
sent to the rollout and the ids trained on; or, for a whole data set before the first step, the
rows that stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from verl.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from verl.data.datasets import RowDataset

Overlong = Literal["error", "drop", "truncate_left"]

logger = logging.getLogger(__name__)

_NAMED_ROWS = 5


class Kept(NamedTuple):
    """Indices of the rows that stay, in file order, and the number of rows left out."""

    indices: list[int]
    dropped: int


def apply_length_limit(
    ids: Sequence[int], limit: int | None, policy: str, where: str
) -> list[int] | None:
    """Return the ids to use in place of `ids`.

    Args:
        limit: most tokens; exactly `limit` is allowed. None is no limit.
        policy: `error`; `drop`, which returns None; `truncate_left`, which keeps the end.
        where: place of the row (file:row and column), for the message.

    Raises:
        DataError: longer than the limit and the policy is `error`.
        ConfigError: the policy is unknown.
    """
    _check_policy(policy)
    if limit is None or len(ids) <= limit:
        return list(ids)
    if policy == "error":
        raise DataError(_too_long([(where, len(ids))], limit))
    return None if policy == "drop" else list(ids[-limit:])


def limited_prompt_ids(
    tokenizer: Any, prompt: str | list[Any], limit: int | None, policy: str, where: str
) -> list[int] | None:
    """Tokenise a prompt and apply the limit; see `apply_length_limit`.

    Raises:
        DataError: too long under `error`, or the chat template refuses the prompt.
    """
    return apply_length_limit(encode_prompt(tokenizer, prompt, where), limit, policy, where)


def encode_prompt(tokenizer: Any, prompt: str | list[Any], where: str) -> list[int]:
    """Return the ids of a prompt; a refusal of the chat template names the row and the roles.

    Raises:
        DataError: the chat template or the tokenizer refuses the prompt, or it has no tokens.
    """
    from verl.models.chat import prompt_ids

    try:
        ids = prompt_ids(tokenizer, prompt)
    except (ModelError, TypeError, ValueError) as error:
        # Templates that add message parts fail with TypeError where a part is missing.
        raise DataError(f"{where}: prompt: {error}") from error
    if not ids:
        raise DataError(f"{where}: prompt: has no tokens")
    return ids


def tokenize_prompts(
    dataset: RowDataset, tokenizer: Any, limit: int | None, overlong: str = "error"
) -> Kept:
    """Tokenise every prompt of an rl data set once, before the first step.

    Returns:
        The rows to use, and how many were left out (`drop`). Logged where any is too long.

    Raises:
        DataError: a row breaks the schema or the chat template refuses it; or, with `error`,
            prompts are longer than `limit` (all are counted, the first are named).
    """

    def length(row: Mapping[str, Any], where: str) -> int:
        return len(encode_prompt(tokenizer, row["prompt"], where))

    return keep_rows(dataset, length, limit, overlong)


def keep_rows(
    dataset: RowDataset,
    length_of: Callable[[Mapping[str, Any], str], int],
    limit: int | None,
    overlong: str,
) -> Kept:
    """Measure every row and apply the policy to the data set as a whole.

    Args:
        length_of: (row, place of the row) -> tokens; for a pair, those of its longer side.

    Raises:
        DataError: with `error`, rows are longer than `limit`; or no row is left.
    """
    _check_policy(overlong)
    kept, long_rows = [], []
    for index in range(len(dataset)):
        where = dataset.where(index)
        tokens = length_of(dataset[index], where)
        if limit is None or tokens <= limit:
            kept.append(index)
        else:
            long_rows.append((where, tokens))
            if overlong == "truncate_left":
                kept.append(index)
    if not long_rows:
        return Kept(kept, 0)
    if overlong == "error":
        raise DataError(_too_long(long_rows, limit or 0))
    did = "left out" if overlong == "drop" else "shortened from the left"
    logger.warning(
        "%s: %d of %d rows are longer than %d tokens and are %s (data.overlong=%s)",
        dataset.path, len(long_rows), len(dataset), limit, did, overlong,
    )  # fmt: skip
    if not kept:
        raise DataError(
            f"{dataset.path}: no rows left: all {len(dataset)} are longer than {limit} tokens and "
            "data.overlong=drop; raise data.seq_length or use data.overlong=truncate_left"
        )
    return Kept(kept, len(dataset) - len(kept))


def _too_long(rows: Iterable[tuple[str, int]], limit: int) -> str:
    rows = list(rows)
    named = ", ".join(f"{where} ({tokens} tokens)" for where, tokens in rows[:_NAMED_ROWS])
    more = f" and {len(rows) - _NAMED_ROWS} more" if len(rows) > _NAMED_ROWS else ""
    longest = max(tokens for _, tokens in rows)
    return (
        f"{len(rows)} row(s) longer than the limit of {limit} tokens: {named}{more}. "
        f"Raise the limit (data.seq_length, data.prompt_length) to fit {longest} tokens, "
        "or set data.overlong to drop or truncate_left"
    )


def _check_policy(policy: str) -> None:
    if policy not in get_args(Overlong):
        known = ", ".join(get_args(Overlong))
        raise ConfigError(f"data.overlong: {policy!r} is not one of {known}")
