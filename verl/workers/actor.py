"""The actor: samples responses, gives their log-probs, and learns from advantages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregation import token_weights
from verl.algorithms.kl import kl_penalty
from verl.algorithms.policy_loss import clipped
from verl.batch import Batch
from verl.cluster.dispatch import register
from verl.config.schema import PPO
from verl.engines.torch_engine import TorchEngine
from verl.rollout.base import RolloutEngine, SamplingParams
from verl.workers.layout import assemble, response_rows, scatter
from verl.workers.trained import TrainedWorker
from verl.workers.updates import StepLog, TokenStats, minibatches


class ActorWorker(TrainedWorker):
    """Policy model with a rollout engine on the same weights."""

    def __init__(self, engine: TorchEngine, rollout: RolloutEngine) -> None:
        super().__init__("actor", engine)
        self.rollout = rollout

    @register(transfer_mode="DP_COMPUTE")
    def generate(self, batch: Batch, params: SamplingParams) -> Batch:
        """Sample one response per prompt.

        Reads columns `prompt_ids` (token ids) and `seed`; adds `input_ids`, `prompt_length`,
        `response_length`, `response_mask`, `rollout_logprobs`, `finish_reason`.
        """
        batch.require(["prompt_ids", "seed"], "rollout")
        if self.engine.prefix is not None:
            self.engine.prefix.clear()  # new rows are coming; those of the last batch are done with
        return assemble(batch, self.rollout.generate(batch["prompt_ids"], params, batch["seed"]))

    @register(transfer_mode="DP_COMPUTE")
    def logprobs(self, batch: Batch, temperature: float) -> Batch:
        """Add `old_logprobs` and `entropy`, both (B, T)."""
        rows = response_rows(batch, with_labels=True)
        values, entropy = self.engine.logprobs(rows, temperature, entropy=True)
        mask = batch["response_mask"]
        assert entropy is not None
        return batch.with_columns(
            old_logprobs=scatter(values, mask), entropy=scatter(entropy, mask)
        )

    @register(transfer_mode="DP_COMPUTE")
    def update(
        self,
        batch: Batch,
        ppo: PPO,
        temperature: float,
        max_response_length: int,
        seed: int,
        step: int,
    ) -> dict[str, float]:
        """PPO epochs on one batch; returns `policy/*` metrics.

        Without the column `old_logprobs` (one on-policy optimiser step) the old log-probs are
        those of the update itself.
        """
        needed = ["advantages", *(["ref_logprobs"] if ppo.kl_loss_coef else [])]
        batch.require(needed, "actor update")
        log = StepLog("actor", ppo.max_bad_steps, bad_in_a_row=self.bad_in_a_row)
        stats, first = TokenStats(), TokenStats()
        size = ppo.minibatch_size or len(batch)
        for part in minibatches(len(batch), size, ppo.epochs, seed, step):
            mini = batch.select(part)
            loss = _PolicyLoss(mini, ppo, max_response_length, stats, None if log.losses else first)
            rows = response_rows(mini, with_labels=True)
            total = self.engine.backward(
                rows,
                loss,
                temperature,
                entropy=loss.needs_entropy,
                detach_entropy=not ppo.entropy_coef,
            )
            log.take(self.engine, total, lambda part=part: f"step {step}, samples {part[:8]}")
        self.bad_in_a_row = log.bad_in_a_row
        return {**log.metrics("policy"), **_policy_metrics(stats, first)}


class _PolicyLoss:
    """Loss of one chunk of response tokens; counts are those of the whole mini-batch."""

    def __init__(
        self,
        mini: Batch,
        ppo: PPO,
        max_response_length: int,
        stats: TokenStats,
        first: TokenStats | None,
    ) -> None:
        mask = mini["response_mask"].cpu()
        weights = token_weights(mask, ppo.aggregation, max_length=max_response_length)
        names = ["advantages", "old_logprobs"] + (["ref_logprobs"] if ppo.kl_loss_coef else [])
        self.flat: dict[str, Tensor] = {"weights": weights[mask]}
        for name in names:
            if name in mini:
                self.flat[name] = mini[name].cpu()[mask]
        self.ppo, self.stats, self.first = ppo, stats, first
        # Without log-probs from the trainer nothing has measured the entropy yet.
        self.needs_entropy = ppo.entropy_coef > 0 or "entropy" not in mini

    def __call__(self, outputs: dict[str, Tensor], index: Tensor) -> Tensor:
        ppo, logprobs = self.ppo, outputs["logprobs"]
        column = {k: v[index].to(logprobs.device) for k, v in self.flat.items()}
        old = column.get("old_logprobs", logprobs.detach())
        result = clipped(
            logprobs,
            old,
            column["advantages"],
            torch.ones_like(logprobs, dtype=torch.bool),
            ppo.clip_epsilon,
            ppo.clip_epsilon_high or ppo.clip_epsilon,
            ppo.dual_clip,
        )
        loss = result.loss
        if ppo.entropy_coef:
            loss = loss - ppo.entropy_coef * outputs["entropy"]
        extra: dict[str, Tensor] = {}
        if ppo.kl_loss_coef:
            kl = kl_penalty(logprobs, column["ref_logprobs"], ppo.kl_loss_estimator)
            loss = loss + ppo.kl_loss_coef * kl
            extra["kl_loss"] = kl
        if "entropy" in outputs:
            extra["entropy"] = outputs["entropy"]
        self._count(result, old - logprobs.detach(), extra)
        return (loss * column["weights"]).sum()

    def _count(self, result: Any, negative_log_ratio: Tensor, extra: dict[str, Tensor]) -> None:
        count = result.ratio.numel()
        self.stats.add(
            count,
            ratio=result.ratio,
            clipped=result.clipped.float(),
            dual_clipped=result.dual_clipped.float(),
            approx_kl=negative_log_ratio,
            **extra,
        )
        self.stats.peak("ratio", result.ratio)
        if self.first is not None:
            self.first.peak("deviation", (result.ratio - 1).abs())


def _policy_metrics(stats: TokenStats, first: TokenStats) -> dict[str, float]:
    metrics = {
        "policy/clip_fraction": stats.mean("clipped"),
        "policy/dual_clip_fraction": stats.mean("dual_clipped"),
        "policy/ratio_mean": stats.mean("ratio"),
        "policy/ratio_max": stats.maxima.get("ratio", 1.0),
        "policy/approx_kl": stats.mean("approx_kl"),
        "policy/first_ratio_deviation": first.maxima.get("deviation", 0.0),
    }
    if "kl_loss" in stats.sums:
        metrics["policy/kl_loss"] = stats.mean("kl_loss")
    if "entropy" in stats.sums:
        metrics["policy/entropy"] = stats.mean("entropy")
    return metrics
