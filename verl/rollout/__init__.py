"""Generation of responses from the policy: the engine protocol, its registry and the engines.

`verl.rollout.native` holds the engine that runs the actor's own weights; it imports torch and is
therefore imported only where it is used.
"""

from __future__ import annotations

from verl.rollout.base import (
    ROLLOUT_ENGINES,
    Completion,
    RolloutEngine,
    SamplingParams,
    engine_class,
    rollout_engine,
)

__all__ = [
    "ROLLOUT_ENGINES",
    "Completion",
    "RolloutEngine",
    "SamplingParams",
    "engine_class",
    "rollout_engine",
]
