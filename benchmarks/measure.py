"""What both sides of a benchmark measure alike: stage seconds and the memory of their process.

In: a running process. Out: numbers for the one JSON line that each side prints. Standard library
only, because it is imported in the environments of the peers as well.
"""

from __future__ import annotations

import resource
import sys
import threading
from pathlib import Path

GIB = 1024**3


def wait_for_turn(takes_turns: bool) -> None:
    """Before an iteration: tell the driver that it could begin, and wait until it may."""
    if takes_turns:
        print("ready", flush=True)
        sys.stdin.readline()


def current_rss_bytes() -> int:
    """Return the resident memory of this process in bytes (0 where /proc does not exist)."""
    status = Path("/proc/self/statm")
    if not status.exists():
        return 0
    return int(status.read_text().split()[1]) * resource.getpagesize()


def peak_rss_bytes() -> int:
    """Return the highest resident memory of this program so far, in bytes.

    Linux: VmHWM, which starts at exec. ru_maxrss would also contain what the parent process held
    when it forked, so a heavy driver could charge its own memory to the side it starts.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return maxrss_bytes()


def maxrss_bytes() -> int:
    """Return ``ru_maxrss`` in bytes (kilobytes on Linux, bytes on macOS)."""
    value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return value if sys.platform == "darwin" else value * 1024


class ResidentMemory:
    """Sample the resident memory in a thread; ``peak`` restarts with :meth:`reset`.

    The kernel's peak covers the whole life of the program, loading of the models included; the
    samples give the peak of the measured iterations alone.
    """

    def __init__(self, interval: float = 0.05) -> None:
        self.interval = interval
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> ResidentMemory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def reset(self) -> None:
        """Forget the peak seen so far."""
        self.peak = current_rss_bytes()

    def _sample(self) -> None:
        while not self._stop.wait(self.interval):
            self.peak = max(self.peak, current_rss_bytes())


def memory_report(iterations_peak_bytes: int, loaded_bytes: int) -> dict[str, float]:
    """Return the memory part of a side's JSON line, in GiB."""
    return {
        "peak_gib": peak_rss_bytes() / GIB,
        "maxrss_gib": maxrss_bytes() / GIB,
        "iterations_peak_gib": iterations_peak_bytes / GIB,
        "loaded_gib": loaded_bytes / GIB,
    }
