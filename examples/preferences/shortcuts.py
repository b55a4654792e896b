"""Measure how far shallow rules get on courteous.jsonl, so that its easiness is known in numbers.

In: courteous.jsonl. Out: one line per rule with its accuracy (a tie counts as half).

    python examples/preferences/shortcuts.py
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

DATA = Path(__file__).resolve().parent / "courteous.jsonl"

# fmt: off
COURTEOUS = frozenset({
    "appreciate", "best", "certainly", "course", "enjoy", "glad", "gladly", "good", "great",
    "happy", "hope", "kind", "kindly", "love", "lovely", "luck", "nice", "please", "pleasure",
    "sure", "thank", "thanks", "welcome", "wish", "wishing", "wonderful",
})
# fmt: on


def words(text: str) -> list[str]:
    """Lower-case words, numbers and punctuation marks."""
    return re.findall(r"[a-z]+|\d+|[!?:,.]", text.lower())


def count_words(text: str) -> float:
    """Number of whitespace-separated words."""
    return float(len(text.split()))


def count_courteous(text: str) -> float:
    """Number of courteous words."""
    return float(sum(word in COURTEOUS for word in words(text)))


def accuracy(pairs: Sequence[Mapping[str, str]], score: Callable[[str], float]) -> float:
    """Share of pairs whose chosen answer scores higher; a tie counts as half."""
    total = 0.0
    for pair in pairs:
        chosen, rejected = score(pair["chosen"]), score(pair["rejected"])
        total += 0.5 if chosen == rejected else float(chosen > rejected)
    return total / len(pairs)


def naive_bayes(pairs: Sequence[Mapping[str, str]]) -> Callable[[str], float]:
    """Log odds of chosen against rejected from word presence, with add-one-half smoothing."""
    seen: dict[str, Counter[str]] = {"chosen": Counter(), "rejected": Counter()}
    for pair in pairs:
        for side, counter in seen.items():
            counter.update(set(words(pair[side])))
    chosen, rejected = seen["chosen"], seen["rejected"]
    odds = {w: math.log((chosen[w] + 0.5) / (rejected[w] + 0.5)) for w in {*chosen, *rejected}}
    return lambda text: sum(odds.get(word, 0.0) for word in set(words(text)))


def is_held_out(prompt: str) -> bool:
    """True for about a fifth of the prompts."""
    return int(hashlib.sha256(prompt.encode()).hexdigest(), 16) % 5 == 0


def main() -> int:
    """Print the accuracy of every rule."""
    pairs = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    held_out = [pair for pair in pairs if is_held_out(pair["prompt"])]
    classifier = naive_bayes([pair for pair in pairs if not is_held_out(pair["prompt"])])
    print(f"longer is better           {accuracy(pairs, count_words):.3f}")
    print(f"shorter is better          {accuracy(pairs, lambda text: -count_words(text)):.3f}")
    print(f"more courteous words       {accuracy(pairs, count_courteous):.3f}")
    print(f"naive Bayes, new prompts   {accuracy(held_out, classifier):.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
