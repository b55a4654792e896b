"""Train or test, decided by the prompt alone, so that no prompt is in both.

In: prompts as messages. Out: the split each belongs to; the same prompt, seed and fraction
give the same split in every run and every file.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

from verl.data.schema import content_digest
from verl.errors import ConfigError

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")

_RANGE = 2**64


@dataclass
class PromptSplit:
    """Puts a prompt in the test split when its hash falls below `threshold`.

    Attributes:
        seed: another seed draws another test split.
        threshold: in 0 .. 2**64; its share of the range is the expected share of test prompts.
        lowest, highest: hashes seen so far, for `repaired`.
    """

    seed: int
    threshold: int
    lowest: int = _RANGE
    highest: int = -1

    @classmethod
    def of_fraction(cls, test_fraction: float, seed: int) -> PromptSplit:
        """Split off about `test_fraction` of the prompts, 0 for none.

        Raises:
            ConfigError: the fraction is not in [0, 1).
        """
        if not 0 <= test_fraction < 1:
            raise ConfigError(f"--test-fraction {test_fraction}: must be at least 0 and below 1")
        return cls(seed, int(test_fraction * _RANGE))

    def __call__(self, prompt: Any) -> Split:
        """Return the split of a prompt (messages or text)."""
        digest = hashlib.blake2b(content_digest(prompt), digest_size=8, key=str(self.seed).encode())
        value = int.from_bytes(digest.digest(), "big")
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)
        return "test" if value < self.threshold else "train"

    def repaired(self) -> PromptSplit | None:
        """A split that leaves neither side empty, or None when this one already does.

        With few prompts all hashes can fall on one side. The prompt with the lowest hash then
        is the test split, or the one with the highest is the train split.
        """
        if self.threshold == 0 or self.lowest >= self.highest:
            return None
        if self.lowest >= self.threshold:
            return PromptSplit(self.seed, self.lowest + 1)
        if self.highest < self.threshold:
            return PromptSplit(self.seed, self.highest)
        return None
