"""Proximal policy optimisation with a learned reward model, one controller for four roles.

In: groups of workers (actor, critic, reference policy, reward model) and prompts. Out: a better
actor, and metrics of every stage. Each method is one part of the step; `step` runs them in order:

    rollout -> compute_rewards -> compute_advantages -> update

Where the roles live, and in how many processes, is the business of the groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.advantages import gae
from verl.algorithms.controllers import AdaptiveKLController, FixedKLController
from verl.algorithms.kl import kl_penalty, sequence_kl
from verl.algorithms.masked import masked_mean, masked_std, masked_var, masked_whiten
from verl.algorithms.rewards import (
    RunningMoments,
    missing_eos_penalty,
    normalize_scores,
    overlong_penalty,
    token_rewards,
)
from verl.batch import Batch
from verl.config.load import as_config
from verl.config.schema import PPO, Config
from verl.config.section import Section
from verl.data.lengths import limited_prompt_ids
from verl.errors import ConfigError, TrainingStopped
from verl.models.chat import Prompt, decode_response, stop_ids
from verl.rollout.base import SamplingParams
from verl.seeding import derive_seed
from verl.workers.updates import optimizer_steps


class PPOTrainer:
    """PPO over four worker groups.

    Args:
        actor, critic, ref_policy, reward_model: groups made by `create_llm_model`. The reference
            may be left out when no KL term is configured.
        config: the whole tree, or its part `config.train.ppo` (which knows its tree), or {}.
        total_steps: PPO steps of the run, the horizon of the learning rates; constant rates
            when unknown.
        step_samples: samples of each of these steps, where the last batch of an epoch is smaller;
            default: `data.batch_size` each.
    """

    def __init__(
        self,
        actor: Any = None,
        critic: Any = None,
        ref_policy: Any = None,
        reward_model: Any = None,
        config: Config | PPO | Mapping[str, Any] | None = None,
        total_steps: int | None = None,
        step_samples: Sequence[int] | None = None,
    ) -> None:
        self.config = whole_tree(config)
        self.ppo = self.config.train.ppo
        self.actor, self.critic = actor, critic
        self.ref_policy, self.reward_model = ref_policy, reward_model
        self.steps_done = 0
        self.moments = RunningMoments()
        self.kl_controller = self._make_controller()
        self.reference_moments: tuple[float, float] | None = None
        self.timings: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.on_stage: Callable[[str], None] = lambda name: None
        if ref_policy is not None and (ref_policy is actor or ref_policy is critic):
            raise ConfigError(
                "ref_policy is the same object as a trained model, so its KL would always be 0; "
                "make it with create_llm_model(model_type='ref_policy', ...)"
            )
        if actor is not None and critic is not None:
            self._prepare_training(total_steps, step_samples)

    def _make_controller(self) -> FixedKLController | AdaptiveKLController:
        ppo = self.ppo
        if ppo.kl_controller == "adaptive" and ppo.kl_coef > 0:
            return AdaptiveKLController(ppo.kl_coef, ppo.kl_target, ppo.kl_horizon)
        return FixedKLController(ppo.kl_coef)

    def _prepare_training(
        self, total_steps: int | None, step_samples: Sequence[int] | None
    ) -> None:
        ppo, batch_size = self.ppo, self.config.data.batch_size
        if total_steps is None:
            ppo = ppo.model_copy(update={"lr_schedule": "constant"})
        size = ppo.minibatch_size or batch_size
        sizes = step_samples or [batch_size] * (total_steps or 1)
        counts = [optimizer_steps(samples, size, ppo.epochs) for samples in sizes]
        horizon = sum(counts)
        self.critic.prepare_training(ppo, ppo.critic_rate, horizon)
        silent = min(sum(counts[: ppo.critic_warmup_steps]), horizon - 1)
        self.actor.prepare_training(ppo, ppo.actor_lr, horizon - silent)

    # --- the step ------------------------------------------------------------------------------

    def step(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """One PPO step on `prompts`; returns every metric of it."""
        start = time.perf_counter()
        self.timings, self.metrics = {}, {}
        batch = self.rollout(prompts)
        batch = self.compute_rewards(batch)
        batch = self.compute_advantages(batch)
        self.update(batch)
        seconds = time.perf_counter() - start
        tokens = int((batch["prompt_length"] + batch["response_length"]).sum())
        return {
            **self.metrics,
            **{f"time/{name}": value for name, value in self.timings.items()},
            "time/step": seconds,
            "throughput/samples_per_second": len(batch) / seconds,
            "throughput/tokens_per_second": tokens / seconds,
        }

    def rollout(self, prompts: Sequence[Prompt]) -> Batch:
        """Sample one response per prompt (text, or chat messages) with the current actor."""
        self._require("actor")
        batch = self.prompt_batch(prompts, "rollout", self.steps_done)
        with self._stage("rollout"):
            batch = self.actor.generate(batch, self.sampling())
        return self.with_text(batch)

    def compute_rewards(self, batch: Batch) -> Batch:
        """Score the responses, take log-probs and values, and build the token rewards.

        Adds `score` (B,) raw, `rewards` (B,) raw score as the run's reward curve shows it,
        `shaped_score` (B,) after normalisation, penalties and clip, `old_logprobs`,
        `ref_logprobs`, `values`, `token_rewards` (B, T).
        """
        self._require("actor", "critic", "reward_model")
        with self._stage("score"):
            batch = self.reward_model.score(batch.send_to(self.reward_model)).to("cpu")
        if self.is_single_on_policy_step(len(batch)):
            pass  # the update itself has them
        elif self.config.rollout.trust_logprobs:
            batch = batch.with_columns(old_logprobs=batch["rollout_logprobs"])
        else:
            with self._stage("old_logprobs"):
                batch = self.actor.logprobs(
                    batch.send_to(self.actor), self.config.rollout.temperature
                )
        if self.ppo.needs_reference:
            self._require("ref_policy")
            with self._stage("reference"):
                batch = self.ref_policy.logprobs(
                    batch.send_to(self.ref_policy), self.config.rollout.temperature
                )
        with self._stage("values"):
            batch = self.critic.values(batch.send_to(self.critic), self.ppo.bootstrap_truncated)
        batch = batch.to("cpu")
        shaped = self._shape_scores(batch)
        mask, kl = batch["response_mask"], self._reward_kl(batch)
        rewards = token_rewards(shaped, kl, mask, self.kl_controller.value)
        batch = batch.with_columns(
            rewards=batch["score"], shaped_score=shaped, kl=kl, token_rewards=rewards
        )
        self._log_rewards(batch)
        return batch

    def compute_advantages(self, batch: Batch) -> Batch:
        """Add `advantages` and `returns` (B, T) by GAE, whitened if configured."""
        batch.require(["token_rewards", "values", "response_mask"], "advantages")
        mask = batch["response_mask"]
        with self._stage("advantages"):
            advantages, returns = gae(
                batch["token_rewards"],
                batch["values"],
                mask,
                self.ppo.gamma,
                self.ppo.lam,
                self._bootstrap(batch),
            )
            self.metrics |= _advantage_metrics(advantages, returns, batch["values"], mask)
            if self.ppo.whiten_advantage:
                advantages = masked_whiten(advantages, mask)
        return batch.with_columns(advantages=advantages, returns=returns)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """Train critic and actor on a batch with advantages.

        Returns `policy_loss`, `value_loss`, `kl` (per token, against the reference) and all other
        metrics of the step so far, as 0-dim tensors.
        """
        data, seed, step = self.config.data, self.config.train.seed, self.steps_done
        metrics: dict[str, float] = {}
        with self._stage("update_critic"):
            metrics |= self.critic.update(
                batch.send_to(self.critic), self.ppo, data.response_length, seed, step
            )
        if step >= self.ppo.critic_warmup_steps:
            with self._stage("update_actor"):
                metrics |= self.actor.update(
                    batch.send_to(self.actor),
                    self.ppo,
                    self.config.rollout.temperature,
                    data.response_length,
                    seed,
                    step,
                )
        if self.ppo.needs_reference:
            self.kl_controller.update(self.metrics["kl/sequence_mean"], len(batch))
        self.steps_done += 1
        self.metrics |= metrics
        named = {
            "policy_loss": self.metrics.get("policy/loss", 0.0),
            "value_loss": self.metrics["value/loss"],
            "kl": self.metrics.get("kl/token_mean", 0.0),
        }
        return {name: torch.tensor(value) for name, value in {**named, **self.metrics}.items()}

    # --- parts of the step ---------------------------------------------------------------------

    def sampling(self, temperature: float | None = None) -> SamplingParams:
        """Sampling parameters of the run; `temperature` replaces the rollout's (evaluation)."""
        rollout = self.config.rollout
        return SamplingParams(
            max_tokens=self.config.data.response_length,
            temperature=rollout.temperature if temperature is None else temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_tokens=rollout.min_tokens,
            stop_token_ids=stop_ids(self.actor.tokenizer, rollout.stop_token_ids),
            ignore_eos=rollout.ignore_eos,
        )

    def prompt_batch(self, prompts: Sequence[Prompt], purpose: str, step: int) -> Batch:
        """Tokenised prompts with the seed of each sample, which never depends on its neighbours."""
        data, tokenizer = self.config.data, self.actor.tokenizer
        kept: list[Prompt] = [getattr(p, "messages", None) or p for p in prompts]
        ids = [
            limited_prompt_ids(
                tokenizer, prompt, data.prompt_limit, data.overlong, f"prompt {i} of this batch"
            )
            for i, prompt in enumerate(kept)
        ]
        rows = [i for i, item in enumerate(ids) if item is not None]
        seed = self.config.train.seed
        return Batch(
            {},
            {
                "prompt": [kept[i] for i in rows],
                "prompt_ids": [ids[i] for i in rows],
                "seed": [derive_seed(seed, purpose, step, i) for i in rows],
            },
        )

    def with_text(self, batch: Batch) -> Batch:
        """Add column `response`: the text that is scored and read."""
        texts = [
            decode_response(self.actor.tokenizer, row[p : p + n].tolist())
            for row, p, n in zip(
                batch["input_ids"],
                batch["prompt_length"].tolist(),
                batch["response_length"].tolist(),
                strict=True,
            )
        ]
        return batch.with_columns(response=texts)

    def is_single_on_policy_step(self, samples: int) -> bool:
        """Whether the batch gives exactly one optimiser step, so that old = current policy."""
        size = self.ppo.minibatch_size or samples
        return self.ppo.epochs == 1 and size >= samples

    def _reward_kl(self, batch: Batch) -> Tensor:
        mask = batch["response_mask"]
        if "ref_logprobs" not in batch:
            return torch.zeros(mask.shape)
        policy = batch["old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"]
        return kl_penalty(policy, batch["ref_logprobs"], self.ppo.kl_estimator, mask)

    def _shape_scores(self, batch: Batch) -> Tensor:
        """Normalise, penalise, clip: (B,) from the raw scores."""
        ppo, score = self.ppo, batch["score"].clone()
        if ppo.normalize_reward == "batch":
            score = masked_whiten(score, torch.ones_like(score, dtype=torch.bool))
        elif ppo.normalize_reward == "running":
            self.moments.update(score)
            score = normalize_scores(score, self.moments.mean, self.moments.std)
        elif ppo.normalize_reward == "reference":
            if self.reference_moments is None:
                raise ConfigError(
                    "train.ppo.normalize_reward is `reference`, but the reward model's folder has "
                    "no score_statistics.json; train it with `verl rm`, or choose another setting"
                )
            score = normalize_scores(score, *self.reference_moments)
        if ppo.reward_clip is not None:
            score = score.clamp(-ppo.reward_clip, ppo.reward_clip)
        finished = torch.tensor([reason == "stop" for reason in batch["finish_reason"]])
        if ppo.missing_eos_penalty:
            score = missing_eos_penalty(
                score, finished, ppo.missing_eos_penalty, ppo.missing_eos_mode
            )
        if ppo.overlong_buffer and ppo.overlong_penalty:
            score = overlong_penalty(
                score,
                batch["response_length"],
                self.config.data.response_length,
                ppo.overlong_buffer,
                ppo.overlong_penalty,
            )
        return score

    def _bootstrap(self, batch: Batch) -> Tensor | None:
        if not self.ppo.bootstrap_truncated:
            return None
        cut = torch.tensor([reason == "length" for reason in batch["finish_reason"]])
        return torch.where(cut, batch["last_value"], 0.0)

    def _log_rewards(self, batch: Batch) -> None:
        mask, score, shaped = batch["response_mask"], batch["score"], batch["shaped_score"]
        lengths = batch["response_length"].float()
        finished = [reason == "stop" for reason in batch["finish_reason"]]
        many = len(batch) > 1
        self.metrics |= {
            "score/mean": float(score.mean()),
            "score/std": float(score.std()) if many else 0.0,
            "score/min": float(score.min()),
            "score/max": float(score.max()),
            "reward/mean": float(shaped.mean()),
            "reward/std": float(shaped.std()) if many else 0.0,
            "reward/shaped_return_mean": float(batch["token_rewards"].sum(-1).mean()),
            "response/length_mean": float(lengths.mean()),
            "response/length_max": float(lengths.max()),
            "response/finished_fraction": sum(finished) / len(finished),
            "response/empty_count": float(sum(not text for text in batch["response"])),
        }
        if "ref_logprobs" in batch:
            name = "old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"
            k1 = kl_penalty(batch[name], batch["ref_logprobs"], "k1", mask)
            k3 = kl_penalty(batch[name], batch["ref_logprobs"], "k3", mask)
            self.metrics |= {
                "kl/token_mean": float(masked_mean(k1, mask)),
                "kl/token_k3_mean": float(masked_mean(k3, mask)),
                "kl/sequence_mean": float(sequence_kl(k1, mask)),
                "kl/coef": self.kl_controller.value,
            }
        if "entropy" in batch:
            gap = (batch["old_logprobs"] - batch["rollout_logprobs"]).abs()
            self.metrics |= {
                "policy/entropy": float(masked_mean(batch["entropy"], mask)),
                "rollout/logprob_gap_mean": float(masked_mean(gap, mask)),
                "rollout/logprob_gap_max": float(torch.where(mask, gap, 0.0).max()),
            }

    # --- state ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What the controller itself must remember, as plain JSON values."""
        return {
            "steps_done": self.steps_done,
            "kl_controller": self.kl_controller.state_dict(),
            "running_moments": self.moments.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state()`."""
        self.steps_done = int(state["steps_done"])
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.moments.load_state_dict(state["running_moments"])

    def _require(self, *roles: str) -> None:
        missing = [role for role in roles if getattr(self, role) is None]
        if missing:
            raise ConfigError(
                f"this PPOTrainer has no {', '.join(missing)}; make it with "
                "create_llm_model(model_type=..., config=config.model....) and pass it in"
            )

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self.on_stage(name)
        start = time.perf_counter()
        try:
            yield
        except FloatingPointError as error:
            raise TrainingStopped(f"stage {name}: {error}") from error
        self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start


def _advantage_metrics(
    advantages: Tensor, returns: Tensor, values: Tensor, mask: Tensor
) -> dict[str, float]:
    spread = masked_var(returns, mask)
    unexplained = masked_var(returns - values, mask)
    explained = 1.0 - float(unexplained / spread) if float(spread) > 0 else 0.0
    return {
        "advantages/mean": float(masked_mean(advantages, mask)),
        "advantages/std": float(masked_std(advantages, mask)),
        "returns/mean": float(masked_mean(returns, mask)),
        "returns/std": float(masked_std(returns, mask)),
        "value/mean": float(masked_mean(values, mask)),
        "value/explained_variance": explained,
    }


def whole_tree(config: Config | Section | Mapping[str, Any] | None) -> Config:
    """The tree that a configuration belongs to, as a copy that nothing else can change.

    Takes the whole tree, the part `train.ppo` (which knows its tree), or a plain mapping.
    """
    if isinstance(config, Config):
        return Config.model_validate(config.model_dump())
    if isinstance(config, PPO):
        if isinstance(config.root, Config):
            return Config.model_validate(config.root.model_dump())
        return Config.model_validate({"train": {"ppo": config.model_dump()}})
    if config is None or isinstance(config, Mapping):
        return as_config(config or {})
    raise ConfigError(
        f"config is a {type(config).__name__}; pass the whole tree, config.train.ppo, or a dict"
    )
