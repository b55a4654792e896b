"""The KL registry, its gradients, and the KL of a sequence."""

from __future__ import annotations

import pytest
import torch

from verl.algorithms.kl import kl_penalty, sequence_kl


def test_unknown_estimator_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'k4'.*k1.*k2.*k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


def test_k3_gradient_is_one_minus_the_inverse_ratio() -> None:
    logp = torch.tensor([-1.0, -1.5, -30.0], requires_grad=True)
    kl_penalty(logp, torch.tensor([-1.5, -1.0, -1.0]), "k3").sum().backward()
    assert logp.grad is not None
    # The last token is beyond the bound of 20 nats, where the gradient stops.
    assert logp.grad.tolist() == pytest.approx([0.39346934, -0.64872127, 0.0], abs=1e-6)


def test_k3_keeps_its_digits_near_zero() -> None:
    d = torch.cat([torch.logspace(-9, 0, 20_000), -torch.logspace(-9, 0, 20_000)])
    got = kl_penalty(d, torch.zeros_like(d), "k3")
    assert (got >= 0).all()
    small = torch.tensor([1e-3])
    assert kl_penalty(small, torch.zeros(1), "k3").item() == pytest.approx(4.99833e-7, rel=1e-3)


def test_k3_is_exact_for_a_large_positive_log_ratio() -> None:
    assert kl_penalty(torch.tensor([0.0]), torch.tensor([-50.0]), "k3").item() == 49.0


def test_sequence_kl_sums_tokens_and_averages_rows_that_have_any() -> None:
    kl = torch.tensor([[0.1, 0.2, 9.0], [0.5, torch.nan, torch.nan], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert sequence_kl(kl, mask).item() == pytest.approx(0.4)
    assert sequence_kl(kl, torch.zeros(3, 3)).item() == 0.0
