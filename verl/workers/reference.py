"""The reference policy: log-probs under the frozen start of the actor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from verl.batch import Batch
from verl.cluster.dispatch import register
from verl.engines.torch_engine import TorchEngine
from verl.workers.layout import response_rows, scatter


class ReferenceWorker:
    """A frozen policy. `context` is entered around each pass (an adapter switched off)."""

    def __init__(
        self,
        engine: TorchEngine,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.engine, self.context = engine, context
        self.device = engine.device

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model."""
        return self.engine.loaded.tokenizer

    @register(transfer_mode="DP_COMPUTE")
    def logprobs(self, batch: Batch, temperature: float) -> Batch:
        """Add `ref_logprobs` (B, T)."""
        rows = response_rows(batch, with_labels=True)
        with self.context():
            values, _ = self.engine.logprobs(rows, temperature)
        return batch.with_columns(ref_logprobs=scatter(values, batch["response_mask"]))
