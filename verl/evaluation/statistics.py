"""Small statistics of evaluations: intervals, win rates, diversity."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

#: Two-sided 95 % quantile of the normal distribution.
Z95 = 1.959963984540054

#: Scripts written without spaces count character by character.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(f"[{_CJK}]|[^\\s{_CJK}]+")


def mean_ci95(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval (normal approximation, n - 1 variance).

    The half-width of fewer than two values is 0.
    """
    n = len(values)
    if n == 0:
        raise ValueError("the mean of no values; the held-out set is empty")
    mean = math.fsum(values) / n
    if n < 2:
        return mean, 0.0
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    return mean, Z95 * math.sqrt(variance / n)


def standard_deviation(values: Sequence[float]) -> float:
    """Sample standard deviation with n - 1; 0 for fewer than two values."""
    n = len(values)
    if n < 2:
        return 0.0
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927), which stays inside [0, 1]."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = p + Z95**2 / (2 * n)
    spread = Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n**2))
    scale = 1 + Z95**2 / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def wins(scores: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """1 where the score beats the baseline's, 0.5 for a tie, 0 otherwise."""
    return [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(scores, baseline, strict=True)]


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Distinct n-grams of words over all n-grams (Li et al. 2016); 0 when there are none.

    A word is a run of non-space characters; each CJK character is a word of its own.
    """
    grams = []
    for text in texts:
        words = _WORD.findall(text)
        grams += [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def same_opening(texts: Sequence[str], words: int = 3) -> float:
    """Share of texts that begin with the most frequent opening of `words` words; 0 for no texts.

    Words are those of `distinct_n`. A shorter text is an opening of its own length.
    """
    openings = Counter(tuple(_WORD.findall(text)[:words]) for text in texts)
    return max(openings.values()) / len(texts) if texts else 0.0


def correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson correlation; 0 when one side does not vary."""
    n = len(x)
    if n < 2:
        return 0.0
    mx, my = math.fsum(x) / n, math.fsum(y) / n
    sxy = math.fsum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    sxx, syy = math.fsum((a - mx) ** 2 for a in x), math.fsum((b - my) ** 2 for b in y)
    return sxy / math.sqrt(sxx * syy) if sxx > 0 and syy > 0 else 0.0
