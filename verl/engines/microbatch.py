"""Rows of tokens, and how they are cut into micro-batches and laid out for one forward pass.

In: rows of ids with the positions whose output is wanted. Out: tensors for the model, either
packed end to end (nothing padded) or padded to the longest row of a bucket of similar lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.partition import plan_microbatches

#: Tokens in one forward pass where the configuration names no number. On a CPU 512 were faster than
#: 1,024 and need less memory (docs/results.md); the number for GPUs is not measured yet.
DEFAULT_TOKENS = {"cpu": 512, "cuda": 8192}


def tokens_at_once(setting: int | None, device: torch.device) -> int:
    """Tokens in one forward pass on `device`: the setting, or what suits the device."""
    return setting or DEFAULT_TOKENS.get(device.type, DEFAULT_TOKENS["cuda"])


@dataclass(frozen=True)
class Rows:
    """Token rows and what is read from them.

    Attributes:
        ids: per row, (S_i,) int64 token ids without padding.
        reads: per row, (R_i,) int64 positions whose hidden state is used.
        labels: per row, (R_i,) int64 ids whose log-prob is taken there; None for value models.
        type_ids: per row, segment ids for encoders trained on pairs, or None.
    """

    ids: list[Tensor]
    reads: list[Tensor]
    labels: list[Tensor] | None = None
    type_ids: list[Tensor] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row) for row in self.ids]

    @property
    def read_counts(self) -> list[int]:
        """Outputs of each row."""
        return [len(row) for row in self.reads]

    def select(self, indices: Sequence[int]) -> Rows:
        """The rows at `indices`, in that order."""
        return Rows(
            [self.ids[i] for i in indices],
            [self.reads[i] for i in indices],
            [self.labels[i] for i in indices] if self.labels is not None else None,
            [self.type_ids[i] for i in indices] if self.type_ids is not None else None,
        )

    def flat_index(self, indices: Sequence[int]) -> Tensor:
        """Positions of the outputs of rows `indices` among the outputs of all rows, (sum R_i,)."""
        counts = torch.tensor(self.read_counts)
        ends = counts.cumsum(0)
        pieces = [torch.arange(int(ends[i] - counts[i]), int(ends[i])) for i in indices]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class ModelInput:
    """One forward pass: model arguments, and where its outputs are read.

    `index` (R,) points into the hidden states flattened over batch and position; `ids` are the rows.
    """

    ids: list[Tensor]
    arguments: dict[str, object]
    index: Tensor
    labels: Tensor | None


def pack(rows: Rows, device: torch.device) -> ModelInput:
    """Lay the rows end to end in one sequence of shape (1, sum S_i)."""
    offsets = torch.tensor([0, *rows.lengths[:-1]]).cumsum(0)
    index = torch.cat([r + o for r, o in zip(rows.reads, offsets, strict=True)])
    arguments = packed_arguments(rows.ids, device)
    return ModelInput(rows.ids, arguments, index.to(device), _labels(rows, device))


def packed_arguments(ids: Sequence[Tensor], device: torch.device) -> dict[str, object]:
    """Model arguments for rows laid end to end; `verl.engines.attention` keeps them apart."""
    positions = torch.cat([torch.arange(len(row)) for row in ids])
    return {
        "input_ids": torch.cat(list(ids))[None].to(device),
        "position_ids": positions[None].to(device),
        "packed_lengths": [len(row) for row in ids],
    }


def pad(rows: Rows, device: torch.device, pad_id: int) -> ModelInput:
    """Pad the rows on the right to the longest, shape (B, max S_i)."""
    width = max(rows.lengths)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    types = torch.zeros_like(mask)
    for i, row in enumerate(rows.ids):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = 1
        if rows.type_ids is not None:
            types[i, : len(row)] = rows.type_ids[i]
    index = torch.cat([r + i * width for i, r in enumerate(rows.reads)])
    arguments: dict[str, object] = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    if rows.type_ids is not None:
        arguments["token_type_ids"] = types.to(device)
    return ModelInput(rows.ids, arguments, index.to(device), _labels(rows, device))


def _labels(rows: Rows, device: torch.device) -> Tensor | None:
    return torch.cat(rows.labels).to(device) if rows.labels is not None else None


def token_plan(lengths: Sequence[int], budget: int, padded: bool) -> list[list[int]]:
    """Cut rows into micro-batches of at most `budget` tokens (a longer row stands alone).

    Packed: balanced by token count. Padded: rows of similar length together, counted with their
    padding.
    """
    if not lengths:
        return []
    if not padded:
        return plan_microbatches(list(lengths), budget)
    plan: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if plan and lengths[i] * (len(plan[-1]) + 1) <= budget:
            plan[-1].append(i)
        else:
            plan.append([i])
    return plan


def group_plan(plan: list[list[int]], size: int) -> list[list[int]]:
    """Turn a plan over groups of `size` consecutive rows into a plan over rows."""
    return [[g * size + k for g in part for k in range(size)] for part in plan]
