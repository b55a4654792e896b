"""The critic: the value of each state that chose a response token."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.aggregation import token_weights
from verl.algorithms.value_loss import value_loss
from verl.batch import Batch
from verl.cluster.dispatch import register
from verl.config.schema import PPO
from verl.engines.microbatch import Rows
from verl.engines.torch_engine import TorchEngine
from verl.workers.layout import response_rows, scatter
from verl.workers.trained import TrainedWorker
from verl.workers.updates import StepLog, TokenStats, minibatches


class CriticWorker(TrainedWorker):
    """Value model."""

    def __init__(self, engine: TorchEngine) -> None:
        super().__init__("critic", engine)

    @register(transfer_mode="DP_COMPUTE")
    def values(self, batch: Batch, bootstrap: bool = False) -> Batch:
        """Add `values` (B, T), and with `bootstrap` also `last_value` (B,).

        `last_value` is the value of the state after the last response token, for responses that
        were cut and go on with the critic's estimate.
        """
        if self.engine.prefix is not None:
            self.engine.prefix.clear()  # rows of the last batch are done with
        rows = response_rows(batch, with_labels=False)
        mask = batch["response_mask"]
        if not bootstrap:
            return batch.with_columns(values=scatter(self.engine.values(rows), mask))
        ends = batch["prompt_length"] + batch["response_length"] - 1
        longer = Rows(
            rows.ids, [torch.cat([r, e[None].cpu()]) for r, e in zip(rows.reads, ends, strict=True)]
        )
        pieces = self.engine.values(longer).split(longer.read_counts)
        return batch.with_columns(
            values=scatter(torch.cat([p[:-1] for p in pieces]), mask),
            last_value=torch.stack([p[-1] for p in pieces]),
        )

    @register(transfer_mode="DP_COMPUTE")
    def update(
        self, batch: Batch, ppo: PPO, max_response_length: int, seed: int, step: int
    ) -> dict[str, float]:
        """Value-loss epochs on one batch; returns `value/*` metrics."""
        batch.require(["values", "returns"], "critic update")
        log = StepLog("critic", ppo.max_bad_steps, bad_in_a_row=self.bad_in_a_row)
        stats = TokenStats()
        size = ppo.minibatch_size or len(batch)
        for part in minibatches(len(batch), size, ppo.epochs, seed, step):
            mini = batch.select(part)
            mask = mini["response_mask"].cpu()
            weights = token_weights(mask, ppo.aggregation, max_length=max_response_length)
            flat = {name: mini[name].cpu()[mask] for name in ("values", "returns")}
            flat["weights"] = weights[mask]

            def loss(
                outputs: dict[str, Tensor], index: Tensor, flat: dict[str, Tensor] = flat
            ) -> Tensor:
                new = outputs["values"]
                column = {k: v[index].to(new.device) for k, v in flat.items()}
                result = value_loss(new, column["values"], column["returns"], ppo.value_clip)
                stats.add(new.numel(), clipped=result.clipped.float())
                return (result.loss * column["weights"]).sum()

            total = self.engine.backward(response_rows(mini, with_labels=False), loss)
            log.take(self.engine, total, lambda part=part: f"step {step}, samples {part[:8]}")
        self.bad_in_a_row = log.bad_in_a_row
        return {**log.metrics("value"), "value/clip_fraction": stats.mean("clipped")}
