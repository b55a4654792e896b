"""What every rollout engine takes and returns, and the registry that finds one by name.

In: prompts as token ids, sampling parameters, one seed per prompt. Out: one `Completion` per
prompt, in the caller's order. Importable without torch.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from verl.errors import ConfigError

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How to draw the response tokens; nothing is ever filled in from a model's files.

    Args:
        max_tokens: most tokens of a response, the stop token included (>= 1).
        temperature: divisor of the logits; 0 means greedy.
        top_p: keep the smallest set of most likely tokens whose probability reaches this (0, 1].
        top_k: keep this many most likely tokens; 0 keeps all.
        min_tokens: stop tokens cannot be drawn before this many tokens have been.
        stop_token_ids: drawing any of these ends the response; it is the response's last token.
        ignore_eos: draw exactly `max_tokens` tokens; stop tokens are then ordinary tokens and
            `min_tokens` has no effect.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature must be a finite number >= 0 (0 is greedy), got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p} (1 turns it off)")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k} (0 turns it off)")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), "
                f"got {self.min_tokens}"
            )
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be >= 0, got {self.stop_token_ids}")


@dataclass(frozen=True)
class Completion:
    """One response.

    Args:
        ids: the drawn tokens, including the stop token when one was drawn; never empty.
        logprobs: log-probability of each of `ids` under the full distribution after temperature
            (before top-k, top-p and min_tokens); at temperature 0, under the untempered one.
        finish_reason: `stop` (a stop token was drawn), `length` (max_tokens reached without one)
            or `abort` (the engine gave up; what there is may be incomplete).
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


class RolloutEngine(Protocol):
    """Draws responses from the policy's current weights."""

    name: str

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """Return one completion per prompt, in order.

        Response i is a function of (weights, prompt i, params, seed i) only: neither of its
        batch nor of when other responses end. Token t uses draw t of the stream of seed i.
        """
        ...


ROLLOUT_ENGINES: dict[str, type] = {}

# Engines that ship with the package; their modules import torch, so only when they are asked for.
_BUILT_IN = {"native": "verl.rollout.native"}

EngineClass = TypeVar("EngineClass", bound=type)


def rollout_engine(name: str) -> Callable[[EngineClass], EngineClass]:
    """Class decorator: register an engine under `name` and set its `name` attribute.

    Raises:
        ValueError: the name is taken by another class.
    """

    def register(cls: EngineClass) -> EngineClass:
        if name in ROLLOUT_ENGINES:
            raise ValueError(
                f"rollout engine {name!r} is already registered by "
                f"{ROLLOUT_ENGINES[name].__qualname__}; choose another name"
            )
        cls.name = name
        ROLLOUT_ENGINES[name] = cls
        return cls

    return register


def engine_class(name: str) -> type:
    """Return the engine class registered as `name`, importing a built-in one at its first use.

    Raises:
        ConfigError: there is no such engine.
    """
    if name not in ROLLOUT_ENGINES and name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name])
    if name not in ROLLOUT_ENGINES:
        known = ", ".join(sorted({*_BUILT_IN, *ROLLOUT_ENGINES}))
        raise ConfigError(f"rollout.engine: there is no engine {name!r}; use one of: {known}")
    return ROLLOUT_ENGINES[name]
