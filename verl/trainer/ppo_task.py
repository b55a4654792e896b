"""PPO as a task of the run loop: prompts from a file, four groups, held-out evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.checkpoint.atomic import write_text_atomic
from verl.cluster.local import LocalExecutor
from verl.config.schema import Config
from verl.data.datasets import DataProvider, RowDataset
from verl.data.lengths import tokenize_prompts
from verl.data.loader import LoaderBatch, ResumableLoader
from verl.errors import DataError, RunDirectoryError
from verl.evaluation.policy import evaluate_policy, read_baseline, write_samples
from verl.models.chat import Prompt
from verl.trainer.fingerprints import model_fingerprint
from verl.trainer.plan import step_sizes
from verl.trainer.ppo import PPOTrainer
from verl.trainer.reward_model import STATISTICS_FILE
from verl.workers.build import (
    build_actor,
    build_critic,
    build_reference,
    build_reward,
    describe_load,
)


class PPOTask:
    """One PPO step per batch of prompts."""

    stage = "ppo"
    best_metric = ("eval/score_sampled_mean", True)

    def __init__(self, config: Config, say: Callable[[str], None] = print) -> None:
        self.config = config
        actor, critic, reference, reward = self._start_roles(say)
        data = config.data
        provider = DataProvider(config)
        self.rows = provider.train("rl")
        self.kept, dropped = self._usable(self.rows, actor.tokenizer)
        self.eval_prompts: list[Prompt] = []
        self.eval_rows: RowDataset | None = None
        if data.eval is not None:
            self.eval_rows = provider.eval("rl")
            usable, _ = self._usable(self.eval_rows, actor.tokenizer)
            self.eval_prompts = [
                self.eval_rows[i]["prompt"] for i in usable[: config.eval.num_prompts]
            ]
        self.loader = ResumableLoader(
            len(self.kept), data.batch_size, config.train.seed, data.shuffle,
            config.train.num_epochs, config.train.total_steps,
            dropped=dropped, source=str(self.rows.path),
        )  # fmt: skip
        self.trainer = PPOTrainer(
            actor, critic, reference, reward, config, total_steps=self.loader.total_steps,
            step_samples=step_sizes(len(self.kept), data.batch_size, self.loader.total_steps),
        )  # fmt: skip
        self.trainer.reference_moments = _score_statistics(config)
        self._last: list[Prompt] = []

    def _start_roles(self, say: Callable[[str], None]) -> tuple[Any, Any, Any, Any]:
        config, executor = self.config, LocalExecutor(self.config.resource)

        def start(role: str, make: Callable[[Any], Any]) -> Any:
            say(describe_load(config, role))
            return executor.start(role, make)

        actor = start("actor", lambda device: build_actor(config, device))
        worker = actor.workers[0]
        critic = start("critic", lambda device: build_critic(config, device, worker))
        reference = None
        if config.train.ppo.needs_reference:
            reference = start("ref_policy", lambda device: build_reference(config, device, worker))
        reward = start("reward_model", lambda device: build_reward(config, device, worker))
        return actor, critic, reference, reward

    def _usable(self, rows: RowDataset, tokenizer: Any) -> tuple[list[int], int]:
        data = self.config.data
        kept, dropped = tokenize_prompts(rows, tokenizer, data.prompt_limit, data.overlong)
        for index in kept:
            style = (rows[index].get("reward_model") or {}).get("style", "model")
            if style != "model":
                raise DataError(
                    f"{rows.where(index)}: reward_model.style is {style!r}; this version scores "
                    'with a reward model only. Set it to "model", or take these rows out.'
                )
        return kept, dropped

    def step(self, batch: LoaderBatch, on_stage: Callable[[str], None]) -> dict[str, float]:
        """One PPO step on a batch of prompts."""
        self._last = [self.rows[self.kept[i]]["prompt"] for i in batch.indices]
        self.trainer.on_stage = on_stage
        return self.trainer.step(self._last)

    def evaluate(self, step: int, samples: Path) -> dict[str, float]:
        """Greedy and sampled answers to the held-out prompts, against those of step 0."""
        if not self.eval_prompts:
            return {}
        start = samples.with_name("step_000000.jsonl")
        if step > 0 and not start.exists():
            raise RunDirectoryError(
                f"{start} is missing: the answers of the start policy are what `eval/win_rate` "
                "compares with. Put the file back, or start a new run with another run_dir="
            )
        baseline = read_baseline(start) if step > 0 else None
        metrics, records = evaluate_policy(
            self.trainer, self.eval_prompts, self.config.eval.temperature, baseline
        )
        write_samples(samples, records)
        return metrics

    def save(self, folder: Path) -> None:
        """Write actor and critic with their optimisers."""
        self.trainer.actor.save_state(folder)
        self.trainer.critic.save_state(folder)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.trainer.actor.load_state(folder)
        self.trainer.critic.load_state(folder)

    def state(self) -> dict[str, Any]:
        """State of the controller."""
        return self.trainer.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore `state()`."""
        self.trainer.load_state(state)

    def inputs(self) -> dict[str, str]:
        """Fingerprints of the four models and the data."""
        models = self.config.model
        found = {
            f"input.{role}": model_fingerprint(getattr(models, role).pretrained_path)
            for role in ("actor", "critic", "ref_policy", "reward_model")
        }
        found["input.train"] = self.rows.fingerprint()
        if self.eval_rows is not None:
            found["input.eval"] = self.eval_rows.fingerprint()
        return found

    def export(self, folder: Path) -> None:
        """Write the actor; `verl export --role critic` writes the critic."""
        self.trainer.actor.export(folder)

    def dump(self, folder: Path, step: int) -> None:
        """Write the prompts of the last batch."""
        lines = [json.dumps({"prompt": p}, ensure_ascii=False) for p in self._last]
        write_text_atomic(folder / f"batch_step_{step:06d}.jsonl", "\n".join(lines) + "\n")


def _score_statistics(config: Config) -> tuple[float, float] | None:
    """Mean and deviation that `verl rm` stored beside the reward model, if any."""
    path = config.model.reward_model.pretrained_path
    file = Path(path) / STATISTICS_FILE if path else None
    if file is None or not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    return float(content["mean"]), float(content["std"])
