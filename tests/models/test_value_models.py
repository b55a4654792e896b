"""Critics and reward models: heads, their initialisation, outputs, export."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.conftest import byte_tokenizer, save_tiny
from verl.config.schema import CriticModel, RewardModel
from verl.engines.torch_engine import TorchEngine
from verl.errors import ModelError
from verl.models.chat import reward_input
from verl.models.loading import load_reward_model, load_value_model, save_model
from verl.rewards.model import reward_rows

PAIRS = [("hi", "a longer answer than the other one"), ("what is it?", "no"), ("x", "y")]


def reward(path: Path, **settings: Any) -> RewardModel:
    return RewardModel(pretrained_path=str(path), **settings)


def critic(path: Path, seed: int = 1, **settings: Any) -> Any:
    return load_value_model(CriticModel(pretrained_path=str(path), **settings), "critic", seed)


def classifier(folder: Path, outputs: int, kind: str = "llama") -> Path:
    """A seq-cls checkpoint with `outputs` labels, as transformers users write it."""
    from transformers import AutoConfig

    base = save_tiny(folder / "base", kind)
    config = AutoConfig.from_pretrained(base, num_labels=outputs)
    config.pad_token_id = None
    torch.manual_seed(4)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        model.score.weight.normal_()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def drop_head(folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("outputs", [2, 10])
def test_c01_c14_many_outputs_need_an_index(outputs: int, tmp_path: Path) -> None:
    path = classifier(tmp_path, outputs)
    with pytest.raises(ModelError, match=rf"{outputs} outputs.*score_index.* 0 to {outputs - 1}"):
        load_reward_model(reward(path))
    with pytest.raises(ModelError, match=rf"score_index is {outputs}, but .* {outputs} output"):
        load_reward_model(reward(path, score_index=outputs))


def test_c14_index_picks_the_output(tmp_path: Path) -> None:
    path = classifier(tmp_path, 10)
    loaded = load_reward_model(reward(path, score_index=7))
    rows = reward_rows([reward_input(loaded.tokenizer, *PAIRS[0])])
    plain = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        expected = plain(rows.ids[0][None]).logits[0, 7]
    score = TorchEngine(loaded, torch.device("cpu"), torch.float32, 512).values(rows)
    assert score[0].item() == pytest.approx(expected.item(), abs=1e-6)


def test_index_beyond_a_single_output_is_refused(tiny_reward: Path) -> None:
    with pytest.raises(ModelError, match=r"score_index is 3, but .* has 1 output"):
        load_reward_model(reward(tiny_reward, score_index=3))


def test_c01_critic_head_is_forced_to_one_output_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        loaded = critic(classifier(tmp_path, 2))
    assert loaded.model.score.weight.shape == (1, 32)
    assert "has 2 outputs; a new head with one replaces it" in caplog.text
    assert "critic: new value head" in caplog.text


@pytest.mark.parametrize("stored", ["language model", "classifier without head"])
def test_c02_reward_model_without_head_is_refused(
    stored: str, tiny_llama: Path, tmp_path: Path
) -> None:
    path = tiny_llama if stored == "language model" else drop_head(classifier(tmp_path, 1))
    with pytest.raises(ModelError, match=r"no score head.*random numbers.*verl rm"):
        load_reward_model(reward(path))


def test_c02_new_critic_head_has_the_right_spread_and_its_own_seed(tmp_path: Path) -> None:
    width = 2048
    sizes = {"hidden_size": width, "num_hidden_layers": 1, "intermediate_size": 8}
    path = save_tiny(tmp_path, **sizes)
    head = critic(path, seed=5).model.score.weight
    assert head.std().item() == pytest.approx(1 / math.sqrt(width + 1), rel=0.1)
    assert head.mean().item() == pytest.approx(0.0, abs=0.002)
    torch.manual_seed(99)  # the global stream has no part in it
    assert torch.equal(critic(path, seed=5).model.score.weight, head)
    assert not torch.equal(critic(path, seed=6).model.score.weight, head)


def test_critic_keeps_the_head_of_a_reward_model_unless_told_otherwise(tiny_reward: Path) -> None:
    stored = load_reward_model(reward(tiny_reward)).model.score.weight
    assert torch.equal(critic(tiny_reward).model.score.weight, stored)
    fresh = critic(tiny_reward, value_head_init="random").model.score.weight
    assert not torch.equal(fresh, stored)


def test_missing_trunk_weights_are_refused(tiny_reward: Path, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_reward, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"weights missing.*model\.norm\.weight"):
        load_reward_model(reward(tmp_path))


def test_c09_reward_model_with_a_longer_tokenizer_gets_a_row(tmp_path: Path) -> None:
    path = classifier(tmp_path, 1)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(path)
    loaded = load_reward_model(reward(path))
    assert loaded.model.get_input_embeddings().weight.shape[0] == 260
    assert loaded.vocab_size == 260


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_export_gives_plain_transformers_the_same_scores_in_a_padded_batch(
    kind: str, tmp_path: Path
) -> None:
    base = save_tiny(tmp_path / "base", kind, initializer_range=0.3)
    loaded = load_value_model(reward(base), "reward_model", seed=3)
    inputs = [reward_input(loaded.tokenizer, *pair) for pair in PAIRS]
    ours = TorchEngine(loaded, torch.device("cpu"), torch.float32, 64).values(reward_rows(inputs))
    save_model(loaded, tmp_path / "out")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    batch = tokenizer.pad({"input_ids": [i.ids for i in inputs]}, return_tensors="pt")
    assert batch["attention_mask"].sum(-1).tolist() == [len(i.ids) for i in inputs]
    with torch.no_grad():
        theirs = plain(**batch).logits[:, 0]
    assert plain.config.num_labels == 1
    assert len(set(ours.tolist())) == 3
    assert torch.allclose(theirs, ours, atol=1e-5)
