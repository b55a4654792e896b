"""Turn Ctrl-C and SIGTERM into a request to stop after the current step.

In: the signals. Out: `StopSignal.requested`, which the training loop looks at between steps.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_EXIT_CODE = 130
_STOPPING = b"\nfinishing this step, then saving; press Ctrl-C again to exit at once\n"


class StopSignal:
    """Context manager: the first SIGINT or SIGTERM sets `requested`, the second exits with 130.

    Outside the main thread Python cannot install handlers; there the manager does nothing and
    `requested` stays False. The handlers that were there before come back at the end.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}
        self._pid = os.getpid()

    def __enter__(self) -> StopSignal:
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._handle_in_forked_child(number)
        elif self.requested:
            self._restore()
            os._exit(_EXIT_CODE)
        else:
            self.requested = True
            # os.write, because print is not safe inside a handler that interrupted a print.
            os.write(2, _STOPPING)

    def _handle_in_forked_child(self, number: int) -> None:
        # A terminal sends Ctrl-C to the children too. They must live until the parent has
        # finished its step; a SIGTERM, which the parent or the system sends to them, ends them.
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python; it cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()
