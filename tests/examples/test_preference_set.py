"""The shipped preference set: it is what its generator writes, well formed, and free of shortcuts."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "preferences"
FAULTS = {"curt", "evasive", "rambling", "rude", "vague"}


def load_script(name: str) -> ModuleType:
    """Import a script of the example folder, which is not a package, under its own name."""
    spec = importlib.util.spec_from_file_location(f"preferences_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses looks its module up in sys.modules while the body runs
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load_script("generate")


@pytest.fixture(scope="module")
def shortcuts() -> ModuleType:
    return load_script("shortcuts")


@pytest.fixture(scope="module")
def pairs() -> list[dict[str, str]]:
    text = (FOLDER / "courteous.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_file_is_what_the_generator_writes(generate: ModuleType) -> None:
    written = (FOLDER / "courteous.jsonl").read_bytes()
    assert written == generate.render(generate.build_pairs()).encode("utf-8")


def test_readme_quotes_the_generator_counts(
    generate: ModuleType, pairs: list[dict[str, str]]
) -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert generate.summarize(pairs) in readme


def test_every_line_has_the_five_fields_as_clean_text(pairs: list[dict[str, str]]) -> None:
    for number, pair in enumerate(pairs, 1):
        assert list(pair) == ["prompt", "chosen", "rejected", "domain", "fault"], number
        for field, text in pair.items():
            assert text and text == " ".join(text.split()), (number, field)
            assert text.isascii() and not re.search(r"[{}]", text), (number, field)
        assert pair["fault"] in FAULTS, number


def test_size_and_spread(pairs: list[dict[str, str]]) -> None:
    assert len(pairs) >= 640
    assert len({pair["prompt"] for pair in pairs}) >= 270
    assert len({pair["chosen"] for pair in pairs}) == len(pairs)
    domains = Counter(pair["domain"] for pair in pairs)
    assert len(domains) >= 10 and min(domains.values()) >= 40
    faults = Counter(pair["fault"] for pair in pairs)
    assert set(faults) == FAULTS and min(faults.values()) >= 0.1 * len(pairs)


def test_a_prompt_has_two_or_three_pairs_with_different_faults(
    pairs: list[dict[str, str]],
) -> None:
    by_prompt: dict[str, list[dict[str, str]]] = {}
    for pair in pairs:
        by_prompt.setdefault(pair["prompt"], []).append(pair)
    for prompt, group in by_prompt.items():
        assert len(group) in (2, 3), prompt
        assert len({pair["fault"] for pair in group}) == len(group), prompt
        texts = [pair[side] for pair in group for side in ("chosen", "rejected")]
        assert len(set(texts)) == len(texts), prompt


def test_chosen_answers_are_short_and_finished(pairs: list[dict[str, str]]) -> None:
    for pair in pairs:
        chosen = pair["chosen"]
        assert 18 <= len(chosen.split()) <= 34, chosen
        assert chosen[0].isupper() and chosen[-1] in ".!", chosen
        assert len(re.findall(r"[.!?](?= [A-Z]|$)", chosen)) in (1, 2), chosen


def test_prompts_are_within_their_word_range(pairs: list[dict[str, str]]) -> None:
    for pair in pairs:
        assert 5 <= len(pair["prompt"].split()) <= 16, pair["prompt"]


def test_length_is_not_a_giveaway(pairs: list[dict[str, str]], shortcuts: ModuleType) -> None:
    assert shortcuts.accuracy(pairs, shortcuts.count_words) < 0.65
    assert shortcuts.accuracy(pairs, lambda text: -shortcuts.count_words(text)) < 0.65


def test_a_quarter_of_the_rejected_have_the_length_of_chosen(pairs: list[dict[str, str]]) -> None:
    same_range = [pair for pair in pairs if 18 <= len(pair["rejected"].split()) <= 34]
    assert len(same_range) >= 0.25 * len(pairs)


def test_courteous_words_are_not_a_giveaway(
    pairs: list[dict[str, str]], shortcuts: ModuleType
) -> None:
    assert shortcuts.accuracy(pairs, shortcuts.count_courteous) < 0.85
    polite_but_empty = [p for p in pairs if shortcuts.count_courteous(p["rejected"]) > 0]
    assert len(polite_but_empty) >= 0.25 * len(pairs)


def test_a_borrowed_fact_never_answers_its_own_prompt(
    generate: ModuleType, pairs: list[dict[str, str]]
) -> None:
    facts = {topic.prompt: topic.facts for topic in generate.read_topics()}
    for pair in pairs:
        own = [fact.lower() for fact in facts[pair["prompt"]]]
        assert any(fact in pair["chosen"].lower() for fact in own), pair["prompt"]
        assert not any(fact in pair["rejected"].lower() for fact in own), pair["prompt"]


def test_a_block_with_a_missing_fact_is_refused(generate: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "cooking.txt").write_text("How do I boil an egg well?\nboiling eggs\n")
    with pytest.raises(ValueError, match=r"cooking\.txt, block 1: 2 lines"):
        generate.read_topics(tmp_path)
