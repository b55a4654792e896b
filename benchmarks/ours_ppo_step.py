"""Our PPO step on the shared workload: the trainer and workers that ``verl ppo`` uses.

In: ``workload.json``. Out: one JSON line with seconds per stage of every measured iteration,
memory, versions and checks of what was computed (README: a side's contract).
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measure import ResidentMemory, current_rss_bytes, memory_report, wait_for_turn

# The trainer's stages behind each column of the table.
STAGES = {
    "generation": ("rollout",),
    "scoring": ("score", "old_logprobs", "reference", "values", "advantages"),
    "update": ("update_critic", "update_actor"),
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", type=Path, required=True, help="workload.json")
    parser.add_argument(
        "--dtype",
        choices=("float32", "default"),
        default="float32",
        help="float32 everywhere, or what a user gets who sets nothing",
    )
    parser.add_argument("--iterations", type=int, default=1, help="measured iterations")
    parser.add_argument("--warmup", type=int, default=1, help="iterations before those")
    parser.add_argument("--ppo-epochs", type=int, default=4)
    parser.add_argument("--turns", action="store_true", help="wait for a line before an iteration")
    return parser.parse_args()


def configuration(arguments: argparse.Namespace, workload: dict[str, Any]) -> Any:
    """Return the configuration tree of the workload; whatever it does not name stays default."""
    from verl.config.schema import Config

    dtype = "float32" if arguments.dtype == "float32" else "auto"
    longest = max(workload["prompt_lengths"])
    samples = len(workload["prompts"])
    return Config.model_validate(
        {
            "model": {
                "actor": {"pretrained_path": workload["policy"], "dtype": dtype},
                "critic": {"pretrained_path": workload["reward"], "dtype": dtype},
                "ref_policy": {"inference_dtype": dtype},
                "reward_model": {
                    "pretrained_path": workload["reward"],
                    "inference_dtype": dtype,
                },
            },
            "data": {
                "batch_size": samples,
                "seq_length": longest + workload["response_length"],
                "response_length": workload["response_length"],
            },
            "rollout": {"temperature": 1.0, "ignore_eos": True},
            "train": {
                "seed": workload["seed"],
                "ppo": {"epochs": arguments.ppo_epochs, "minibatch_size": samples},
            },
        }
    )


def build_trainer(config: Any, steps: int) -> Any:
    """Load actor, critic, reference and reward model and return the PPO trainer."""
    from verl.cluster.local import LocalExecutor
    from verl.trainer.ppo import PPOTrainer
    from verl.workers.build import build_actor, build_critic, build_reference, build_reward

    executor = LocalExecutor(config.resource)
    actor = executor.start("actor", lambda device: build_actor(config, device))
    critic = executor.start("critic", lambda device: build_critic(config, device))
    reference = executor.start(
        "ref_policy", lambda device: build_reference(config, device, actor.workers[0])
    )
    reward = executor.start("reward_model", lambda device: build_reward(config, device))
    # The peer gets the bare text as ids. With its template, each side would read other tokens.
    for group in (actor, reward):
        group.tokenizer.chat_template = None
    return PPOTrainer(actor, critic, reference, reward, config, total_steps=steps)


def check_prompts(trainer: Any, workload: dict[str, Any]) -> list[str]:
    """Return the prompts as text, after a check that they become the workload's token ids.

    Raises:
        SystemExit: they do not, so the sides would not do the same work.
    """
    texts = [prompt["text"] for prompt in workload["prompts"]]
    found = trainer.prompt_batch(texts, "rollout", 0)["prompt_ids"]
    for row, (ids, prompt) in enumerate(zip(found, workload["prompts"], strict=True)):
        if list(ids) != prompt["input_ids"]:
            raise SystemExit(f"ours_ppo_step: prompt {row} became {ids}, not {prompt['input_ids']}")
    return texts


def stage_seconds(metrics: dict[str, float], total: float) -> dict[str, float]:
    """Return the seconds of one iteration by column, from the trainer's own ``time/...``."""
    seconds = {
        column: sum(metrics.get(f"time/{stage}", 0.0) for stage in stages)
        for column, stages in STAGES.items()
    }
    return {"total": total, **seconds}


def measure(arguments: argparse.Namespace, workload: dict[str, Any]) -> dict[str, Any]:
    """Run warm-up and measured iterations and return the content of the JSON line."""
    import torch

    import verl

    iterations, metrics = [], []
    steps = arguments.warmup + arguments.iterations
    with ResidentMemory() as memory:
        trainer = build_trainer(configuration(arguments, workload), steps)
        texts = check_prompts(trainer, workload)
        loaded = current_rss_bytes()
        memory.reset()
        for _ in range(steps):
            wait_for_turn(arguments.turns)
            start = time.perf_counter()
            found = trainer.step(texts)
            iterations.append(stage_seconds(found, time.perf_counter() - start))
            metrics.append(found)
        iterations_peak = memory.peak

    for found in metrics:
        lengths = found["response/length_mean"], found["response/length_max"]
        if lengths != (workload["response_length"],) * 2:
            raise SystemExit(f"ours_ppo_step: responses of {lengths} tokens: not comparable")
    compute = str(trainer.actor.workers[0].engine.dtype).removeprefix("torch.")
    return {
        "side": "ours",
        "dtype": arguments.dtype,
        "compute_dtype": compute,
        "threads": torch.get_num_threads(),
        "warmup": arguments.warmup,
        "iterations": iterations[arguments.warmup :],
        **memory_report(iterations_peak, loaded),
        "checks": {"metrics": metrics},
        "versions": {
            "verl": verl.__version__,
            "transformers": version("transformers"),
            "torch": torch.__version__,
        },
    }


def main() -> None:
    """Run our side and print its JSON line."""
    arguments = parse_arguments()
    workload = json.loads(arguments.workload.read_text(encoding="utf-8"))
    print(json.dumps(measure(arguments, workload)))


if __name__ == "__main__":
    main()
