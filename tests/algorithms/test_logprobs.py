"""Alignment, masks and entropies that the numeric cases do not reach."""

from __future__ import annotations

import pytest
import torch

from verl.algorithms.logprobs import (
    entropy_from_logits,
    logprobs_from_logits,
    response_logprobs,
    response_mask,
    response_positions,
)


def test_rows_with_prompts_of_different_lengths_are_aligned_each() -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 6, 5), torch.randint(5, (2, 6))
    got = response_logprobs(logits, ids, torch.tensor([2, 4]), temperature=0.7)
    assert got.shape == (2, 4)
    assert torch.allclose(got[0], response_logprobs(logits[:1], ids[:1], 2, 0.7)[0])
    assert torch.allclose(got[1, :2], response_logprobs(logits[1:], ids[1:], 4, 0.7)[0])
    assert got[1, 2:].tolist() == [0.0, 0.0]


def test_value_of_a_token_sits_where_its_logits_sit() -> None:
    assert response_positions(torch.tensor([2, 5]), 3).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_empty_prompt_is_refused_by_row() -> None:
    with pytest.raises(ValueError, match="row 1 is 0"):
        response_positions(torch.tensor([2, 0]), 3)


def test_response_mask_without_stop_ids_and_with_engine_lengths() -> None:
    ids = torch.tensor([[5, 6, 7, 0], [5, 2, 7, 0]])
    assert response_mask(ids, []).all()
    got = response_mask(ids, [2], lengths=torch.tensor([3, 4]))
    assert got.int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    got = logprobs_from_logits(logits, torch.tensor(2))
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(-0.407605964444, abs=1e-6)


def test_half_precision_extremes_have_finite_entropy() -> None:
    logits = torch.tensor([65504.0, -65504.0], dtype=torch.float16, requires_grad=True)
    entropy = entropy_from_logits(logits)
    entropy.backward()
    assert entropy.item() == 0.0
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
