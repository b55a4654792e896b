"""What a person sees while a run goes on: a progress bar on a terminal, plain lines elsewhere.

In: steps, stages inside a step, metrics. Out: text on a stream. Nothing here needs torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from verl.monitor.step_line import duration, step_line

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["Progress", "step_line"]

#: Seconds between the lines that a long stage prints where there is no progress bar.
STAGE_LINE_SECONDS = 30.0


class Progress:
    """Progress of one run; use as a context manager.

    with Progress(total_steps=40, title="ppo") as progress:
        with progress.stage("rollout", total=32) as advance:
            advance(4)
        progress.step(1, metrics)
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        title: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the planned steps, those already done (resume), and where to write (stdout)."""
        self.total_steps = total_steps
        self._start_step = start_step
        self._title = title
        self._stream = stream if stream is not None else sys.stdout
        self._clock = clock
        self._started = clock()
        self._bar: RichProgress | None = None
        self._steps_task: TaskID | None = None
        self._stage_task: TaskID | None = None

    def __enter__(self) -> Progress:
        self._started = self._clock()
        if self._stream.isatty():
            self._bar = _rich_progress(self._stream)
            self._steps_task = self._bar.add_task(
                self._title or "steps", total=self.total_steps, completed=self._start_step
            )
            self._stage_task = self._bar.add_task("", total=None, visible=False)
            self._bar.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Show stage `name`; yields a function that takes how many of `total` were finished."""
        done = 0
        began = last_line = self._clock()
        if self._bar is not None and self._stage_task is not None:
            self._bar.reset(self._stage_task, total=total, description=f"  {name}", visible=True)

        def advance(count: int = 1) -> None:
            nonlocal done, last_line
            done += count
            if self._bar is not None and self._stage_task is not None:
                self._bar.update(self._stage_task, completed=done)
            elif self._clock() - last_line >= STAGE_LINE_SECONDS:
                last_line = self._clock()
                of = f"/{total}" if total else ""
                self.message(f"  {name} {done}{of}  {duration(last_line - began)}")

        try:
            yield advance
        finally:
            if self._bar is not None and self._stage_task is not None:
                self._bar.update(self._stage_task, visible=False)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step and move the bar."""
        finished = step - self._start_step
        pace = (self._clock() - self._started) / finished if finished > 0 else None
        self.message(step_line(step, self.total_steps, metrics, seconds_per_step=pace))
        if self._bar is not None and self._steps_task is not None:
            self._bar.update(self._steps_task, completed=step)

    def message(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        if self._bar is not None:
            # markup off: a metric line or a path may contain square brackets.
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)


def _rich_progress(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=stream),
        transient=True,
    )
