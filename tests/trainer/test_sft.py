"""SFT against plain transformers: the same loss, the tokens that carry it, and the metrics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.config.schema import Config
from verl.data.loader import LoaderBatch
from verl.errors import DataError
from verl.models.chat import conversation_ids
from verl.trainer.sft import SFTTask

TURNS = [
    [("user", "2+2?"), ("assistant", "Four.")],
    [
        ("user", "Hi"),
        ("assistant", "Hello."),
        ("user", "And?"),
        ("assistant", "That is all of it."),
    ],
    [("system", "Be brief."), ("user", "Why?"), ("assistant", "No.")],
]
ROWS = [{"messages": [{"role": r, "content": c} for r, c in turns]} for turns in TURNS]


@pytest.fixture
def sft(config: Config, write_rows: Any) -> Config:
    """Three conversations to train on and the same to evaluate."""
    config.data.train = write_rows("train", ROWS)
    config.data.eval = write_rows("eval", ROWS)
    config.data.batch_size = 3
    return config


def plain_losses(folder: Path, task: SFTTask, train_on: Any) -> list[torch.Tensor]:
    """Token losses of each conversation by transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = []
    for row in ROWS:
        ids, mask = conversation_ids(task.tokenizer, row["messages"], train_on)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        every = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        losses.append(every[torch.tensor(mask[1:]).bool()])
    return losses


@pytest.mark.parametrize("train_on", ["assistant", "last"])
@pytest.mark.parametrize("tokens_per_microbatch", [16, 1024])
def test_the_loss_is_the_mean_over_all_trained_tokens_of_the_batch(
    train_on: Any, tokens_per_microbatch: int, sft: Config, tiny_llama: Path
) -> None:
    sft.train.sft.train_on, sft.train.tokens_per_microbatch = train_on, tokens_per_microbatch
    task = SFTTask(sft)
    losses = torch.cat(plain_losses(tiny_llama, task, train_on))
    metrics = task.step(LoaderBatch(1, 0, [0, 1, 2]), lambda stage: None)
    assert metrics["sft/tokens"] == len(losses)
    assert metrics["sft/loss"] == pytest.approx(float(losses.mean()), rel=1e-4)
    assert metrics["sft/perplexity"] == pytest.approx(math.exp(metrics["sft/loss"]))
    assert metrics["sft/lr"] == sft.train.sft.lr


def test_the_answers_that_carry_loss_are_the_assistant_s_with_their_end(sft: Config) -> None:
    task = SFTTask(sft)
    ids, mask = conversation_ids(task.tokenizer, ROWS[1]["messages"])
    trained = task.tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on])
    assert trained == "Hello.<|im_end|>That is all of it.<|im_end|>"


def test_the_held_out_loss_weighs_tokens_and_falls_with_training(
    sft: Config, tiny_llama: Path, tmp_path: Path
) -> None:
    sft.train.sft.lr, sft.train.sft.lr_schedule = 3e-3, "constant"
    task = SFTTask(sft)
    expected = float(torch.cat(plain_losses(tiny_llama, task, "assistant")).mean())
    before = task.evaluate(0, tmp_path)["eval/loss"]
    assert before == pytest.approx(expected, rel=1e-4)
    for step in range(1, 6):
        task.step(LoaderBatch(step, 0, [0, 1, 2]), lambda stage: None)
    assert task.evaluate(5, tmp_path)["eval/loss"] < before - 0.5


def test_a_conversation_above_the_limit_is_named_or_left_out_or_keeps_its_end(sft: Config) -> None:
    sft.data.seq_length, sft.data.response_length = 60, 8
    with pytest.raises(DataError, match=r"train\.jsonl:2 \(\d+ tokens\)"):
        SFTTask(sft)
    sft.data.overlong = "drop"
    task = SFTTask(sft)
    assert 1 not in task.kept and task.kept
    sft.data.overlong = "truncate_left"
    task = SFTTask(sft)
    rows = task._encode(task.rows, [1])
    whole = conversation_ids(task.tokenizer, ROWS[1]["messages"])[0]
    assert rows.ids[0].tolist() == whole[-60:]


def test_the_dump_holds_the_rows_of_the_last_batch(sft: Config, tmp_path: Path) -> None:
    task = SFTTask(sft)
    task.step(LoaderBatch(1, 0, [2]), lambda stage: None)
    task.dump(tmp_path, 1)
    assert (tmp_path / "batch_step_000001.jsonl").read_text().count("Be brief.") == 1


def test_bad_steps_in_a_row_are_counted_across_a_resume(sft: Config, tmp_path: Path) -> None:
    task = SFTTask(sft)
    parameter = task.engine.trainable()[0][1]
    parameter.register_hook(lambda gradient: gradient * float("nan"))
    task.step(LoaderBatch(1, 0, [0]), lambda stage: None)
    task.step(LoaderBatch(2, 0, [1]), lambda stage: None)
    task.save(tmp_path)
    again = SFTTask(sft)
    again.load(tmp_path)
    assert again.worker.bad_in_a_row == 2
