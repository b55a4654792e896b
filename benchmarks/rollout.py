"""Generation of SmolLM2-135M on this machine: tokens per second by engine and batch size.

In: the prompts of ``workload.py`` as chats, so that answers end at different lengths and batches
thin out. Out: a table of tokens/s and its ratio to transformers' batched ``generate``; with
``--json`` everything as a file. Every engine samples the same number of answers at the same
temperature from the same weights in one process; a token counts up to the end of its answer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from machine import OtherLoad, available_cores, cpu_model, memory_gib
from make_models import prepare_models
from workload import PROMPTS

Generate = Callable[[list[list[int]]], list[int]]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64], help="prompts at once")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--repeats", type=int, default=3, help="measured runs; the median counts")
    parser.add_argument("--one-by-one", type=int, default=8, help="prompts of the slowest engine")
    parser.add_argument("--workdir", type=Path, default=Path(".cache/bench"))
    parser.add_argument("--model", type=Path, help="a Llama folder instead of SmolLM2-135M")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    return parser.parse_args()


@contextmanager
def plain_layers() -> Iterator[None]:
    """Let the native engine use the linear layers as they are."""
    from verl.rollout import native

    original = native.packing_pays
    native.packing_pays = lambda: False
    try:
        yield
    finally:
        native.packing_pays = original


def native_engine(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> Generate:
    """Return our engine as a function from prompts to the lengths of their answers."""
    from verl.models.chat import stop_ids
    from verl.rollout.base import SamplingParams
    from verl.rollout.native import NativeEngine

    engine = NativeEngine(model, len(tokenizer), tokenizer.pad_token_id or 0)
    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        stop_token_ids=stop_ids(tokenizer),
    )

    def generate(prompts: list[list[int]]) -> list[int]:
        done = engine.generate(prompts, params, list(range(len(prompts))))
        return [len(completion.ids) for completion in done]

    return generate


def transformers_engine(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> Generate:
    """Return ``generate`` of transformers as such a function; prompts are padded on the left."""
    from transformers import GenerationConfig

    from verl.models.chat import stop_ids

    stops = stop_ids(tokenizer)
    pad = tokenizer.pad_token_id or 0
    config = GenerationConfig(
        do_sample=True, temperature=arguments.temperature, top_k=0, top_p=1.0,
        max_new_tokens=arguments.max_tokens, eos_token_id=list(stops), pad_token_id=pad,
    )  # fmt: skip

    def generate(prompts: list[list[int]]) -> list[int]:
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        return [length_of(row, stops) for row in output[:, width:].tolist()]

    return generate


def length_of(row: list[int], stops: tuple[int, ...]) -> int:
    """Return the tokens of an answer up to and with its first stop token."""
    ends = [i for i, token in enumerate(row) if token in stops]
    return ends[0] + 1 if ends else len(row)


def rate(generate: Generate, prompts: list[list[int]], repeats: int) -> dict[str, float]:
    """Return the median tokens/s of ``repeats`` runs after one short warm-up."""
    generate(prompts[:2])
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        lengths = generate(prompts)
        found.append(sum(lengths) / (time.perf_counter() - start))
    return {
        "tokens_per_second": sorted(found)[len(found) // 2],
        "mean_length": sum(lengths) / len(lengths),
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every engine on every batch size."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    folder, _ = prepare_models(arguments.workdir, arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    ids = [
        list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
        for chat in chats
    ]
    ours = native_engine(model, tokenizer, arguments)
    theirs = transformers_engine(model, tokenizer, arguments)
    results = []
    for size in arguments.batch:
        prompts = (ids * -(-size // len(ids)))[:size]
        few = prompts[: arguments.one_by_one]
        measured = {"native": rate(ours, prompts, arguments.repeats)}
        with plain_layers():
            measured["native, plain layers"] = rate(ours, prompts, arguments.repeats)
        measured["transformers"] = rate(theirs, prompts, arguments.repeats)
        measured["transformers, one by one"] = rate(
            lambda group: [theirs([prompt])[0] for prompt in group], few, 1
        )
        base = measured["transformers"]["tokens_per_second"]
        results += [
            {"prompts": size, "engine": name, **value, "ratio": value["tokens_per_second"] / base}
            for name, value in measured.items()
        ]
    return results


def main() -> None:
    """Measure, print, and write the file."""
    arguments = parse_arguments()
    load = OtherLoad.start()
    results = measure(arguments)
    machine = {
        "cpu": cpu_model(),
        "cores": available_cores(),
        "memory_gib": memory_gib(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "other_load_cores": load.cores(),
    }
    print(f"{machine['cpu']}, {machine['cores']} cores, other load {machine['other_load_cores']}")
    print(f"{'prompts':>8} {'engine':<26}{'tokens/s':>9}{'x transformers':>16}{'length':>8}")
    for row in results:
        print(
            f"{row['prompts']:>8} {row['engine']:<26}{row['tokens_per_second']:>9.1f}"
            f"{row['ratio']:>16.2f}{row['mean_length']:>8.1f}"
        )
    if arguments.json is not None:
        content = {"machine": machine, "results": results}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
