"""What a reward source is, and the registry of sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from verl.models.chat import Prompt


class RewardSource(Protocol):
    """Gives every (prompt, response) one number; higher is better."""

    name: str
    tokenizer: Any

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Tensor:
        """Scores (B,) float32 in the order given."""
        ...


#: Classes of reward sources by name.
REWARD_SOURCES: dict[str, type] = {}


def reward_source(name: str) -> Callable[[type], type]:
    """Register a reward source under `name`."""

    def add(source: type) -> type:
        REWARD_SOURCES[name] = source
        return source

    return add
