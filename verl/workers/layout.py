"""From batches to engine rows and back: which positions belong to the response.

Log-prob and value of response token t come from position t - 1, the state that chose it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.batch import Batch
from verl.engines.microbatch import Rows
from verl.rollout.base import Completion


def response_rows(batch: Batch, with_labels: bool) -> Rows:
    """Rows of prompt + response whose outputs are those of the tokens with mask 1.

    Reads `input_ids` (B, S), `prompt_length` (B,), `response_length` (B,), `response_mask` (B, T).

    Raises:
        ValueError: a prompt is empty, so that no state chose the first response token.
    """
    batch.require(["input_ids", "prompt_length", "response_length", "response_mask"], "engine")
    ids, reads, labels = [], [], []
    mask = batch["response_mask"].cpu()
    for row, prompt, response, valid in zip(
        batch["input_ids"].cpu(),
        batch["prompt_length"].tolist(),
        batch["response_length"].tolist(),
        mask,
        strict=True,
    ):
        if prompt < 1:
            raise ValueError(
                f"the prompt of sample {len(ids)} has no tokens; at least 1 must come before a "
                "response (add a BOS token to empty prompts)"
            )
        positions = prompt + valid.nonzero()[:, 0]
        ids.append(row[: prompt + response])
        reads.append(positions - 1)
        labels.append(row[positions])
    return Rows(ids, reads, labels if with_labels else None)


def scatter(flat: Tensor, mask: Tensor) -> Tensor:
    """Put flat outputs (sum of mask,) back to (B, T); 0 where the mask is 0."""
    result = torch.zeros(mask.shape, dtype=flat.dtype)
    result[mask.cpu()] = flat
    return result


def assemble(batch: Batch, completions: Sequence[Completion]) -> Batch:
    """Add what a rollout made to its prompts: ids, lengths, mask, log-probs, finish reason."""
    prompts: list[list[int]] = batch["prompt_ids"]
    lengths = [len(c.ids) for c in completions]
    width = max(len(p) + n for p, n in zip(prompts, lengths, strict=True))
    longest = max(lengths)
    input_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros(len(prompts), longest, dtype=torch.bool)
    logprobs = torch.zeros(len(prompts), longest)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        row = [*prompt, *completion.ids]
        input_ids[i, : len(row)] = torch.tensor(row)
        mask[i, : lengths[i]] = True
        logprobs[i, : lengths[i]] = torch.tensor(completion.logprobs)
    return batch.with_columns(
        input_ids=input_ids,
        prompt_length=torch.tensor([len(p) for p in prompts]),
        response_length=torch.tensor(lengths),
        response_mask=mask,
        rollout_logprobs=logprobs,
        finish_reason=[c.finish_reason for c in completions],
    )
