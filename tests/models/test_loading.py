"""Causal language models: what is loaded, what is refused, what a save keeps."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import byte_tokenizer, save_tiny
from verl.config.schema import ActorModel, RewardModel
from verl.errors import ModelError
from verl.models.loading import load_causal_lm, load_value_model, safe_pad_id, save_model

IDS = torch.tensor([[1, 50, 60, 70, 2, 80]])


def actor(path: Path, **settings: Any) -> Any:
    return load_causal_lm(ActorModel(pretrained_path=str(path), **settings), "actor")


def logits(model: torch.nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def test_model_is_float32_without_dropout_and_knows_its_sizes(tiny_gpt2: Path) -> None:
    loaded = actor(tiny_gpt2)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert not loaded.model.training
    assert all(m.p == 0 for m in loaded.model.modules() if isinstance(m, torch.nn.Dropout))
    assert (loaded.vocab_size, loaded.max_length, loaded.kind) == (259, 256, "causal")


def test_half_precision_checkpoint_becomes_float32(tiny_llama: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert actor(tmp_path).model.lm_head.weight.dtype == torch.float32


def test_c10_tied_embeddings_survive_a_step_and_a_save(tiny_qwen2: Path, tmp_path: Path) -> None:
    loaded = actor(tiny_qwen2)
    model = loaded.model
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    model(IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    save_model(loaded, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    assert torch.equal(logits(plain), logits(model))
    again = actor(tmp_path).model
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))


def test_c10_head_stored_beside_tied_embeddings_loads_as_in_transformers(
    tiny_qwen2: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_qwen2, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = logits(AutoModelForCausalLM.from_pretrained(tiny_qwen2))
    assert torch.equal(logits(actor(tmp_path).model), expected)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_c09_tokenizer_with_one_more_token_gets_a_row(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, kind)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        loaded = actor(tmp_path)
    assert "actor: tokenizer has 260 ids, model 259 rows; resized" in caplog.text
    assert loaded.vocab_size == 260
    model = loaded.model
    assert model.get_input_embeddings().weight.shape[0] == 260
    assert logits(model, torch.tensor([[259, 5], [6, 7]])).shape == (2, 2, 260)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (kind == "qwen2")
    # Every role of the run gets the same new row.
    assert torch.equal(
        actor(tmp_path).model.get_input_embeddings().weight, model.get_input_embeddings().weight
    )


def test_c02_reward_model_as_actor_is_refused(tiny_reward: Path) -> None:
    with pytest.raises(ModelError, match=r"actor: .*lacks weights.*lm_head\.weight"):
        actor(tiny_reward)


def test_pickle_weights_are_refused_with_advice(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    state = AutoModelForCausalLM.from_pretrained(tiny_llama).state_dict()
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pickle weights.*allow_pickle_weights: true"):
        actor(tmp_path)
    allowed = actor(tmp_path, allow_pickle_weights=True)
    assert torch.equal(allowed.model.lm_head.weight, state["lm_head.weight"])


def test_gguf_folder_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "tiny-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"actor: .*set `gguf_file: tiny-q4.gguf`"):
        actor(tmp_path)


def test_torn_weights_and_missing_paths_name_the_role(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"xx")
    with pytest.raises(ModelError, match=f"actor: cannot load '{tmp_path}'"):
        actor(tmp_path)
    with pytest.raises(ModelError, match=r"model\.actor\.pretrained_path is not set"):
        load_causal_lm(ActorModel(), "actor")


def test_g01_generation_config_of_the_folder_is_not_saved_on(
    tiny_llama: Path, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(tiny_llama, source)
    odd = {"repetition_penalty": 5.0, "top_k": 1, "temperature": 0.1, "min_length": 4}
    (source / "generation_config.json").write_text(json.dumps({**odd, "do_sample": True}))
    loaded = actor(source)
    assert torch.equal(logits(loaded.model), logits(actor(tiny_llama).model))
    save_model(loaded, target)
    written = json.loads((target / "generation_config.json").read_text())
    assert not odd.keys() & written.keys()
    assert written["eos_token_id"] == [2]
    assert written["pad_token_id"] == 0


def test_exported_folder_is_plain_transformers(tiny_llama: Path, tmp_path: Path) -> None:
    loaded = actor(tiny_llama, chat_template="plain")
    save_model(loaded, tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert "model.safetensors" in names
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in names)
    assert "verl" not in (tmp_path / "config.json").read_text()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(plain), logits(loaded.model))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template == loaded.tokenizer.chat_template
    assert tokenizer.pad_token == "<|endoftext|>"
    assert loaded.tokenizer.pad_token == "<|im_end|>"  # the one in use is left as it was


def test_padding_id_never_ends_a_conversation() -> None:
    tokenizer = byte_tokenizer()
    assert safe_pad_id(tokenizer, 259) == 0  # not <|im_end|>, though that is pad_token
    tokenizer.eos_token = tokenizer.pad_token = "<|endoftext|>"
    assert safe_pad_id(tokenizer, 259) == 1  # neither EOS nor the template's end of turn


def test_padding_id_of_a_tokenizer_whose_only_special_token_is_eos() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab={"<end>": 0, "a": 1, "b": 2}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    assert safe_pad_id(tokenizer, 3) == 2


def test_value_model_of_a_folder_without_sequence_classifier_is_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(
        MambaConfig(vocab_size=259, hidden_size=8, num_hidden_layers=1, state_size=4)
    ).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="reward_model: cannot load"):
        load_value_model(RewardModel(pretrained_path=str(tmp_path)), "reward_model", seed=0)
