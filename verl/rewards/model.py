"""The learned reward model as a source of scores: decoder or encoder, one number per conversation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.engines.microbatch import Rows
from verl.engines.torch_engine import TorchEngine
from verl.models.chat import Prompt, RewardInput, reward_input
from verl.rewards.base import reward_source


def reward_rows(inputs: Sequence[RewardInput]) -> Rows:
    """Rows read at their last token, where a reward model gives its score."""
    ids = [torch.tensor(item.ids, dtype=torch.int64) for item in inputs]
    types = [item.type_ids for item in inputs]
    return Rows(
        ids,
        [torch.tensor([len(row) - 1]) for row in ids],
        type_ids=[torch.tensor(t) for t in types if t is not None]
        if types[0] is not None
        else None,
    )


@reward_source("model")
class ModelReward:
    """Scores text with its own tokenizer and chat template, whatever the policy's are.

    `truncated` counts the conversations so far that were cut to `max_length`.
    """

    name = "model"

    def __init__(self, engine: TorchEngine, max_length: int | None = None) -> None:
        self.engine = engine
        self.tokenizer = engine.loaded.tokenizer
        limits = [n for n in (max_length, engine.loaded.max_length) if n is not None]
        self.max_length = min(limits) if limits else None
        self.truncated = 0

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Tensor:
        """Scores (B,) float32."""
        inputs = [
            reward_input(self.tokenizer, prompt, response, self.max_length)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        self.truncated += sum(item.truncated for item in inputs)
        return self.engine.values(reward_rows(inputs)) if inputs else torch.empty(0)
