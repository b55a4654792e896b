"""Which precision computes fast on a device: measured once, not guessed from a name."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: bfloat16 must beat float32 by this much to be worth its rounding.
WORTHWHILE = 1.5


@functools.cache
def matmul_rates(device: str) -> dict[str, float]:
    """GFLOP/s of a (512, 576) x (576, 1536) product in float32 and bfloat16 on `device`."""
    import torch

    return {
        name: _rate(torch.device(device), getattr(torch, name)) for name in ("float32", "bfloat16")
    }


def _rate(device: torch.device, dtype: torch.dtype) -> float:
    import torch

    # Constants: random numbers would move the global generator, once per process.
    x = torch.full((512, 576), 0.5, device=device, dtype=dtype)
    weight = torch.full((1536, 576), 0.5, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        _wait(device)
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * 512 * 576 * 1536 / best / 1e9


def _wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fast_bfloat16(device: str = "cpu") -> bool:
    """Whether bfloat16 matrix products are clearly faster than float32 ones on `device`."""
    rates = matmul_rates(device)
    return rates["bfloat16"] > WORTHWHILE * rates["float32"]


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """The torch dtype of a config value: `auto` is bfloat16 where it is fast, else float32."""
    import torch

    if name == "auto":
        name = "bfloat16" if fast_bfloat16(device) else "float32"
    return getattr(torch, name)
