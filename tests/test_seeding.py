"""Seeds: a function of root, purpose and indices, the same everywhere."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from verl.seeding import derive_seed


def test_values_are_fixed() -> None:
    # First 8 bytes of BLAKE2b of "0/rollout/3/1" and "7/value-head", without the lowest bit.
    assert derive_seed(0, "rollout", 3, 1) == 8862366475676394405
    assert derive_seed(7, "value-head") == 229799856911359245


def test_every_argument_matters() -> None:
    seeds = {
        derive_seed(root, purpose, *indices)
        for root in (0, 1)
        for purpose in ("rollout", "minibatches")
        for indices in ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (10,))
    }
    assert len(seeds) == 28


@settings(max_examples=50)
@given(st.integers(0), st.text(), st.lists(st.integers(0)))
def test_seeds_fit_what_generators_take(root: int, purpose: str, indices: list[int]) -> None:
    assert 0 <= derive_seed(root, purpose, *indices) < 2**63
