"""The machine a benchmark runs on, and how much of it other programs took meanwhile.

Out: a description for the report, and the load of others, so that noisy figures say so. Standard
library only.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from dataclasses import dataclass
from pathlib import Path


def available_cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """Return the CPU's model name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_gib() -> float:
    """Return the installed memory in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3


def busy_seconds() -> float | None:
    """Return the CPU seconds all programs have used since boot, or None where it is not known."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _iowait, irq, softirq = map(
        int, stat.read_text().splitlines()[0].split()[1:8]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def children_seconds() -> float:
    """Return the CPU seconds of this process and of its finished children."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


@dataclass
class OtherLoad:
    """Average number of cores that other programs kept busy between creation and ``cores()``."""

    wall: float
    busy: float | None
    own: float

    @classmethod
    def start(cls) -> OtherLoad:
        """Begin to observe."""
        return cls(time.perf_counter(), busy_seconds(), children_seconds())

    def cores(self) -> float | None:
        """Return the cores used by others, or None where the system does not tell."""
        busy = busy_seconds()
        if busy is None or self.busy is None:
            return None
        wall = time.perf_counter() - self.wall
        return max(0.0, (busy - self.busy - (children_seconds() - self.own)) / wall)
