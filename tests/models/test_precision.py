"""Which dtype a name stands for on a device."""

from __future__ import annotations

import pytest
import torch

from verl.models import precision


def test_named_precision_is_taken_as_it_is() -> None:
    assert precision.resolve_dtype("float32", "cpu") == torch.float32
    assert precision.resolve_dtype("bfloat16", "cpu") == torch.bfloat16


@pytest.mark.parametrize(
    ("ratio", "dtype"), [(0.4, torch.float32), (1.4, torch.float32), (1.6, torch.bfloat16)]
)
def test_auto_takes_bfloat16_only_where_it_was_measured_clearly_faster(
    ratio: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"float32": 10.0, "bfloat16": 10.0 * ratio}
    monkeypatch.setattr(precision, "matmul_rates", lambda device: rates)
    assert precision.resolve_dtype("auto", "cpu") == dtype


def test_rates_are_measured_once() -> None:
    first = precision.matmul_rates("cpu")
    assert first.keys() == {"float32", "bfloat16"}
    assert all(rate > 0 for rate in first.values())
    assert precision.matmul_rates("cpu") is first
