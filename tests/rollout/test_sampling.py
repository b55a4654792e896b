from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.rollout import SamplingParams
from verl.rollout.sampling import (
    UnusableLogitsError,
    draw,
    filter_top_k_top_p,
    sample_inverse_cdf,
    sampling_logits,
    uniforms,
)

LARGEST_BELOW_ONE = 1 - 2**-53


def half(rows: int = 1) -> torch.Tensor:
    return torch.full((rows,), 0.5, dtype=torch.float64)


def kept(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def test_draw_t_of_a_stream_does_not_depend_on_how_many_are_taken() -> None:
    np.testing.assert_array_equal(uniforms(7, 100)[:3], uniforms(7, 3))
    assert uniforms(7, 3).dtype == np.float64
    assert not np.array_equal(uniforms(7, 3), uniforms(8, 3))
    assert uniforms(2**63 - 1, 1).shape == (1,)
    with pytest.raises(ValueError, match="seed must be >= 0, got -1"):
        uniforms(-1, 3)


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1.0, -0.407605964444), (0.5, -0.1429316285), (2.0, -0.680269670642)],
)
def test_tmp_01_the_logprob_is_that_of_the_tempered_distribution(
    temperature: float, expected: float
) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    ids, logprobs = draw(
        logits, SamplingParams(1, temperature=temperature, top_k=1), half(), vocab_size=3
    )
    assert ids.tolist() == [2]
    assert logprobs.item() == pytest.approx(expected, abs=1e-6)


def test_tmp_04_temperature_zero_is_greedy_with_the_untempered_logprob() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [5.0, 2.0, 3.0]], dtype=torch.bfloat16)
    ids, logprobs = draw(logits, SamplingParams(1, temperature=0.0), half(2), vocab_size=3)
    assert ids.tolist() == [2, 0]
    assert logprobs.dtype == torch.float32
    assert logprobs[0].item() == pytest.approx(-0.407605964444, abs=1e-6)


def test_ids_that_pad_the_vocabulary_take_no_probability() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 50.0]])
    assert sampling_logits(logits, 1.0, 3).tolist() == [[1.0, 2.0, 3.0, -math.inf]]
    _, logprobs = draw(logits, SamplingParams(1, top_k=1), half(), vocab_size=3)
    assert logprobs.item() == pytest.approx(-0.407605964444, abs=1e-6)
    with pytest.raises(ValueError, match=r"vocab_size must be in 1\.\.4"):
        sampling_logits(logits, 1.0, 5)


def test_top_k_and_top_p_keep_the_literal_sets() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    assert kept(filter_top_k_top_p(logits, 2, 1.0)) == [[1, 3]]
    assert kept(filter_top_k_top_p(logits, 0, 0.5)) == [[1]]
    assert kept(filter_top_k_top_p(logits, 0, 0.51)) == [[1, 3]]
    assert kept(filter_top_k_top_p(logits, 0, 0.76)) == [[1, 2, 3]]
    # Of the three that top-k keeps, 0.5 is 0.5 / 0.9 = 0.56: top-p counts what top-k left.
    assert kept(filter_top_k_top_p(logits, 3, 0.55)) == [[1]]
    assert kept(filter_top_k_top_p(logits, 0, 0.55)) == [[1, 3]]
    assert kept(filter_top_k_top_p(logits, 0, 1.0)) == kept(filter_top_k_top_p(logits, 9, 1.0))
    assert kept(filter_top_k_top_p(logits, 0, 1e-9)) == [[1]]


def test_equal_tokens_stay_or_go_together() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0]])
    assert kept(filter_top_k_top_p(logits, 2, 1.0)) == [[1, 2, 3, 4]]
    assert kept(filter_top_k_top_p(logits, 0, 0.5)) == [[1, 2, 3, 4]]
    assert kept(filter_top_k_top_p(logits, 0, 0.4)) == [[1]]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(0.01, 6), top_p=st.floats(0.01, 0.999))
def test_top_p_of_a_wide_vocabulary_equals_its_definition(
    seed: int, scale: float, top_p: float
) -> None:
    # A small scale gives a nucleus beyond the tokens that are looked at first.
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(seed)) * scale
    filtered = filter_top_k_top_p(logits, 0, top_p)
    probs = logits.double().softmax(-1)
    for row, weights, values in zip(filtered, probs, logits, strict=True):
        floor = row[row.isfinite()].min()
        assert torch.equal(row.isfinite(), values >= floor)
        assert weights[values > floor].sum() < top_p + 1e-9
        assert weights[values >= floor].sum() > top_p - 1e-9


def test_filters_change_what_is_drawn_and_never_the_logprob() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    params = SamplingParams(1, top_k=2, top_p=0.9)
    ids, logprobs = draw(logits, params, torch.tensor([0.99], dtype=torch.float64), vocab_size=4)
    assert ids.tolist() == [3]
    assert logprobs.item() == pytest.approx(math.log(0.25), abs=1e-6)


def test_a_banned_id_is_not_drawn_even_when_it_holds_all_probability() -> None:
    logits = torch.tensor([[0.0, 200.0, 1.0]])
    for temperature in (0.0, 1.0):
        params = SamplingParams(1, temperature=temperature)
        high = torch.tensor([0.9], dtype=torch.float64)
        ids, logprobs = draw(logits, params, high, vocab_size=3, banned_ids=[1])
        assert ids.tolist() == [2]
        assert logprobs.item() == pytest.approx(-199.0)


@pytest.mark.parametrize("width", [3, 256, 257, 1000])
@pytest.mark.parametrize("u", [0.0, 0.5, LARGEST_BELOW_ONE])
def test_a_token_of_zero_probability_is_never_drawn(width: int, u: float) -> None:
    for only in {0, width // 2, width - 1}:
        probs = torch.zeros(1, width)
        probs[0, only] = 0.3
        assert sample_inverse_cdf(probs, torch.tensor([u], dtype=torch.float64)).item() == only


def test_the_ends_of_the_unit_interval_give_the_first_and_the_last_possible_token() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).repeat(5, 1)
    draws = torch.tensor([0.0, 0.25 - 1e-12, 0.25, 0.75, LARGEST_BELOW_ONE], dtype=torch.float64)
    assert sample_inverse_cdf(probs, draws).tolist() == [1, 1, 3, 4, 4]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 1500), sparsity=st.floats(0, 0.99))
def test_the_block_search_agrees_with_one_cumulative_sum(
    seed: int, width: int, sparsity: float
) -> None:
    generator = np.random.default_rng(seed)
    weights = generator.exponential(size=width) * (generator.random(width) >= sparsity)
    weights[generator.integers(width)] = 1.0
    probs = torch.from_numpy(weights / weights.sum()).float()
    u = generator.random(8)
    ids = sample_inverse_cdf(probs.expand(8, -1), torch.from_numpy(u)).numpy()
    cdf = np.cumsum(probs.double().numpy())
    assert (probs.numpy()[ids] > 0).all()
    # u lies in the token's own interval, up to the rounding of two orders of summation.
    upper, lower = cdf[ids], cdf[ids] - probs.double().numpy()[ids]
    assert (u * cdf[-1] < upper + 1e-12).all()
    assert (u * cdf[-1] > lower - 1e-12).all()


def test_frequencies_follow_the_probabilities() -> None:
    # 20 cells, so 19 degrees of freedom: the 0.9999 quantile of chi-square is 50.8.
    generator = np.random.default_rng(0)
    weights = generator.dirichlet(np.ones(20))
    probs = torch.zeros(600)
    columns = np.sort(generator.choice(600, 20, replace=False))
    probs[columns] = torch.from_numpy(weights).float()
    for seed in (1, 2, 3):
        n = 5_000
        ids = sample_inverse_cdf(probs.expand(n, -1), torch.from_numpy(uniforms(seed, n)))
        counts = np.array([(ids == column).sum().item() for column in columns])
        assert counts.sum() == n
        assert ((counts - n * weights) ** 2 / (n * weights)).sum() < 50.8


def test_unusable_logits_name_their_row() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = math.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(UnusableLogitsError, match="row 1: the logits hold NaN") as caught:
            draw(logits, SamplingParams(1, temperature=temperature), half(3), vocab_size=4)
        assert caught.value.row == 1
    with pytest.raises(UnusableLogitsError, match=r"row 0: probabilities sum to 0\.0"):
        sample_inverse_cdf(torch.zeros(1, 4), half())
