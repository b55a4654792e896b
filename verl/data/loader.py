"""The order in which rows are met, with a position of three integers.

In: a number of rows, a batch size, a seed. Out: batches of row indices. The order of an epoch
is a function of (seed, epoch), so (epoch, index, seed) is all there is to save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from verl.errors import CheckpointError, DataError
from verl.seeding import derive_seed


@dataclass(frozen=True)
class LoaderBatch:
    """One batch: `step` counts from 1 over the run, `epoch` from 0, `indices` are rows."""

    step: int
    epoch: int
    indices: list[int]


class ResumableLoader:
    """Iterates over batches of row indices, from wherever it stands to the end of the run.

    The last batch of an epoch may be smaller; no row is left out. `state()` taken after a batch
    was handed out, and given to `load_state` of a new loader, continues with the next batch.

    Args:
        num_rows: rows that are left after filtering.
        batch_size: rows per batch.
        seed: `train.seed`.
        shuffle: a new order in each epoch, else file order.
        num_epochs: passes over the rows.
        total_steps: stop after this many steps even inside an epoch; a larger number than the
            epochs hold does not add any.
        dropped: rows that a filter took away, for the message when none is left.
        source: what the rows come from, for the same message.

    Raises:
        DataError: no row is left.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        num_epochs: int = 1,
        total_steps: int | None = None,
        dropped: int = 0,
        source: str = "data.train",
    ) -> None:
        if num_rows <= 0:
            raise DataError(
                f"{source}: no rows left: {num_rows + dropped} read, {dropped} taken away by "
                "filters; raise the length limit or check the file with `verl data check`"
            )
        self.num_rows, self.batch_size, self.seed = num_rows, batch_size, seed
        self.shuffle, self.num_epochs = shuffle, num_epochs
        self.steps_per_epoch = -(-num_rows // batch_size)
        available = self.steps_per_epoch * num_epochs
        self._total_steps = available if total_steps is None else min(total_steps, available)
        self._epoch, self._index = 0, 0
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, finished ones included."""
        return self._total_steps

    @property
    def step(self) -> int:
        """Steps handed out so far."""
        return self._epoch * self.steps_per_epoch + self._index // self.batch_size

    def __len__(self) -> int:
        return self._total_steps - self.step

    def __iter__(self) -> Iterator[LoaderBatch]:
        return self

    def __next__(self) -> LoaderBatch:
        if self.step >= self._total_steps:
            raise StopIteration
        epoch, start = self._epoch, self._index
        indices = self.epoch_order(epoch)[start : start + self.batch_size].tolist()
        # The position moves before the batch is handed out, and an exhausted epoch becomes the
        # start of the next one: a saved position never points past an end.
        self._index = start + len(indices)
        if self._index >= self.num_rows:
            self._epoch, self._index = epoch + 1, 0
        return LoaderBatch(self.step, epoch, indices)

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the rows of `epoch` in their order: (num_rows,) int64."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._draw_order(epoch))
        return self._order[1]

    def _draw_order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows)
        # Raw generator output is the same in every numpy version; Generator.permutation is not
        # promised to be.
        keys = np.random.Philox(key=derive_seed(self.seed, "data-order", epoch))
        return np.argsort(keys.random_raw(self.num_rows), kind="stable")

    def state(self) -> dict[str, int]:
        """Return the position: epoch, rows of it that were handed out, seed."""
        return {"epoch": self._epoch, "index": self._index, "seed": self.seed}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue from a position that `state()` returned.

        Raises:
            CheckpointError: the position is of another seed, or does not fit these rows and
                this batch size.
        """
        try:
            epoch, index, seed = (int(state[key]) for key in ("epoch", "index", "seed"))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"data position {state!r}: must have the integers epoch, index and seed"
            ) from None
        if seed != self.seed:
            raise CheckpointError(
                f"data position: the checkpoint's seed is {seed}, train.seed is {self.seed}; "
                f"resume with train.seed={seed}"
            )
        if epoch < 0 or not 0 <= index < self.num_rows or index % self.batch_size:
            raise CheckpointError(
                f"data position: epoch {epoch}, index {index} does not fit {self.num_rows} rows in "
                f"batches of {self.batch_size}; resume with the same data and data.batch_size"
            )
        self._epoch, self._index = epoch, index
