from __future__ import annotations

import subprocess
import sys

import pytest

from verl.errors import ConfigError
from verl.rollout import SamplingParams, engine_class, rollout_engine


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_tokens", -1),
        ("min_tokens", 9),
        ("stop_token_ids", (3, -1)),
    ],
)
def test_a_value_out_of_range_is_refused_by_field_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        SamplingParams(**{"max_tokens": 8, field: value})


def test_greedy_and_the_extremes_are_accepted_and_a_list_of_stop_ids_is_frozen() -> None:
    params = SamplingParams(
        1, temperature=0.0, top_p=1.0, top_k=0, min_tokens=1, stop_token_ids=[2, 1]
    )
    assert params.stop_token_ids == (2, 1)
    assert hash(params) == hash(
        SamplingParams(1, temperature=0.0, min_tokens=1, stop_token_ids=(2, 1))
    )


def test_the_engine_is_found_by_name_and_a_name_is_given_once() -> None:
    assert engine_class("native").__name__ == "NativeEngine"
    assert engine_class("native").name == "native"
    with pytest.raises(ConfigError, match="no engine 'nativ'; use one of: native"):
        engine_class("nativ")
    with pytest.raises(ValueError, match="'native' is already registered by NativeEngine"):
        rollout_engine("native")(object)


def test_the_protocol_is_importable_without_torch() -> None:
    code = "import sys, verl.rollout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
