"""Write courteous.jsonl: preference pairs composed from the hand-written tables beside this file.

In: prompts/<domain>.txt (prompt, topic, two facts) and frames/*.txt (wordings with slots).
Out: one JSON object per line; choices come from SHA-256, so every run writes the same bytes.

    python examples/preferences/generate.py           # write the file, print its counts
    python examples/preferences/generate.py --check   # exit 1 if the file on disk differs
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUTPUT = HERE / "courteous.jsonl"

# Word ranges of the answers. `vague` and `evasive` straddle `chosen` on purpose.
WORDS = {
    "prompt": (5, 16),
    "fact": (11, 20),
    "chosen": (18, 34),
    "curt": (1, 6),
    "rude": (5, 15),
    "evasive": (8, 34),
    "vague": (7, 34),
    "rambling": (30, 45),
}

# Faults of the rejected answers, given to the prompts in turn. Over one round: 5 vague, 5 rambling,
# 4 evasive, 3 curt, 3 rude, which leaves about as many rejected answers shorter than the chosen
# one as longer, so length alone does not separate the two.
FAULT_ROUNDS = (
    ("vague", "rambling", "curt"),
    ("rambling", "evasive"),
    ("vague", "evasive", "rude"),
    ("rambling", "curt"),
    ("vague", "rambling", "evasive"),
    ("vague", "rude"),
    ("rambling", "evasive", "curt"),
    ("vague", "rude"),
)

# Shape of a chosen answer and its weight: opening + closing, opening only, closing only.
SHAPES = ("both",) * 5 + ("opening",) * 3 + ("closing",) * 2


@dataclass(frozen=True)
class Topic:
    """One hand-written entry: a user prompt, what it is about, and two facts that answer it."""

    domain: str
    prompt: str
    topic: str
    facts: tuple[str, str]


@dataclass(frozen=True)
class Frames:
    """The wordings, by file name; `by_domain` holds the lines that start with `domain: `."""

    plain: Mapping[str, tuple[str, ...]]
    by_domain: Mapping[tuple[str, str], tuple[str, ...]]


def count_words(text: str) -> int:
    """Number of whitespace-separated words."""
    return len(text.split())


def check_words(kind: str, text: str, where: str) -> None:
    """Raise ValueError when `text` is outside the word range of its kind."""
    low, high = WORDS[kind]
    if not low <= count_words(text) <= high:
        raise ValueError(
            f"{where}: {kind} has {count_words(text)} words, expected {low} to {high}; "
            f"reword it: {text!r}"
        )


def read_topics(folder: Path = HERE / "prompts") -> list[Topic]:
    """Read every <domain>.txt: blocks of four lines, separated by a blank line.

    Raises:
        ValueError: a block has not four lines, a text is out of its word range, or a prompt repeats.
    """
    topics: list[Topic] = []
    for path in sorted(folder.glob("*.txt")):
        for number, block in enumerate(path.read_text(encoding="utf-8").strip().split("\n\n"), 1):
            where, lines = f"{path.name}, block {number}", block.splitlines()
            if len(lines) != 4:
                raise ValueError(f"{where}: {len(lines)} lines; write prompt, topic, fact, fact")
            prompt, topic, first, second = lines
            check_words("prompt", prompt, where)
            for fact in (first, second):
                check_words("fact", fact, where)
            topics.append(Topic(path.stem, prompt, topic, (first, second)))
    repeated = [prompt for prompt, n in Counter(t.prompt for t in topics).items() if n > 1]
    if repeated:
        raise ValueError(f"{folder}: prompts written twice: {repeated}; reword one of each")
    return topics


def read_frames(folder: Path = HERE / "frames") -> Frames:
    """Read every frames file; `*.domain.txt` and `*.filler.txt` carry a `domain: ` prefix."""
    plain: dict[str, tuple[str, ...]] = {}
    by_domain: dict[tuple[str, str], tuple[str, ...]] = {}
    for path in sorted(folder.glob("*.txt")):
        lines = tuple(path.read_text(encoding="utf-8").splitlines())
        if path.stem.endswith((".domain", ".filler")):
            for line in lines:
                domain, text = line.split(": ", 1)
                key = (path.stem, domain)
                by_domain[key] = (*by_domain.get(key, ()), text)
        else:
            plain[path.stem] = lines
    return Frames(plain, by_domain)


def digest(*key: object) -> str:
    """SHA-256 of the key's parts, in hex: the only source of variety here."""
    return hashlib.sha256("\x1f".join(map(str, key)).encode()).hexdigest()


def draw(size: int, *key: object) -> int:
    """A number in [0, size) that depends only on `key`."""
    return int(digest(*key), 16) % size


def ranked(options: Sequence[str], *key: object) -> list[str]:
    """The options in an order that depends only on their text and on `key`."""
    return sorted(options, key=lambda option: digest(*key, option))


def capitalize(text: str) -> str:
    """Upper-case the first letter and leave the rest as written."""
    return text[:1].upper() + text[1:]


def fill(frame: str, **slots: str) -> str:
    """Fill `{name}` slots as given and `{Name}` slots with a capital letter."""
    capitals = {capitalize(name): capitalize(text) for name, text in slots.items()}
    return frame.format(**slots, **capitals)


def courteous_answers(domain: str, fact: str, frames: Frames, *key: object) -> Iterator[str]:
    """The fact in courteous wordings that fit the domain, best candidate first."""
    tone = ".feelings" if domain == "feelings" else ""
    openings = ranked(frames.plain["openings" + tone], *key, "opening")
    closings = ranked(frames.plain["closings" + tone], *key, "closing")
    own = ranked(frames.by_domain.get(("closings.domain", domain), ()), *key, "own")
    if draw(5, *key, "own") < 2:
        closings = own + closings
    shape = SHAPES[draw(len(SHAPES), *key, "shape")]
    for wanted in (shape, "both", "opening", "closing"):
        for opening, closing in zip(openings, cycle(closings), strict=False):
            text = fill(opening if wanted != "closing" else "{Fact}.", fact=fact)
            one_sentence = ". " not in text and "! " not in text
            if wanted == "opening":
                yield text
            elif one_sentence and not ("Thank" in text and "Thank" in closing):
                yield f"{text} {closing}"


def chosen_answers(topic: Topic, number: int, frames: Frames) -> Iterator[str]:
    """Chosen answers for pair `number` of a prompt, best candidate first.

    The facts alternate, so the pairs of one prompt carry both of them in different words.
    """
    fact = topic.facts[(draw(2, topic.prompt) + number) % 2]
    return courteous_answers(topic.domain, fact, frames, "chosen", topic.prompt, number)


def rejected_answers(
    topic: Topic, fault: str, frames: Frames, topics: Sequence[Topic]
) -> Iterator[str]:
    """Rejected answers with the given fault, best candidate first.

    About half of the vague answers and a quarter of the evasive ones wear the frames of the chosen
    answers around an empty phrase or around another prompt's fact. So neither a friendly wording
    nor a concrete fact wins by itself: the fact has to answer its own prompt.
    """
    key = ("rejected", topic.prompt, fault)
    others = [t for t in topics if t is not topic]
    if fault == "rambling":
        yield from rambling_answers(topic, frames, *key)
        return
    if fault == "vague" and draw(2, *key) == 0:
        phrase = ranked(frames.plain["empty"], *key)[0]
        yield from courteous_answers(topic.domain, phrase, frames, *key)
    if fault == "evasive" and draw(4, *key) == 0:
        borrowed = ranked([t.facts[1] for t in others if t.domain != topic.domain], *key)[0]
        yield from courteous_answers(topic.domain, borrowed, frames, *key)
    other = ranked([t.facts[0] for t in others if t.domain == topic.domain], *key)[0]
    for frame in ranked(frames.plain[fault], *key):
        yield fill(frame, topic=topic.topic, other=other)


def rambling_answers(topic: Topic, frames: Frames, *key: object) -> Iterator[str]:
    """Two unrelated stories of the topic's domain between an opening and a tail."""
    first, second = ranked(frames.by_domain["rambling.filler", topic.domain], *key)[:2]
    tail = ranked(frames.plain["rambling.tails"], *key)[0]
    for opening in ranked(frames.plain["rambling.openings"], *key):
        yield f"{fill(opening, topic=topic.topic)} {first}, and {second}. {tail}"


def first_fitting(kind: str, texts: Iterator[str], taken: set[str], where: str) -> str:
    """The first text within the word range of its kind that this prompt has not used."""
    low, high = WORDS[kind]
    for text in texts:
        if low <= count_words(text) <= high and text not in taken:
            taken.add(text)
            return text
    raise ValueError(f"{where}: no {kind} wording fits {low} to {high} words; add a frame")


def build_pairs() -> list[dict[str, str]]:
    """Compose all pairs, in the order of the prompt files."""
    topics, frames = read_topics(), read_frames()
    pairs: list[dict[str, str]] = []
    for index, topic in enumerate(topics):
        taken: set[str] = set()
        for number, fault in enumerate(FAULT_ROUNDS[index % len(FAULT_ROUNDS)]):
            chosen = chosen_answers(topic, number, frames)
            rejected = rejected_answers(topic, fault, frames, topics)
            pairs.append(
                {
                    "prompt": topic.prompt,
                    "chosen": first_fitting("chosen", chosen, taken, topic.prompt),
                    "rejected": first_fitting(fault, rejected, taken, topic.prompt),
                    "domain": topic.domain,
                    "fault": fault,
                }
            )
    return pairs


def render(pairs: Sequence[Mapping[str, str]]) -> str:
    """The pairs as JSON lines, with a final newline."""
    return "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)


def summarize(pairs: Sequence[Mapping[str, str]]) -> str:
    """Counts of the set, as shown in README.md."""
    lengths = {k: [count_words(p[k]) for p in pairs] for k in ("prompt", "chosen", "rejected")}
    longer = sum(c > r for c, r in zip(lengths["chosen"], lengths["rejected"], strict=True))
    equal = sum(c == r for c, r in zip(lengths["chosen"], lengths["rejected"], strict=True))
    lines = [
        f"pairs             {len(pairs)}",
        f"distinct prompts  {len({p['prompt'] for p in pairs})}",
        f"distinct chosen   {len({p['chosen'] for p in pairs})}",
        f"distinct rejected {len({p['rejected'] for p in pairs})}",
        f"chosen longer     {longer / len(pairs):.3f} (equal {equal / len(pairs):.3f})",
    ]
    for name, values in lengths.items():
        mean = sum(values) / len(values)
        lines.append(f"{name + ' words':<18}{min(values)} to {max(values)}, mean {mean:.1f}")
    for field in ("fault", "domain"):
        counts = sorted(Counter(p[field] for p in pairs).items())
        lines.append(f"{field:<18}" + ", ".join(f"{name} {n}" for name, n in counts))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file, or with --check compare it; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the courteous preference set.")
    parser.add_argument("--check", action="store_true", help="compare with the file on disk only")
    arguments = parser.parse_args(argv)
    pairs = build_pairs()
    text = render(pairs)
    if arguments.check:
        if OUTPUT.is_file() and OUTPUT.read_text(encoding="utf-8") == text:
            print(f"{OUTPUT.name} is up to date")
            return 0
        print(f"{OUTPUT} differs from what this generator writes; run it without --check")
        return 1
    OUTPUT.write_text(text, encoding="utf-8", newline="\n")
    print(summarize(pairs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
