"""From logits to log-probabilities, entropies, masks and positions of response tokens.

In: logits, token ids, attention masks. Out: per-token tensors aligned so that entry t of a
response comes from position prompt_length - 1 + t, the state that chose it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.algorithms.masked import as_float


def temper(logits: Tensor, temperature: float) -> Tensor:
    """Return `logits` / `temperature` in at least float32.

    A temperature <= 0 means greedy decoding, which has no distribution of its own: the logits are
    then used untempered (as with 1.0) instead of being divided by zero.
    """
    logits = as_float(logits)
    return logits if temperature <= 0 or temperature == 1.0 else logits / temperature


def logprobs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log softmax(logits / temperature)[labels], over the full vocabulary.

    Args:
        logits: (..., V), any float dtype; computed in at least float32.
        labels: (...), int64 ids of the chosen tokens.
        temperature: of the sampler; <= 0 is treated as 1.0 (untempered).

    Returns:
        (...), float32 or float64.
    """
    logprobs = F.log_softmax(temper(logits, temperature), dim=-1)
    return logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the entropy in nats of softmax(logits), (..., V) -> (...).

    A logit of -inf (a token that cannot be chosen) adds 0 to the value and to the gradient:
    the limit of p log p is 0, while 0 * -inf would be NaN in both passes.
    """
    return _entropy(F.log_softmax(as_float(logits), dim=-1))


def logprobs_and_entropy(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, detach_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probs of `labels` and entropies from one softmax, both (...); see above.

    Args:
        logits, labels, temperature: as in `logprobs_from_logits`.
        detach_entropy: the entropy is only looked at, so keep nothing for its gradient.
    """
    logprobs = F.log_softmax(temper(logits, temperature), dim=-1)
    chosen = logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return chosen, _entropy(logprobs.detach() if detach_entropy else logprobs)


def _entropy(logprobs: Tensor) -> Tensor:
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0.0)
    return -(logprobs.exp() * finite).sum(-1)


def response_mask(ids: Tensor, stop_ids: Collection[int], lengths: Tensor | None = None) -> Tensor:
    """Return which response tokens were chosen by the policy.

    Args:
        ids: (B, T) response ids, padded on the right with anything, a stop id included.
        stop_ids: every id that ends a response (the generation config may list several).
        lengths: (B,) number of sampled tokens where the engine reports it.

    Returns:
        (B, T) bool: True up to and including the first stop id, False after it; all True where
        there is none (cut to `lengths` when given).
    """
    stops = torch.tensor(sorted(stop_ids), dtype=ids.dtype, device=ids.device)
    is_stop = torch.isin(ids, stops).long()
    # The exclusive cumulative sum counts the stops BEFORE a position, so the first one stays in.
    mask = (is_stop.cumsum(-1) - is_stop) == 0
    if lengths is not None:
        mask &= torch.arange(ids.shape[-1], device=ids.device) < lengths.unsqueeze(-1)
    return mask


def position_ids(attention_mask: Tensor) -> Tensor:
    """Return positions that count real tokens from 0, whatever side the padding is on.

    (B, S) mask -> (B, S) int64; pads hold a legal index (0 on the left, the last one on the right).
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def response_positions(prompt_length: Tensor, max_response_length: int) -> Tensor:
    """Return where the state that chose response token t sits in its sequence.

    (B,) int lengths -> (B, T) int64, entry t = prompt_length - 1 + t. Log-probs, entropies and
    values of a response are all read at these positions.

    Raises:
        ValueError: a prompt is empty, so that no state chose the first response token.
    """
    if prompt_length.numel() > 0 and int(prompt_length.min()) < 1:
        row = int(prompt_length.argmin())
        raise ValueError(
            f"prompt_length of row {row} is {int(prompt_length[row])}; at least 1 "
            "token must come before a response (add a BOS token to empty prompts)"
        )
    offsets = torch.arange(max_response_length, device=prompt_length.device)
    return prompt_length.long().unsqueeze(-1) - 1 + offsets


def response_logprobs(
    logits: Tensor, input_ids: Tensor, prompt_length: int | Tensor, temperature: float = 1.0
) -> Tensor:
    """Return the log-probs of the response tokens.

    Args:
        logits: (B, S, V) of the whole sequence.
        input_ids: (B, S) prompt + response, padded on the right.
        prompt_length: one length for all rows, or (B,).
        temperature: of the sampler; <= 0 is treated as 1.0.

    Returns:
        (B, S - shortest prompt); entry t of a row belongs to its response token t, and entries
        past the end of the sequence are 0.

    Raises:
        ValueError: a prompt length below 1.
    """
    rows, length = input_ids.shape
    if isinstance(prompt_length, int):
        prompt_length = torch.full((rows,), prompt_length, device=input_ids.device)
    width = length - int(prompt_length.min())
    states = response_positions(prompt_length, width)
    inside = states + 1 < length
    # Beyond the end any legal index will do: the result is replaced by 0.
    states = states.clamp(max=max(length - 2, 0))
    labels = input_ids.gather(1, states + 1)
    chosen_by = logits.gather(1, states.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
    return torch.where(inside, logprobs_from_logits(chosen_by, labels, temperature), 0.0)
