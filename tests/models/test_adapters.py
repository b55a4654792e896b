"""What is trained, what stays frozen, and the frozen twin for the reference policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.conftest import save_tiny
from tests.engines.conftest import CPU, draw_rows, policy, train, value_model
from verl.config.schema import ActorModel, Config, Lora, ReferenceModel
from verl.engines.torch_engine import TorchEngine
from verl.errors import ModelError
from verl.models.adapters import frozen_copy, prepare_for_training, transformer_blocks
from verl.models.loading import load_causal_lm, save_model
from verl.workers.actor import ActorWorker
from verl.workers.build import build_reference

ROWS = draw_rows(1, [(3, 4), (2, 6)])


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def take_steps(engine: TorchEngine, count: int = 3) -> None:
    train(engine, lr=1e-2)
    kind = "values" if hasattr(engine.model, "score") else "logprobs"
    for _ in range(count):
        engine.backward(ROWS, lambda out, index: -out[kind].sum())
        assert not engine.step().skipped


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_train_layers_freezes_embeddings_and_lower_blocks(kind: str, tmp_path: Path) -> None:
    engine = policy(save_tiny(tmp_path, kind), train_layers=1)
    blocks = transformer_blocks(engine.model)
    assert len(blocks) == 2
    top = {id(p) for p in blocks[1].parameters()}
    trained = {n for n, p in engine.trainable()}
    assert {n for n, p in engine.model.named_parameters() if id(p) in top} < trained
    norm = "transformer.ln_f.weight" if kind == "gpt2" else "model.norm.weight"
    assert norm in trained
    assert not any("embed" in n or ".wte" in n or ".wpe" in n or "lm_head" in n for n in trained)
    before = copies(engine.model)
    train(engine)
    engine.backward(ROWS, lambda out, index: -out["logprobs"].sum())
    for name, parameter in engine.model.named_parameters():
        assert (parameter.grad is None) == (name not in trained), name
    take_steps(engine)
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in trained), name


def test_train_layers_of_a_critic_trains_its_head(tiny_llama: Path) -> None:
    engine = value_model(tiny_llama, train_layers=1)
    names = {n for n, _ in engine.trainable()}
    assert "score.weight" in names
    assert "model.embed_tokens.weight" not in names
    assert not any(".layers.0." in n for n in names)


def test_norms_of_the_embeddings_stay_frozen(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_labels=1
    )
    model = BertForSequenceClassification(config)
    prepare_for_training(model, ActorModel(train_layers=1), "reward_model")
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert "bert.embeddings.LayerNorm.weight" in frozen
    assert all("embeddings" in n or ".layer.0." in n for n in frozen)
    assert model.classifier.weight.requires_grad


def test_more_layers_than_there_are_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.actor\.train_layers is 5, but there are 2"):
        policy(tiny_llama, train_layers=5)


def test_f13_frozen_copy_shares_frozen_storage_only(tiny_llama: Path) -> None:
    engine = policy(tiny_llama, train_layers=1)
    train(engine)
    twin = frozen_copy(engine.model)
    mine = dict(twin.named_parameters())
    for name, parameter in engine.model.named_parameters():
        shared = mine[name].data_ptr() == parameter.data_ptr()
        assert shared == (not parameter.requires_grad), name
        assert not mine[name].requires_grad
    before = copies(twin)
    take_steps(engine)
    assert all(torch.equal(p, before[n]) for n, p in mine.items())
    assert any(not torch.equal(p, before[n]) for n, p in engine.trainable())


def test_f13_frozen_copy_keeps_tied_weights_tied(tiny_qwen2: Path) -> None:
    model = load_causal_lm(ActorModel(pretrained_path=str(tiny_qwen2)), "actor").model
    twin = frozen_copy(model)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert twin.lm_head.weight is not model.lm_head.weight


@pytest.mark.parametrize("lora", [None, Lora(rank=2, alpha=4)])
def test_f13_reference_stays_at_the_start_while_the_actor_trains(
    lora: Lora | None, tiny_llama: Path
) -> None:
    config = Config()
    config.model.actor = ActorModel(
        pretrained_path=str(tiny_llama), dtype="float32", lora=lora,
        train_layers=None if lora else 1,
    )  # fmt: skip
    config.model.ref_policy = ReferenceModel(inference_dtype="float32")
    engine = policy(tiny_llama, lora=lora, train_layers=config.model.actor.train_layers)
    actor = ActorWorker(engine, rollout=None)
    reference = build_reference(config, CPU, actor)
    assert (reference.engine is engine) == (lora is not None)

    def scores() -> Tensor:
        with reference.context():
            return reference.engine.logprobs(ROWS, 0.7)[0]

    start = scores()
    assert torch.equal(start, policy(tiny_llama).logprobs(ROWS, 0.7)[0])
    assert torch.allclose(start, engine.logprobs(ROWS, 0.7)[0], atol=1e-6)
    take_steps(engine)
    assert torch.equal(scores(), start)
    assert (engine.logprobs(ROWS, 0.7)[0] - start).abs().max() > 0.1


def test_lora_trains_adapters_only_and_exports_a_plain_model(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = policy(tiny_llama, lora=Lora(rank=2, alpha=4))
    assert all("lora_" in name for name, _ in engine.trainable())
    assert engine.packs
    take_steps(engine)
    save_model(engine.export_view(), tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any("lora" in name for name in plain.state_dict())
    rows = ROWS.select([0])
    with torch.no_grad():
        every = torch.log_softmax(plain(rows.ids[0][None]).logits[0, rows.reads[0]], -1)
    expected = every.gather(-1, rows.labels[0][:, None])[:, 0]
    assert torch.allclose(engine.logprobs(rows, 1.0)[0], expected, atol=1e-4)
    assert hasattr(engine.model, "disable_adapter")  # the engine's own model is not merged


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_lora_with_train_layers_adapts_the_top_blocks_only(
    targets: list[str] | str, tiny_llama: Path
) -> None:
    engine = policy(tiny_llama, lora=Lora(rank=2, alpha=4, target_modules=targets), train_layers=1)
    top = len(transformer_blocks(engine.model)) - 1
    names = [name for name, _ in engine.trainable()]
    assert names and all(f".layers.{top}." in name and "lora_" in name for name in names)
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in names}
    assert layers == set(targets) if targets != "all-linear" else len(layers) == 7
    engine.reuse_prefix()
    assert engine.prefix is not None and engine.prefix.depth == top


def test_lora_on_layers_that_are_not_there_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.actor\.lora\.target_modules.*names no linear"):
        policy(tiny_llama, lora=Lora(target_modules=["qkv"]), train_layers=1)
    with pytest.raises(ModelError, match="train_layers is 9, but there are"):
        policy(tiny_llama, lora=Lora(), train_layers=9)


def test_lora_critic_trains_its_head_and_exports(tiny_llama: Path, tmp_path: Path) -> None:
    engine = value_model(tiny_llama, lora=Lora(rank=2, alpha=4, target_modules=["q_proj"]))
    names = {n for n, _ in engine.trainable()}
    assert any("score" in n for n in names)
    assert all("score" in n or "q_proj.lora_" in n for n in names)
    take_steps(engine)
    save_model(engine.export_view(), tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    rows = ROWS.select([1])
    with torch.no_grad():
        expected = plain(rows.ids[0][None, :6]).logits[0, 0]  # read at its last token
    assert engine.values(rows)[4].item() == pytest.approx(expected.item(), abs=1e-4)


def test_lora_without_peft_says_how_to_install(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from verl.errors import MissingDependencyError

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match=r"model\.actor\.lora .*pip install peft"):
        policy(tiny_llama, lora=Lora())
