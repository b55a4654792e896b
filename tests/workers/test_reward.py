"""The reward role: text in, one finite number per sample out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.conftest import CPU
from tests.models.test_encoder import save_bert
from verl.batch import Batch
from verl.config.schema import Config
from verl.errors import TrainingStopped
from verl.models.chat import render
from verl.rewards.base import REWARD_SOURCES, reward_source
from verl.workers.build import build_reward
from verl.workers.reward import RewardWorker

TEXTS = Batch({}, {"prompt": [[{"role": "user", "content": "hi"}], "what?", "x"],
                   "response": ["héllo 👍", "a rather longer answer", ""]})  # fmt: skip


def worker(path: Path, **settings: Any) -> RewardWorker:
    config = Config()
    for name, value in {"pretrained_path": str(path), **settings}.items():
        setattr(config.model.reward_model, name, value)
    return build_reward(config, CPU)


def test_b14_scores_are_those_of_the_reward_models_own_text(tiny_reward: Path) -> None:
    reward = worker(tiny_reward, chat_template="plain", inference_dtype="float32")
    scores = reward.score(TEXTS)["score"]
    model, tokenizer = reward.source.engine.model, reward.tokenizer
    for i, (prompt, response) in enumerate(zip(TEXTS["prompt"], TEXTS["response"], strict=True)):
        asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        text = render(tokenizer, [*asked, {"role": "assistant", "content": response}], False)
        assert text.startswith("User: ")
        assert text.endswith(f"Assistant: {response}<|im_end|>\n\n")
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            assert scores[i].item() == pytest.approx(model(ids).logits[0, 0].item(), abs=1e-5)
    assert not any(p.requires_grad for p in model.parameters())


def test_b14_response_is_re_encoded_for_a_smaller_vocabulary(tmp_path: Path) -> None:
    reward = worker(save_bert(tmp_path), inference_dtype="float32")
    scores = reward.score(TEXTS)["score"]
    assert scores.shape == (3,)
    assert scores.isfinite().all()


def test_scores_do_not_depend_on_the_batch(tiny_reward: Path) -> None:
    reward = worker(tiny_reward, inference_dtype="float32")
    together = reward.score(TEXTS)["score"]
    alone = [reward.score(TEXTS.select([i]))["score"][0] for i in range(3)]
    assert torch.allclose(together, torch.stack(alone), atol=1e-5)
    assert reward.source.score([], []).shape == (0,)


def test_cut_conversations_are_counted(tiny_reward: Path) -> None:
    reward = worker(tiny_reward, max_length=40)
    reward.score(TEXTS)
    assert reward.source.truncated == 1
    assert worker(tiny_reward, max_length=100_000).source.max_length == 512


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_score_that_is_not_finite_names_the_sample(bad: float) -> None:
    @reward_source("test-broken")
    class Broken:
        name = "test-broken"
        tokenizer = None

        def score(self, prompts: Any, responses: Any) -> torch.Tensor:
            return torch.tensor([0.5, bad, bad])

    try:
        reward = RewardWorker(REWARD_SOURCES["test-broken"](), CPU)
        with pytest.raises(
            TrainingStopped, match=r"'test-broken' gave .* for sample 1 \(2 of 3 .*'a rather longer"
        ):
            reward.score(TEXTS)
    finally:
        del REWARD_SOURCES["test-broken"]


def test_missing_columns_name_the_stage(tiny_reward: Path) -> None:
    with pytest.raises(KeyError, match=r"score needs columns \['response'\]"):
        worker(tiny_reward).score(Batch({}, {"prompt": ["x"]}))
