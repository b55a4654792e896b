"""Trackers besides metrics.jsonl, kept from ever stopping or slowing a run.

In: names from `monitor.trackers`. Out: sinks for `MetricLog`. Each tracker lives on its own daemon
thread behind a bounded queue; one that fails or hangs is dropped with one warning.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from verl.errors import ConfigError

logger = logging.getLogger(__name__)

QUEUE_SIZE = 1000
#: A short run can end while a slow machine is still importing TensorBoard.
CLOSE_SECONDS = 20.0


class Tracker(Protocol):
    """Something that shows metrics. It may block and raise; `IsolatedTracker` takes care."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""

    def close(self) -> None:
        """Write what is pending and release resources."""


TrackerFactory = Callable[[Path, int], Tracker]
TRACKERS: dict[str, TrackerFactory] = {}


def tracker(name: str) -> Callable[[TrackerFactory], TrackerFactory]:
    """Register a factory (run directory, first step that will be logged) -> tracker."""

    def register(factory: TrackerFactory) -> TrackerFactory:
        TRACKERS[name] = factory
        return factory

    return register


@tracker("tensorboard")
class TensorBoardTracker:
    """Scalars under RUN/logs/tensorboard."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        """Open the event file; points from `first_step` on of an earlier segment are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(run_dir / "logs" / "tensorboard"), purge_step=first_step or None
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write finite values; TensorBoard cannot draw the others."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class IsolatedTracker:
    """A tracker on a daemon thread: `log` never blocks and never raises."""

    def __init__(
        self,
        name: str,
        create: Callable[[], Tracker],
        *,
        queue_size: int = QUEUE_SIZE,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        """Start the thread, which also creates the tracker.

        Args:
            queue_size: records that may wait; a tracker that is further behind is dropped.
            close_seconds: how long `close` waits for the rest to be written.
        """
        self.name = name
        self._create = create
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(queue_size)
        self._close_seconds = close_seconds
        self._lock = threading.Lock()
        self._dropped = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> bool:
        """Whether the tracker failed or hung and gets nothing any more."""
        return self._dropped

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over the metrics of one step."""
        if self._dropped:
            return
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._drop(f"it is {self._queue.maxsize} records behind at step {step}")

    def close(self) -> None:
        """Wait a little for pending records; a hanging tracker is left behind with a warning."""
        if not self._dropped:
            try:
                self._queue.put(None, timeout=self._close_seconds)
            except queue.Full:
                self._drop("it hung until the end of the run")
                return
            self._thread.join(self._close_seconds)
            if self._thread.is_alive():
                self._drop(f"it did not finish within {self._close_seconds:g} s of the run's end")

    def _work(self) -> None:
        # A tracker is other people's code and may raise anything; whatever it is, training goes
        # on and metrics.jsonl has the data, so this is the one place that catches broadly.
        doing = "while starting"
        try:
            target = self._create()
            while (item := self._queue.get()) is not None and not self._dropped:
                doing = f"at step {item[0]}"
                target.log(*item)
            doing = "while closing"
            target.close()
        except Exception as error:  # noqa: BLE001
            self._drop(f"it failed {doing}: {type(error).__name__}: {error}")

    def _drop(self, reason: str) -> None:
        with self._lock:
            if self._dropped:
                return
            self._dropped = True
        logger.warning(
            "tracker %r is no longer used: %s; metrics.jsonl stays complete", self.name, reason
        )


def open_trackers(
    names: Sequence[str] | None, run_dir: Path | str, first_step: int = 0
) -> list[IsolatedTracker]:
    """Start the trackers a configuration names.

    Args:
        names: `monitor.trackers`; None means TensorBoard if it is installed.
        first_step: first step that will be logged (after a resume: checkpoint step + 1).

    Raises:
        ConfigError: a name that is not registered.
    """
    if names is None:
        names = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise ConfigError(
            f"monitor.trackers: unknown tracker {unknown[0]!r}; known: {', '.join(TRACKERS)}"
        )
    return [_isolated(name, Path(run_dir), first_step) for name in names]


def _isolated(name: str, run_dir: Path, first_step: int) -> IsolatedTracker:
    return IsolatedTracker(name, lambda: TRACKERS[name](run_dir, first_step))
