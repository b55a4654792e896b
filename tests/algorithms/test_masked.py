"""Statistics over valid entries: literal values, along dimensions, in low precision."""

from __future__ import annotations

import pytest
import torch

from verl.algorithms.masked import masked_mean, masked_std, masked_sum, masked_var, masked_whiten

X = torch.tensor([[1.0, 3.0, torch.nan], [5.0, torch.inf, 9.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])


def test_reductions_over_everything_and_along_rows() -> None:
    assert masked_sum(X, MASK).item() == 18.0
    assert masked_sum(X, MASK, dim=1).tolist() == [4.0, 14.0]
    assert masked_mean(X, MASK, dim=1).tolist() == [2.0, 7.0]
    assert masked_var(X, MASK, dim=1).tolist() == [2.0, 8.0]
    assert masked_std(torch.tensor([1.0, 5.0, 3.0]), torch.ones(3)).item() == 2.0


def test_fewer_than_two_entries_have_variance_zero() -> None:
    assert masked_var(X, torch.tensor([[1, 0, 0], [0, 0, 0]]), dim=1).tolist() == [0.0, 0.0]


def test_low_precision_is_summed_in_float32() -> None:
    ones = torch.ones(1000, dtype=torch.bfloat16)
    assert masked_sum(ones, ones).item() == 1000.0
    assert masked_mean(ones, ones).dtype == torch.float32


@pytest.mark.parametrize("value", [0.1, 1e6 + 0.1, 3e30])
def test_equal_entries_whiten_to_exact_zeros(value: float) -> None:
    assert masked_whiten(torch.full((7,), value), torch.ones(7)).tolist() == [0.0] * 7


def test_whiten_without_shift_keeps_the_mean() -> None:
    got = masked_whiten(torch.tensor([1.0, 2.0, 3.0, 7.0]), torch.tensor([1, 1, 1, 0]), False)
    assert got.tolist() == pytest.approx([1.0, 2.0, 3.0, 0.0])
    one = masked_whiten(torch.tensor([9.0, 5.0]), torch.tensor([0, 1]), shift_mean=False)
    assert one.tolist() == [0.0, 5.0]


def test_whiten_of_nothing() -> None:
    assert masked_whiten(torch.tensor([1.0, 2.0]), torch.zeros(2)).tolist() == [0.0, 0.0]
    assert masked_whiten(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)
