"""The `native` rollout engine: batched sampling on the actor's own weights.

In: prompts, sampling parameters, one seed per prompt. Out: completions in the caller's order.
It runs the module it is given as it is at that moment: no copy of the weights, no
`generation_config`, and no cache that outlives a call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from verl.errors import DataError, ModelError
from verl.rollout.attention import grouped_attention
from verl.rollout.base import Completion, SamplingParams, rollout_engine
from verl.rollout.cache import WindowCache
from verl.rollout.packed import packed_linears, packing_pays
from verl.rollout.sampling import UnusableLogitsError, draw, uniforms

# A prefill batch is closed when its padding would exceed this many tokens: about what the
# weights' trip through memory costs, which is what one more batch adds.
_PREFILL_PADDING = 64


@rollout_engine("native")
class NativeEngine:
    """Samples from a transformers causal LM (a peft model too) with a key-value cache.

    Args:
        model: the policy; its training flags and attention implementation are restored after
            every call.
        vocab_size: ids below this belong to the tokenizer; the model's rows above it are padding
            and are never drawn.
        pad_token_id: fills the left of shorter prompts; always masked.
        max_rows: most samples decoded together.
        device: where the model is; by default the device of its first parameter.

    Raises:
        ValueError: `vocab_size`, `pad_token_id` or `max_rows` is out of range.
    """

    name: str

    def __init__(
        self,
        model: nn.Module,
        vocab_size: int,
        pad_token_id: int,
        max_rows: int = 64,
        device: torch.device | str | None = None,
    ) -> None:
        embeddings = model.get_input_embeddings().weight.shape[0]
        if not 0 < vocab_size <= embeddings:
            raise ValueError(
                f"vocab_size must be in 1..{embeddings} (rows of the embedding), got {vocab_size}"
            )
        if not 0 <= pad_token_id < embeddings:
            raise ValueError(
                f"pad_token_id must be in 0..{embeddings - 1} (rows of the embedding), "
                f"got {pad_token_id}"
            )
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        self.model = model
        self.vocab_size = vocab_size
        self.pad_token_id = pad_token_id
        self.max_rows = max_rows
        self.device = torch.device(device) if device else next(model.parameters()).device
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._keeps_last_logits = "logits_to_keep" in inspect.signature(base.forward).parameters

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """Return one completion per prompt, in order; see `RolloutEngine.generate`.

        Equality of samples across batches is that of their draws: a token could differ only
        where rounding of the logits, which matrix products of another height may change in the
        last digit, moves a probability across the draw.

        Raises:
            DataError: a prompt is empty, too long for the model, or holds an unknown id.
            ModelError: the model returned NaN or no finite logits.
            ValueError: prompts and seeds differ in number, or a stop id is not in the vocabulary.
        """
        self._check(prompts, params, seeds)
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        completions: dict[int, Completion] = {}
        with _frozen(self.model), grouped_attention(self.model), self._fast_linears(len(prompts)):
            for start in range(0, len(order), self.max_rows):
                rows = order[start : start + self.max_rows]
                draws = np.stack([uniforms(seeds[i], params.max_tokens) for i in rows])
                group = _Group(rows, [prompts[i] for i in rows], draws, self.device)
                completions.update(self._generate_group(group, params))
        return [completions[i] for i in range(len(prompts))]

    def _fast_linears(self, prompts: int) -> AbstractContextManager[None]:
        # A single row is bound by the weights' trip through memory, which no layout shortens.
        if prompts == 1 or not packing_pays():
            return nullcontext()
        return packed_linears(self.model, min(prompts, self.max_rows))

    def _generate_group(self, group: _Group, params: SamplingParams) -> dict[int, Completion]:
        """Decode one group until each of its rows has finished; return {prompt index: ...}."""
        cache = WindowCache(self.model.config, len(group.rows), group.width + params.max_tokens)
        mask = group.attention_mask(params.max_tokens)
        padded = bool((group.lengths < group.width).any())
        stops = torch.tensor(() if params.ignore_eos else params.stop_token_ids, dtype=torch.long)
        stops = stops.to(self.device)
        result = _Result.empty(len(group.rows), params.max_tokens, self.device)
        live = torch.arange(len(group.rows), device=self.device)
        logits = self._prefill(group, cache, mask)
        for step in range(params.max_tokens):
            ids, logprobs = self._draw(logits, params, group, live, step)
            done = result.record(live, step, ids, logprobs, stops)
            if bool(done.all()) or step + 1 == params.max_tokens:
                break
            keep = _rows_to_keep(done)
            if keep is not None:
                live, ids, mask = live[keep], ids[keep], mask[keep]
                cache.batch_select_indices(keep)
            columns = group.width + step + 1
            logits = self._forward(
                ids[:, None],
                mask[:, :columns] if padded else None,
                (group.lengths[live] + step)[:, None],
                cache,
            )
        return result.completions(group.rows)

    def _prefill(self, group: _Group, cache: WindowCache, mask: Tensor) -> Tensor:
        """Fill the cache with the prompts and return the logits (B, V) of their last tokens.

        Prompts sit at the right end of the first `group.width` columns whichever batch fills
        them, so that the rows can be decoded as one batch afterwards.
        """
        input_ids = group.input_ids(self.pad_token_id)
        spans = _prefill_spans(group.lengths.tolist()) if cache.has_windows else None
        logits = []
        for rows in spans or [slice(0, len(group.rows))]:
            start = group.width - int(group.lengths[rows].max()) if spans else 0
            cache.show(rows, start=start, length=0)
            tokens = mask[rows, start : group.width]
            positions = (tokens.long().cumsum(dim=-1) - 1).clamp(min=0)
            padded = not bool(tokens.all())
            logits.append(
                self._forward(input_ids[rows, start:], tokens if padded else None, positions, cache)
            )
        cache.show(slice(0, len(group.rows)), start=0, length=group.width)
        return torch.cat(logits)

    def _forward(
        self, input_ids: Tensor, mask: Tensor | None, position_ids: Tensor, cache: WindowCache
    ) -> Tensor:
        """Run the model on (B, n) new tokens and return the last position's logits (B, V)."""
        extra = {"logits_to_keep": 1} if self._keeps_last_logits else {}
        output = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            **extra,
        )
        return output.logits[:, -1]

    def _draw(
        self, logits: Tensor, params: SamplingParams, group: _Group, live: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Draw token `step` of the live rows; name the prompt where the logits are unusable."""
        no_stop = not params.ignore_eos and step < params.min_tokens
        banned = params.stop_token_ids if no_stop else ()
        try:
            return draw(logits, params, group.draws[live, step], self.vocab_size, banned)
        except UnusableLogitsError as error:
            prompt = group.rows[int(live[error.row])]
            raise ModelError(
                f"rollout of prompt {prompt}, response token {step}: {error}; the policy's "
                "weights are probably not finite, so go back to the last good checkpoint"
            ) from error

    def _check(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> None:
        if len(prompts) != len(seeds):
            raise ValueError(f"{len(prompts)} prompts need as many seeds, got {len(seeds)}")
        unknown = [token for token in params.stop_token_ids if token >= self.vocab_size]
        if unknown:
            raise ValueError(f"stop_token_ids {unknown} are not below vocab_size {self.vocab_size}")
        limit = getattr(self.model.config, "max_position_embeddings", None)
        for row, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise DataError(f"rollout prompt {row} is empty: give it at least one token")
            if limit is not None and len(prompt) + params.max_tokens > limit:
                raise DataError(
                    f"rollout prompt {row} has {len(prompt)} tokens; with {params.max_tokens} "
                    f"response tokens it exceeds the model's {limit} positions: lower "
                    "data.prompt_length or data.response_length"
                )
            if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
                raise DataError(
                    f"rollout prompt {row} holds ids from {min(prompt)} to {max(prompt)}; they "
                    f"must be in 0..{self.vocab_size - 1}: tokenize it with the model's tokenizer"
                )


class _Group:
    """The prompts that are decoded together, longest first, left-padded to one width.

    `rows` are their places in the caller's list; `draws` (B, T) float64 their uniforms.
    """

    def __init__(
        self,
        rows: list[int],
        prompts: list[Sequence[int]],
        draws: np.ndarray,
        device: torch.device,
    ) -> None:
        self.rows, self.prompts, self.device = rows, prompts, device
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.width = len(prompts[0])
        self.draws = torch.from_numpy(draws).to(device)

    def input_ids(self, pad_token_id: int) -> Tensor:
        padded = [
            [pad_token_id] * (self.width - len(prompt)) + list(prompt) for prompt in self.prompts
        ]
        return torch.tensor(padded, device=self.device)

    def attention_mask(self, max_tokens: int) -> Tensor:
        """Return the mask (B, width + max_tokens) bool of prompts and all responses to come."""
        columns = torch.arange(self.width + max_tokens, device=self.device)
        return columns >= (self.width - self.lengths)[:, None]


@dataclass(frozen=True)
class _Result:
    """What has been drawn for a group: tokens and log-probs (B, T), where each response ended."""

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    stopped: Tensor

    @classmethod
    def empty(cls, rows: int, max_tokens: int, device: torch.device) -> _Result:
        return cls(
            tokens=torch.zeros((rows, max_tokens), dtype=torch.long, device=device),
            logprobs=torch.zeros((rows, max_tokens), dtype=torch.float32, device=device),
            lengths=torch.full((rows,), max_tokens, device=device),
            stopped=torch.zeros(rows, dtype=torch.bool, device=device),
        )

    def record(
        self, live: Tensor, step: int, ids: Tensor, logprobs: Tensor, stops: Tensor
    ) -> Tensor:
        """Store token `step` of the rows `live`; return which of them have finished.

        Rows that finished earlier but are still decoded write behind their end, harmlessly.
        """
        self.tokens[live, step] = ids
        self.logprobs[live, step] = logprobs
        done = self.stopped[live]
        ended = live[torch.isin(ids, stops) & ~done]
        self.lengths[ended] = step + 1
        self.stopped[ended] = True
        return self.stopped[live]

    def completions(self, rows: Sequence[int]) -> dict[int, Completion]:
        columns = (self.tokens, self.logprobs, self.lengths, self.stopped)
        return {
            row: Completion(ids[:length], logprobs[:length], "stop" if stopped else "length")
            for row, ids, logprobs, length, stopped in zip(
                rows, *(column.tolist() for column in columns), strict=True
            )
        }


def _rows_to_keep(done: Tensor) -> Tensor | None:
    """Return the indices of unfinished rows once an eighth has finished, None before.

    Dropping rows copies the cache; waiting for an eighth keeps the copies a small part of it.
    """
    finished = int(done.sum())
    if finished == 0 or finished * 8 < len(done):
        return None
    return (~done).nonzero().squeeze(-1)


def _prefill_spans(lengths: Sequence[int]) -> list[slice]:
    """Split rows, longest first, into batches whose padding stays below `_PREFILL_PADDING`."""
    starts, padding = [0], 0
    for row, length in enumerate(lengths):
        padding += lengths[starts[-1]] - length
        if padding > _PREFILL_PADDING:
            starts.append(row)
            padding = 0
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(lengths)], strict=True)]


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Dropout off and no autograd within the context; every module's training flag comes back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, training in modes:
            module.training = training
