"""The one type in which samples travel between stages: tensors plus plain columns.

Legend: B samples, T longest response, S longest prompt + response.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor


class Batch:
    """B samples: a `TensorDict` of tensors with leading dimension B, and lists of length B.

    `batch["name"]` reads either kind. A batch is not changed by a stage: each returns a new one
    with more columns.
    """

    def __init__(
        self, tensors: dict[str, Tensor] | TensorDict, columns: dict[str, list[Any]] | None = None
    ) -> None:
        sizes = {key: len(value) for key, value in tensors.items()}
        sizes |= {key: len(value) for key, value in (columns or {}).items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns of a batch differ in length: {sizes}")
        size = next(iter(sizes.values()), 0)
        self.tensors = TensorDict(dict(tensors.items()), batch_size=[size])
        self.columns = dict(columns or {})

    def __len__(self) -> int:
        return int(self.tensors.batch_size[0])

    def __contains__(self, name: str) -> bool:
        return name in self.columns or name in self.tensors.keys()

    def __getitem__(self, name: str) -> Any:
        if name in self.columns:
            return self.columns[name]
        if name not in self.tensors.keys():
            raise KeyError(f"no column {name!r} in this batch; it has {self.names()}")
        return self.tensors[name]

    def names(self) -> list[str]:
        """Every column, sorted."""
        return sorted([*self.tensors.keys(), *self.columns])

    def with_columns(self, **new: Any) -> Batch:
        """A batch with more columns (tensors or lists); the old one is unchanged."""
        tensors = dict(self.tensors.items())
        columns = dict(self.columns)
        for name, value in new.items():
            # A name is a tensor or a list, never both: the old kind would hide the new value.
            tensors.pop(name, None)
            columns.pop(name, None)
            if isinstance(value, Tensor):
                tensors[name] = value
            else:
                columns[name] = list(value)
        return Batch(tensors, columns)

    def select(self, indices: Sequence[int]) -> Batch:
        """The samples at `indices`, in that order."""
        index = torch.as_tensor(list(indices), dtype=torch.int64)
        return Batch(
            {name: value[index.to(value.device)] for name, value in self.tensors.items()},
            {name: [column[i] for i in indices] for name, column in self.columns.items()},
        )

    def require(self, names: Iterable[str], stage: str) -> None:
        """Raise KeyError naming `stage` and the columns it needs that are not here."""
        missing = [name for name in names if name not in self]
        if missing:
            raise KeyError(f"{stage} needs columns {missing}; the batch has {self.names()}")

    def to(self, device: torch.device | str) -> Batch:
        """The batch with its tensors on `device`."""
        return Batch(self.tensors.to(device), self.columns)

    def send_to(self, group: Any) -> Batch:
        """Move the tensors to the devices of a worker group by the group's own protocol."""
        return group.receive(self)

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """Put batches with the same columns behind one another.

        Parts were made apart, so their longest response or sequence may differ: narrower tensors
        are filled with zeros on the right, which is what every stage puts after the last token.

        Raises:
            ValueError: no parts, or parts with different columns.
        """
        if not parts:
            raise ValueError("cannot join a list of no batches")
        first = parts[0]
        for part in parts[1:]:
            if part.names() != first.names():
                raise ValueError(
                    f"cannot join batches with columns {first.names()} and {part.names()}"
                )
        return Batch(
            {k: _cat_padded([p.tensors[k] for p in parts]) for k in first.tensors.keys()},
            {k: [x for p in parts for x in p.columns[k]] for k in first.columns},
        )


def _cat_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first dimension; the others grow to the largest, filled with zeros."""
    shape = [max(sizes) for sizes in zip(*(t.shape[1:] for t in tensors), strict=True)]
    if all(list(t.shape[1:]) == shape for t in tensors):
        return torch.cat(list(tensors))
    result = tensors[0].new_zeros(sum(len(t) for t in tensors), *shape)
    start = 0
    for tensor in tensors:
        place = (slice(start, start + len(tensor)), *(slice(n) for n in tensor.shape[1:]))
        result[place] = tensor
        start += len(tensor)
    return result
