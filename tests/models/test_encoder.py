"""Encoder reward models (BERT, RoBERTa, DeBERTa): pair input, limits, scores, training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from tests.engines.conftest import CPU
from tests.models.test_reward_input import word_tokenizer
from verl.algorithms.preference import bradley_terry
from verl.config.schema import Config, Optimizer, RewardModel
from verl.data.datasets import RowDataset
from verl.engines.torch_engine import TorchEngine, build_optimizer
from verl.errors import ModelError
from verl.models.chat import reward_input
from verl.models.loading import LoadedModel, load_reward_model, load_value_model, save_model
from verl.rewards.model import ModelReward, reward_rows
from verl.trainer.reward_model import encode_pairs, evaluate_pairs, pair_plan
from verl.workers.build import build_critic

WORDS = "why how because so it is not good bad very"
SIZES = {
    "vocab_size": 4 + len(WORDS.split()),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "initializer_range": 0.5,
}


def save_bert(
    folder: Path, positions: int = 16, model: Any = BertForSequenceClassification
) -> Path:
    torch.manual_seed(1)
    config = BertConfig(**SIZES, max_position_embeddings=positions, num_labels=1)
    model(config).save_pretrained(folder)
    word_tokenizer(WORDS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


def section(path: Path) -> RewardModel:
    return RewardModel(pretrained_path=str(path))


def engine_of(loaded: LoadedModel, budget: int = 40) -> TorchEngine:
    return TorchEngine(loaded, CPU, torch.float32, budget)


QUESTIONS = ["why", "how is it", "why is it not so"]
ANSWERS = ["because it is so", "good", "very very bad"]


def test_scores_in_a_batch_are_those_of_plain_transformers_alone(bert: Path) -> None:
    source = ModelReward(engine_of(load_reward_model(section(bert))))
    plain = AutoModelForSequenceClassification.from_pretrained(bert).eval()
    expected = []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        encoded = source.tokenizer(question, answer, return_tensors="pt")
        assert encoded["token_type_ids"].any()
        with torch.no_grad():
            expected.append(plain(**encoded).logits[0, 0])
    scores = source.score(QUESTIONS, ANSWERS)
    assert scores.std() > 0.1
    assert torch.allclose(scores, torch.stack(expected), atol=1e-5)


def test_c12_long_input_keeps_the_response_end_and_is_counted(bert: Path) -> None:
    source = ModelReward(engine_of(load_reward_model(section(bert))), max_length=512)
    assert source.max_length == 16  # what the model has positions for, whatever is asked
    answer = " ".join(["not"] * 30 + ["very", "good"])
    scores = source.score([*QUESTIONS, "why " * 9], [*ANSWERS, answer])
    assert scores.isfinite().all()
    assert source.truncated == 1
    read = reward_input(source.tokenizer, "why " * 9, answer, source.max_length)
    assert len(read.ids) == 16
    assert source.tokenizer.decode(read.ids[-3:]) == "very good [SEP]"
    assert read.type_ids == [0] + [1] * 15


def test_c12_positions_of_roberta_start_behind_its_padding(tmp_path: Path) -> None:
    config = RobertaConfig(**SIZES, max_position_embeddings=16, num_labels=1, pad_token_id=0)
    RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    word_tokenizer(WORDS).save_pretrained(tmp_path)
    loaded = load_reward_model(section(tmp_path))
    assert loaded.max_length == 15
    rows = reward_rows([reward_input(loaded.tokenizer, "why " * 30, "so", loaded.max_length)])
    rows.type_ids[0].zero_()  # RoBERTa has one segment
    assert engine_of(loaded).values(rows).isfinite().all()


def test_deberta_loads_though_it_has_no_sdpa_attention(tmp_path: Path) -> None:
    config = DebertaV2Config(**SIZES, max_position_embeddings=16, num_labels=1)
    DebertaV2ForSequenceClassification(config).save_pretrained(tmp_path)
    word_tokenizer(WORDS).save_pretrained(tmp_path)
    source = ModelReward(engine_of(load_reward_model(section(tmp_path))))
    together = source.score(QUESTIONS, ANSWERS)
    alone = [source.score([q], [a])[0] for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    assert torch.allclose(together, torch.stack(alone), atol=1e-5)


def test_c02_encoder_without_head_is_refused_or_seeded(tmp_path: Path) -> None:
    path = save_bert(tmp_path, model=BertForMaskedLM)
    with pytest.raises(ModelError, match="no score head"):
        load_reward_model(section(path))
    first, second, other = (
        load_value_model(section(path), "reward_model", seed=s).model.classifier.weight
        for s in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_encoder_as_critic_is_refused(bert: Path) -> None:
    config = Config()
    config.model.reward_model.pretrained_path = str(bert)
    with pytest.raises(ModelError, match=r"is an encoder.*model\.critic\.pretrained_path"):
        build_critic(config, CPU)


def test_one_training_step_on_pairs_and_export(bert: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    pairs = [("why", "because so", "not"), ("how is it", "good", "it is very very bad"),
             ("why", "so", "because it is so")]  # fmt: skip
    lines = []
    for i, (prompt, *sides) in enumerate(pairs):
        row = {"prompt": [{"role": "user", "content": prompt}], "margin": i / 10}
        row |= {
            key: [{"role": "assistant", "content": text}]
            for key, text in zip(("chosen", "rejected"), sides, strict=True)
        }
        lines.append(json.dumps(row) + "\n")
    file.write_text("".join(lines))
    rows = RowDataset(file, "rm")
    engine = engine_of(load_value_model(section(bert), "reward_model", seed=1), budget=20)
    build_optimizer(engine, Optimizer(lr_schedule="constant"), 1e-2, 10)
    encoded = encode_pairs(engine.loaded.tokenizer, rows, [0, 1, 2], limit=16)
    assert encoded.margins.tolist() == pytest.approx([0.0, 0.1, 0.2])
    plan = pair_plan(engine, encoded.inputs)
    assert len(plan) > 1
    assert sorted(i for part in plan for i in part) == list(range(6))
    assert all(part[0::2] == [i - 1 for i in part[1::2]] for part in plan)

    def loss(outputs: dict[str, Tensor], index: Tensor) -> Tensor:
        scores = outputs["values"]
        return bradley_terry(scores[0::2], scores[1::2]).sum() / 3

    before = evaluate_pairs(engine, rows, [0, 1, 2], 16)
    for _ in range(5):
        total = engine.backward(reward_rows(encoded.inputs), loss, plan=plan)
        assert not engine.step().skipped
    after = evaluate_pairs(engine, rows, [0, 1, 2], 16)
    assert total > after["eval/loss"]
    assert after["eval/loss"] < before["eval/loss"]
    assert 0 <= after["eval/accuracy_ci_low"] <= after["eval/accuracy"] <= 1
    save_model(engine.loaded, tmp_path / "out")
    again = engine_of(load_reward_model(section(tmp_path / "out")))
    assert evaluate_pairs(again, rows, [0, 1, 2], 16) == pytest.approx(after, abs=1e-5)
