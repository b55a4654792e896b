"""Linear layers with reordered weights give the same numbers and leave no trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from verl.rollout import native
from verl.rollout.base import SamplingParams
from verl.rollout.native import NativeEngine
from verl.rollout.packed import packed_linears

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 7, bias=False)).eval()


@pytest.mark.parametrize("shape", [(1, 24), (7, 24), (5, 3, 24), (24, 24)])
def test_same_numbers_for_any_number_of_rows(shape: tuple[int, ...]) -> None:
    model, value = layers(), torch.randn(shape)
    with torch.inference_mode():
        plain = model(value)
        with packed_linears(model, rows=8):
            packed = model(value)
    assert packed.shape == plain.shape
    assert torch.allclose(packed, plain, atol=1e-5)


def test_layers_are_as_before_even_after_an_error() -> None:
    model = layers()
    with pytest.raises(RuntimeError), packed_linears(model, rows=8):
        assert "forward" in vars(model[0])
        raise RuntimeError
    assert "forward" not in vars(model[0]) and "forward" not in vars(model[2])


def test_new_weights_are_packed_anew() -> None:
    model, value = layers(), torch.randn(4, 24)
    with torch.inference_mode(), packed_linears(model, rows=4):
        before = model(value)
    with torch.no_grad():
        model[2].weight.mul_(2)
    with torch.inference_mode(), packed_linears(model, rows=4):
        assert torch.allclose(model(value), 2 * before, atol=1e-5)


def test_other_layers_stay_as_they_are() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(Special(4, 4), nn.Linear(4, 4).bfloat16())
    with packed_linears(model, rows=4):
        assert all("forward" not in vars(module) for module in model)


def test_the_engine_decodes_with_packed_layers_where_that_pays(
    llama: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.7)
    prompts, seeds = [[5, 6, 7], [8, 9]], [1, 2]
    seen: list[bool] = []
    llama.get_output_embeddings().register_forward_hook(
        lambda module, args, output: seen.append("forward" in vars(module))
    )
    answers = []
    for pays in (False, True):
        monkeypatch.setattr(native, "packing_pays", lambda pays=pays: pays)
        engine = NativeEngine(llama, 97, pad_token_id=0)
        answers.append(engine.generate(prompts, params, seeds))
    plain, packed = answers
    assert set(seen[: len(seen) // 2]) == {False} and set(seen[len(seen) // 2 :]) == {True}
    assert [c.ids for c in plain] == [c.ids for c in packed]
    for one, other in zip(plain, packed, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
