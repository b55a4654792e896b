"""One model on one device: scoring and training in micro-batches.

In: `Rows`. Out: log-probs, entropies, values or scores at the positions asked for, in row order;
or gradients and optimiser steps. Results do not depend on how rows are cut or packed.

Only the positions that are read reach the LM head, a chunk at a time. In training each chunk runs
forward and backward at once and leaves behind only the gradient of its hidden states, so nothing
of size (tokens x vocabulary) outlives a chunk and nothing is computed twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verl.algorithms.logprobs import logprobs_and_entropy, logprobs_from_logits
from verl.engines import attention
from verl.engines.microbatch import ModelInput, Rows, pack, pad, token_plan
from verl.engines.optimizer import MasterAdamW, StepResult
from verl.engines.prefix import FrozenPrefix, frozen_depth, same_prefix, share_prefix
from verl.errors import ModelError
from verl.models.loading import LoadedModel, head_of, safe_pad_id, trunk_of

#: Loss of a chunk: (outputs by name, their flat index among all outputs) -> scalar.
LossFunction = Callable[[dict[str, Tensor], Tensor], Tensor]

#: Read positions that go through the LM head at once.
HEAD_CHUNK = 256


class TorchEngine:
    """Scores and trains one model.

    Args:
        loaded: the model, float32 on the CPU as `verl.models.loading` returns it.
        device: where it computes.
        dtype: compute precision; float32 masters are kept by the optimiser.
        tokens_per_microbatch: tokens in one forward pass.
        offload: keep the weights on the CPU between calls (frozen models).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        device: torch.device,
        dtype: torch.dtype,
        tokens_per_microbatch: int,
        offload: bool = False,
    ) -> None:
        self.loaded, self.device, self.dtype = loaded, device, dtype
        self.tokens_per_microbatch = tokens_per_microbatch
        self.offload = offload and device.type != "cpu"
        self.model: nn.Module = loaded.model
        self.optimizer: MasterAdamW | None = None
        #: Set by `reuse_prefix`.
        self.prefix: FrozenPrefix | None = None
        self.pad_id = safe_pad_id(loaded.tokenizer, loaded.vocab_size)
        self._convert()
        self.packs = loaded.kind != "encoder" and self._packing_is_exact()
        if loaded.kind == "causal":
            self._check_logits()

    def _convert(self) -> None:
        place = torch.device("cpu") if self.offload else self.device
        rotary = {n: b for n, b in self.model.named_buffers() if n.endswith("inv_freq")}
        self.model.to(dtype=self.dtype, device=place)
        for name, frequencies in rotary.items():
            # Rounded to bfloat16, a frequency is off by radians after some hundred positions.
            owner, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(owner), leaf, frequencies.to(place))
        head = head_of(self.model)
        if head is not None:
            head.float()  # a score is compared to three decimals: bfloat16 has two

    def reuse_prefix(self, of: TorchEngine | None = None) -> None:
        """Compute frozen lower blocks once per row, until `prefix.clear()`.

        For a model that meets the same rows several times between clears, as in a PPO step. Does
        nothing where no block is frozen, or where running in two parts is not exact.

        Args:
            of: an engine whose rows and frozen tensors are shared if its frozen part is the same.
        """
        if not self.packs or self.offload:
            return
        shared = of.prefix if of is not None else None
        depth = min(frozen_depth(self.model), shared.depth if shared else 10**9)
        if depth == 0:
            return
        if shared and of and depth == shared.depth and same_prefix(self.model, of.model, depth):
            share_prefix(self.model, of.model, depth)
        else:
            shared = None
        if shared is None and not self.trainable():
            return  # alone, a frozen model meets each row once
        prefix = FrozenPrefix(self.model, depth, shared.rows if shared else None)
        if self._prefix_is_exact(prefix):
            self.prefix = prefix

    def enable_training(self, optimizer: MasterAdamW) -> None:
        """Attach an optimiser made from `trainable`."""
        self.optimizer = optimizer

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters that are trained."""
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def export_view(self) -> LoadedModel:
        """The model in float32, with the optimiser's master weights, for saving."""
        if self.dtype == torch.float32:
            return self.loaded
        model = copy.deepcopy(self.model).float()
        if self.optimizer is not None:
            parameters = dict(model.named_parameters())
            with torch.no_grad():
                for name, master in self.optimizer.masters.items():
                    parameters[name].copy_(master)
        return replace(self.loaded, model=model)

    # --- scoring -------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(
        self, rows: Rows, temperature: float, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs of `rows.labels` (sum R,) float32 and, if asked, entropies of the same shape."""
        values = torch.empty(sum(rows.read_counts))
        entropies = torch.empty_like(values) if entropy else None
        with self._resident():
            for part, index in self._microbatches(rows):
                hidden = self._hidden(self._lay_out(part))
                labels = torch.cat(part.labels or []).to(self.device)
                for chunk in _chunks(len(labels)):
                    outputs = _outputs(
                        self._logits(hidden[chunk]), labels[chunk], temperature, entropy, True
                    )
                    values[index[chunk]] = outputs["logprobs"].cpu()
                    if entropies is not None:
                        entropies[index[chunk]] = outputs["entropy"].cpu()
        return values, entropies

    @torch.no_grad()
    def values(self, rows: Rows) -> Tensor:
        """Value head outputs at the read positions, (sum R,) float32."""
        result = torch.empty(sum(rows.read_counts))
        with self._resident():
            for part, index in self._microbatches(rows):
                result[index] = self._values(self._lay_out(part)).cpu()
        return result

    # --- training ------------------------------------------------------------------------------

    def backward(
        self,
        rows: Rows,
        loss: LossFunction,
        temperature: float = 1.0,
        entropy: bool = False,
        plan: list[list[int]] | None = None,
        detach_entropy: bool = False,
    ) -> float:
        """Add the gradients of `loss` over all rows; returns the summed loss.

        `loss` is called per chunk with `logprobs` (and `entropy`) or `values`, so it must be a sum
        over outputs, divided by counts of the whole optimiser batch. `plan` overrides the cut into
        micro-batches, for losses that join rows. With `detach_entropy` the entropy is only
        measured and has no gradient, which is cheaper.
        """
        total = 0.0
        for part, index in self._microbatches(rows, plan):
            layout = self._lay_out(part)
            if self.loaded.kind == "causal":
                outputs = partial(
                    _outputs, temperature=temperature, entropy=entropy, detach=detach_entropy
                )
                total += self._backward_through_head(layout, index, loss, outputs)
            else:
                value = loss({"values": self._values(layout)}, index)
                value.backward()
                total += value.item()
        return total

    def _backward_through_head(
        self,
        layout: ModelInput,
        index: Tensor,
        loss: LossFunction,
        outputs: Callable[[Tensor, Tensor], dict[str, Tensor]],
    ) -> float:
        hidden = self._hidden(layout)
        reads = hidden.detach().requires_grad_()
        assert layout.labels is not None
        total = 0.0
        for chunk in _chunks(len(layout.labels)):
            logits = self._logits(reads[chunk])
            value = loss(outputs(logits, layout.labels[chunk]), index[chunk])
            value.backward()
            total += value.item()
        if hidden.requires_grad:
            hidden.backward(reads.grad)
        return total

    def step(self) -> StepResult:
        """Take one optimiser step on the gradients gathered since the last."""
        if self.optimizer is None:
            raise RuntimeError("this engine was made without an optimiser")
        return self.optimizer.step()

    # --- forward passes ------------------------------------------------------------------------

    def _microbatches(
        self, rows: Rows, plan: list[list[int]] | None = None
    ) -> Iterator[tuple[Rows, Tensor]]:
        if plan is None:
            plan = token_plan(rows.lengths, self.tokens_per_microbatch, padded=not self.packs)
        for part in plan:
            if any(len(rows.reads[i]) for i in part):
                yield rows.select(part), rows.flat_index(part)

    def _lay_out(self, rows: Rows) -> ModelInput:
        return pack(rows, self.device) if self.packs else pad(rows, self.device, self.pad_id)

    def _hidden(self, layout: ModelInput) -> Tensor:
        """Hidden states at the read positions, (R, H)."""
        context = attention.packing() if self.packs else nullcontext()
        with context:
            if self.prefix is not None:
                hidden = self.prefix.hidden(layout.ids, layout.arguments)
            else:
                output = trunk_of(self.model)(**layout.arguments, use_cache=False)
                hidden = output.last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1])[layout.index]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits (R, V); rows of the vocabulary that the tokenizer lacks are -inf."""
        logits = self.model.get_output_embeddings()(hidden).float()
        config = self.model.config.get_text_config()
        softcap = getattr(config, "final_logit_softcapping", None)
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        divisor, factor = (getattr(config, n, None) for n in ("logits_scaling", "logit_scale"))
        if divisor:
            logits = logits / divisor
        if isinstance(factor, float):
            logits = logits * factor
        if logits.shape[-1] > self.loaded.vocab_size:
            padding = torch.arange(logits.shape[-1], device=logits.device) >= self.loaded.vocab_size
            logits = logits.masked_fill(padding, float("-inf"))
        return logits

    def _values(self, layout: ModelInput) -> Tensor:
        if self.loaded.kind == "encoder":
            output = self.model(**layout.arguments)
            return output.logits[:, self.loaded.score_index].float()
        head = head_of(self.model)
        assert head is not None
        return head(self._hidden(layout).float())[:, self.loaded.score_index]

    @contextmanager
    def _resident(self) -> Iterator[None]:
        """Have an offloaded model on its device for the duration of a call."""
        if self.offload:
            self.model.to(self.device)
        try:
            yield
        finally:
            if self.offload:
                self.model.to("cpu")

    @torch.no_grad()
    def _packing_is_exact(self) -> bool:
        """Try packing on three short rows: some architectures mix what stands in one line."""
        before = self.model.config.get_text_config()._attn_implementation
        rows = self._probe_rows()
        with self._resident():
            alone = torch.cat([self._probe(rows.select([i]), packed=False) for i in range(3)])
            try:
                self.model.set_attn_implementation(attention.NAME)
                packed = self._probe(rows, packed=True)
            except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
                packed = None
        if packed is not None and torch.allclose(packed, alone, atol=_tolerance(self.dtype, alone)):
            return True
        self.model.set_attn_implementation(before)
        return False

    @torch.no_grad()
    def _prefix_is_exact(self, prefix: FrozenPrefix) -> bool:
        """Try both ways: some architectures change what enters the first block (scaled embeddings)."""
        rows = self._probe_rows()
        whole = self._hidden(self._lay_out(rows)).float()
        trial = FrozenPrefix(self.model, prefix.depth)
        layout = self._lay_out(rows)
        try:
            with attention.packing():
                hidden = trial.hidden(layout.ids, layout.arguments)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError):
            return False
        parts = hidden.reshape(-1, hidden.shape[-1])[layout.index].float()
        return torch.allclose(parts, whole, atol=_tolerance(self.dtype, whole))

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Compare `_logits` with the model's own: some architectures scale what the head gives."""
        rows, known = self._probe_rows(), self.loaded.vocab_size
        layout = pad(rows, self.device, self.pad_id)
        with self._resident():
            theirs = self.model(**layout.arguments, use_cache=False).logits.float()
            theirs = theirs.reshape(-1, theirs.shape[-1])[layout.index, :known]
            ours = self._logits(self._hidden(self._lay_out(rows)))[:, :known]
        if not torch.allclose(ours, theirs, atol=_tolerance(self.dtype, theirs)):
            raise ModelError(
                f"{type(self.model).__name__}: the logits of this architecture are not those of its "
                "output layer, and the difference is not one known here (soft cap, scale). "
                "Use another model."
            )

    def _probe_rows(self) -> Rows:
        return Rows(
            ids=[torch.arange(n) % self.loaded.vocab_size for n in (3, 7, 2)],
            reads=[torch.arange(n) for n in (3, 7, 2)],
        )

    def _probe(self, rows: Rows, packed: bool) -> Tensor:
        self.packs = packed
        return self._hidden(self._lay_out(rows)).float()


def _tolerance(dtype: torch.dtype, sample: Tensor) -> float:
    return (1e-4 if dtype == torch.float32 else 3e-2) * float(sample.abs().max())


def _outputs(
    logits: Tensor, labels: Tensor, temperature: float, entropy: bool, detach: bool
) -> dict[str, Tensor]:
    """What a chunk's loss is made of."""
    if not entropy:
        return {"logprobs": logprobs_from_logits(logits, labels, temperature)}
    logprobs, spread = logprobs_and_entropy(logits, labels, temperature, detach)
    return {"logprobs": logprobs, "entropy": spread}


def _chunks(count: int) -> Iterator[slice]:
    for start in range(0, count, HEAD_CHUNK):
        yield slice(start, min(start + HEAD_CHUNK, count))


def build_optimizer(engine: TorchEngine, section: Any, lr: float, total_steps: int) -> MasterAdamW:
    """Make the optimiser of an engine's trainable parameters and attach it."""
    optimizer = MasterAdamW(engine.trainable(), section, lr, total_steps)
    engine.enable_training(optimizer)
    return optimizer
