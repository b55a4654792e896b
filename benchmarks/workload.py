"""The workload that every side of ``ppo_step.py`` gets: prompts as token ids, sizes, models.

In: a model folder (SmolLM2-135M by default, see ``make_models.py``). Out: ``workload.json`` in the
work directory. Nothing is random: the same model gives the same file.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from floor import Workload, body_parameters
from make_models import prepare_models

RESPONSE_LENGTH = 48
SHORTEST_PROMPT, LONGEST_PROMPT = 14, 64
SEED = 1

# Sixteen whole requests; in SmolLM2's tokens their lengths are spread over 14 ... 64.
PROMPTS = (
    "What is the capital of Portugal, and what is it known for?",
    "Explain in two sentences why the sky looks blue on a clear day.",
    "My bread never rises in winter. What should I change in my kitchen or my recipe?",
    "Write a short and friendly note that reminds my neighbour to return the ladder he borrowed.",
    "I have twenty minutes before a job interview. How can I calm down and still sound prepared?",
    "Compare buying a used bicycle with buying a new one for someone who rides four kilometres to "
    "work every day.",
    "My six-year-old asks where the water in the tap comes from. Give me an answer that is true "
    "and that she can picture.",
    "Summarise the main reasons why coastal towns build sea walls, and name one good argument "
    "against building them anywhere.",
    "Our book club reads a novel every month, but half of the members never finish it. Suggest "
    "three changes that are fair to everybody.",
    "A customer writes that her parcel arrived two weeks late and the box was wet. Draft a reply "
    "that apologises, explains nothing away and offers a refund "
    "or a second parcel by express.",
    "I want to grow tomatoes on a balcony that gets four hours of sun. Tell me which kind to "
    "choose, how large the pots must be and how often to water them. "
    "I am away every other weekend.",
    "Describe how a bill becomes a law in a country with two chambers of parliament. Keep it "
    "under one hundred words and avoid legal terms that a teenager would not know. "
    "Close with one sentence on who can stop it.",
    "My laptop has become very slow since the last update and the fan runs all the time. List the "
    "checks that I should make first, in order, before I pay somebody to repair it. "
    "It is five years old and nearly full.",
    "Two of my colleagues no longer speak to each other after an argument about holiday plans, and "
    "I have to write a report with both of them. How do I keep the work going without taking "
    "sides, and what should I say to our manager?",
    "Give me a plan for a weekend in a small mountain village with my parents, who are seventy and "
    "cannot walk far. They like good food, old churches and a quiet view, and we will have no car. "
    "Rain is likely on Sunday, so leave room for changes.",
    "I am learning to play the piano at the age of fifty and can practise for half an hour a day. "
    "Please lay out what I should work on in the first three months, how I can tell that I am "
    "improving, and when it makes sense to look for a good teacher. "
    "I cannot read any notes yet.",
)


def tokenised_prompts(policy: Path) -> list[dict[str, Any]]:
    """Return the prompts as ``{"text", "input_ids"}`` in the tokens of ``policy``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    return [
        {"text": text, "input_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}
        for text in PROMPTS
    ]


def pad_token_id(policy: Path) -> int:
    """Return a special token that is neither bos nor eos and that the model never writes.

    TRL takes every pad token in a response for the end of it, so eos cannot serve as padding where
    eos is to be ignored. Falls back to the tokenizer's own pad token.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    added = tokenizer.added_tokens_decoder
    spare = [index for index, token in sorted(added.items()) if token.special and index not in used]
    return spare[-1] if spare else tokenizer.pad_token_id


def model_sizes(policy: Path) -> dict[str, int]:
    """Return the weights of the trunk's and the head's matrix products."""
    config = json.loads((policy / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    body = body_parameters(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
    )
    return {
        "body_parameters": body,
        "head_parameters": config["vocab_size"] * config["hidden_size"],
    }


def build(workdir: Path, policy: Path | None = None) -> Path:
    """Prepare the models and write ``workload.json``; return its path.

    Raises:
        SystemExit: a prompt has fewer or more tokens than the workload allows.
    """
    policy_folder, reward_folder = prepare_models(workdir, policy)
    prompts = tokenised_prompts(policy_folder)
    lengths = [len(prompt["input_ids"]) for prompt in prompts]
    if policy is None and (min(lengths), max(lengths)) != (SHORTEST_PROMPT, LONGEST_PROMPT):
        raise SystemExit(
            f"benchmarks/workload.py: PROMPTS have {min(lengths)} ... {max(lengths)} tokens, "
            f"wanted {SHORTEST_PROMPT} ... {LONGEST_PROMPT}: tokenizer or texts have changed"
        )
    content = {
        "policy": str(policy_folder.resolve()),
        "reward": str(reward_folder.resolve()),
        "seed": SEED,
        "response_length": RESPONSE_LENGTH,
        "pad_token_id": pad_token_id(policy_folder),
        "prompt_lengths": lengths,
        **model_sizes(policy_folder),
        "prompts": prompts,
    }
    path = workdir / "workload.json"
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(partial, path)
    return path


def sizes_of(content: dict[str, Any], ppo_epochs: int) -> Workload:
    """Return what :func:`floor.operation_counts` needs, from the content of ``workload.json``."""
    return Workload(
        body_parameters=content["body_parameters"],
        head_parameters=content["head_parameters"],
        prompt_tokens=sum(content["prompt_lengths"]),
        samples=len(content["prompt_lengths"]),
        response_length=content["response_length"],
        ppo_epochs=ppo_epochs,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write workload.json and the models it names.")
    parser.add_argument("--workdir", type=Path, default=Path(".cache/bench"))
    parser.add_argument("--model", type=Path, help="a Llama folder instead of SmolLM2-135M")
    arguments = parser.parse_args()
    arguments.workdir.mkdir(parents=True, exist_ok=True)
    print(build(arguments.workdir, arguments.model))
