"""The PPO step of TRL 1.9.2 (``trl.experimental.ppo``) on the shared workload.

In: ``workload.json``; runs in the environment that ``trl_setup.sh`` makes. Out: one JSON line with
seconds per stage of every measured iteration, memory, versions and checks of what was computed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Set before trl is imported: it asks the hub for nothing and keeps its banner to itself.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from measure import ResidentMemory, current_rss_bytes, memory_report, wait_for_turn


@dataclass
class StageClock:
    """Split the trainer's iterations into stages from the outside.

    An iteration ends where the trainer reports ``on_step_end``. Generation is the time inside TRL's
    ``batch_generation``; the update starts at the first ``accelerator.accumulate`` of an iteration;
    scoring is what lies between: log-probs, reference, values, rewards and advantages.
    """

    planned: int
    takes_turns: bool = False
    started: float = 0.0
    generation: float = 0.0
    generated_at: float = 0.0
    update_at: float | None = None
    iterations: list[dict[str, float]] = field(default_factory=list)
    generated: list[dict[str, int]] = field(default_factory=list)

    def begin(self) -> None:
        """Start an iteration."""
        wait_for_turn(self.takes_turns)
        self.started = time.perf_counter()

    def note(self, stage: str, seconds: float) -> None:
        """Write a finished stage to the log at once: a run that is killed keeps what it knew."""
        print(f"iteration {len(self.iterations)}: {stage} {seconds:.1f} s", file=sys.stderr)

    def wrap_generation(self, generate: Any, pad_token_id: int) -> Any:
        """Return ``batch_generation``, timed, with a count of the tokens it made."""

        def timed(model: Any, queries: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            query_responses, logits = generate(model, queries, *args, **kwargs)
            self.generated_at = time.perf_counter()
            self.generation = self.generated_at - start
            self.note("generation", self.generation)
            responses = query_responses[:, queries.shape[1] :]
            self.generated.append(
                {
                    "samples": responses.shape[0],
                    "tokens_per_sample": responses.shape[1],
                    "pad_tokens": int((responses == pad_token_id).sum()),
                }
            )
            return query_responses, logits

        return timed

    def wrap_accumulate(self, accumulate: Any) -> Any:
        """Return ``accelerator.accumulate``; its first call in an iteration starts the update."""

        def timed(*models: Any) -> Any:
            if self.update_at is None:
                self.update_at = time.perf_counter()
                self.note("scoring", self.update_at - self.generated_at)
            return accumulate(*models)

        return timed

    def end_iteration(self) -> None:
        """Close the iteration and start the next one."""
        if self.update_at is None:
            raise RuntimeError("trl_ppo_step: the trainer ended an iteration without an update")
        now = time.perf_counter()
        self.note("update", now - self.update_at)
        self.iterations.append(
            {
                "total": now - self.started,
                "generation": self.generation,
                "scoring": self.update_at - self.generated_at,
                "update": now - self.update_at,
            }
        )
        self.update_at = None
        if len(self.iterations) < self.planned:
            self.begin()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", type=Path, required=True, help="workload.json")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights, and with them of gradients and Adam states",
    )
    parser.add_argument("--iterations", type=int, default=1, help="measured iterations")
    parser.add_argument("--warmup", type=int, default=1, help="iterations before those")
    parser.add_argument("--ppo-epochs", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--turns", action="store_true", help="wait for a line before an iteration")
    return parser.parse_args()


def trainer_config(arguments: argparse.Namespace, workload: dict, output: str) -> Any:
    """Return the PPOConfig of the workload: no eval, no logging, no saving, no recomputation."""
    from trl.experimental.ppo import PPOConfig

    samples = len(workload["prompts"])
    micro_batch = min(arguments.micro_batch, samples)
    return PPOConfig(
        output_dir=output,
        use_cpu=True,
        seed=workload["seed"],
        # float32 stays float32 and bfloat16 weights need no autocast; the default would be autocast
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch,
        local_rollout_forward_batch_size=samples,
        num_mini_batches=1,
        num_ppo_epochs=arguments.ppo_epochs,
        total_episodes=samples * (arguments.warmup + arguments.iterations),
        response_length=workload["response_length"],
        # no stop token: eos is an ordinary token and every response has its full length
        stop_token=None,
        stop_token_id=None,
        temperature=1.0,
        num_sample_generations=0,
        report_to="none",
        disable_tqdm=True,
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        dataloader_pin_memory=False,
    )


def build_trainer(arguments: argparse.Namespace, workload: dict, output: str) -> Any:
    """Load actor, reference, critic and reward model and return TRL's trainer."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        PrinterCallback,
    )
    from trl.experimental.ppo import PPOTrainer

    dtype = getattr(torch, arguments.dtype)
    tokenizer = AutoTokenizer.from_pretrained(workload["policy"], padding_side="left")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(workload["pad_token_id"])

    def causal() -> Any:
        return AutoModelForCausalLM.from_pretrained(workload["policy"], dtype=dtype)

    def classifier() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(
            workload["reward"], num_labels=1, dtype=dtype
        )

    rows = [{"input_ids": prompt["input_ids"]} for prompt in workload["prompts"]]
    trainer = PPOTrainer(
        args=trainer_config(arguments, workload, output),
        processing_class=tokenizer,
        model=causal(),
        ref_model=causal(),
        reward_model=classifier(),
        value_model=classifier(),
        train_dataset=Dataset.from_list(rows),
        # never read (no evaluation), but the trainer wraps it in a loader
        eval_dataset=Dataset.from_list(rows),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def measure(arguments: argparse.Namespace, workload: dict) -> dict[str, Any]:
    """Run warm-up and measured iterations and return the content of the JSON line."""
    import torch
    from transformers import TrainerCallback
    from trl.experimental.ppo import ppo_trainer

    clock = StageClock(arguments.warmup + arguments.iterations, arguments.turns)
    logged: list[dict[str, float]] = []

    with tempfile.TemporaryDirectory() as output, ResidentMemory() as memory:
        trainer = build_trainer(arguments, workload, output)
        loaded = current_rss_bytes()
        memory.reset()

        class Clock(TrainerCallback):
            """Tell the clock about the ends of iterations."""

            def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                clock.begin()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                clock.end_iteration()

        trainer.add_callback(Clock)
        trainer.log = logged.append
        trainer.accelerator.accumulate = clock.wrap_accumulate(trainer.accelerator.accumulate)
        ppo_trainer.batch_generation = clock.wrap_generation(
            ppo_trainer.batch_generation, workload["pad_token_id"]
        )
        trainer.train()
        iterations_peak = memory.peak

    return {
        "side": "trl",
        "dtype": arguments.dtype,
        "compute_dtype": arguments.dtype,
        "threads": torch.get_num_threads(),
        "warmup": arguments.warmup,
        "iterations": clock.iterations[arguments.warmup :],
        **memory_report(iterations_peak, loaded),
        "checks": {"generated": clock.generated, "metrics": logged},
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
    }


def main() -> None:
    """Run the peer and print its JSON line, after a check of what it really generated."""
    arguments = parse_arguments()
    workload = json.loads(arguments.workload.read_text(encoding="utf-8"))
    result = measure(arguments, workload)
    wanted = (len(workload["prompts"]), workload["response_length"])
    for made in result["checks"]["generated"]:
        if (made["samples"], made["tokens_per_sample"]) != wanted:
            raise SystemExit(f"trl_ppo_step: generated {made}, wanted {wanted}: not comparable")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
