"""From completions to a batch, from a batch to engine rows, and back."""

from __future__ import annotations

import pytest
import torch

from verl.batch import Batch
from verl.rollout.base import Completion
from verl.workers.layout import assemble, response_rows, scatter

PROMPTS = Batch({}, {"prompt_ids": [[5, 6], [7, 8, 9]], "prompt": ["p", "q"]})


def test_assemble_pads_on_the_right_and_keeps_prompts() -> None:
    batch = assemble(
        PROMPTS, [Completion([10, 11, 2], [-1.0, -2.0, -3.0], "stop"),
                  Completion([12], [-4.0], "length")],
    )  # fmt: skip
    assert batch["input_ids"].tolist() == [[5, 6, 10, 11, 2], [7, 8, 9, 12, 0]]
    assert batch["prompt_length"].tolist() == [2, 3]
    assert batch["response_length"].tolist() == [3, 1]
    assert batch["response_mask"].tolist() == [[True, True, True], [True, False, False]]
    assert batch["rollout_logprobs"].tolist() == [[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]]
    assert batch["finish_reason"] == ["stop", "length"]
    assert batch["prompt"] == ["p", "q"]


def masked_batch(mask: list[list[bool]]) -> Batch:
    return Batch(
        {
            "input_ids": torch.tensor([[5, 6, 10, 11, 12, 13], [7, 8, 9, 14, 0, 0]]),
            "prompt_length": torch.tensor([2, 3]),
            "response_length": torch.tensor([4, 1]),
            "response_mask": torch.tensor(mask),
        }
    )


def test_a03_holes_in_the_mask_are_context_and_not_read() -> None:
    rows = response_rows(
        masked_batch([[True, False, False, True], [True, False, False, False]]), with_labels=True
    )
    assert [ids.tolist() for ids in rows.ids] == [[5, 6, 10, 11, 12, 13], [7, 8, 9, 14]]
    assert [reads.tolist() for reads in rows.reads] == [[1, 4], [2]]
    assert [labels.tolist() for labels in rows.labels or []] == [[10, 13], [14]]


def test_b20_row_without_valid_tokens_reads_nothing() -> None:
    rows = response_rows(
        masked_batch([[False] * 4, [True, False, False, False]]), with_labels=False
    )
    assert rows.read_counts == [0, 1]
    assert rows.labels is None


def test_scatter_puts_outputs_back_where_they_were_read() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, False]])
    back = scatter(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert back.tolist() == [[1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [3.0, 4.0, 0.0]]


def test_empty_prompt_is_refused_because_no_state_chose_the_first_token() -> None:
    batch = masked_batch([[True] * 4, [True, False, False, False]])
    batch = batch.with_columns(prompt_length=torch.tensor([2, 0]))
    with pytest.raises(ValueError, match="prompt of sample 1 has no tokens"):
        response_rows(batch, with_labels=True)


def test_missing_columns_name_the_stage() -> None:
    with pytest.raises(KeyError, match=r"engine needs columns \['prompt_length', 'response_le"):
        response_rows(Batch({"input_ids": torch.zeros(1, 2)}), with_labels=True)
