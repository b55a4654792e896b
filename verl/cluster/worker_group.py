"""A role's workers behind one handle: registered methods look like methods of the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verl.batch import Batch
from verl.cluster.dispatch import mode_of
from verl.errors import VerlError


class WorkerGroup:
    """The workers of one role, in this process.

    Calling a registered method splits the arguments by its transfer mode, runs it on each worker
    and joins the results. An error carries the role, rank and method it came from.
    """

    def __init__(self, role: str, workers: Sequence[Any]) -> None:
        self.role = role
        self.workers = list(workers)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the role's model."""
        return self.workers[0].tokenizer

    def receive(self, batch: Batch) -> Batch:
        """Move a batch to where the group works; in one process that is its first device."""
        return batch.to(self.workers[0].device)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name == "workers":
            raise AttributeError(name)
        method = getattr(type(self.workers[0]), name, None)
        mode = mode_of(method)
        if mode is None:
            known = [
                n for n in dir(type(self.workers[0])) if mode_of(getattr(type(self.workers[0]), n))
            ]
            raise AttributeError(
                f"the {self.role} group has no registered method {name!r}; it has {known}"
            )

        def call(*args: Any, **kwargs: Any) -> Any:
            shares = mode.split(len(self.workers), args, kwargs)
            results = [
                self._run(rank, name, share_args, share_kwargs)
                for rank, (share_args, share_kwargs) in enumerate(shares)
            ]
            return mode.join(results)

        return call

    def _run(self, rank: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return getattr(self.workers[rank], name)(*args, **kwargs)
        except VerlError:
            raise
        except Exception as error:
            place = f"in {name} of role {self.role}, rank {rank}"
            # add_note came with Python 3.11; its effect is this attribute.
            notes = [*getattr(error, "__notes__", []), place]
            setattr(error, "__notes__", notes)  # noqa: B010  (mypy knows no such attribute)
            raise
