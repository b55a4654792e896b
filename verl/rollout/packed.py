"""Linear layers whose weights lie as oneDNN likes them, for decoding a few rows at a time.

A matrix product with 2 to 48 rows runs far below a CPU's rate: the weights pass through the cache
once for very little work. oneDNN is faster there with weights that it has reordered beforehand.
Reordering costs about one pass over the weights, once per rollout, and one more copy of them while
the rollout lasts. Figures: docs/decisions/005-packed-decoding.md, benchmarks/rollout.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

#: CPU kinds for which the gain has been measured. The choice must not depend on a measurement at
#: run time: a resumed run has to repeat the uninterrupted one to the last digit.
CAPABILITIES = ("AVX2",)


def packing_pays() -> bool:
    """Whether this machine and this build of torch gain by it."""
    return torch.backends.mkldnn.is_available() and (
        torch.backends.cpu.get_cpu_capability() in CAPABILITIES
    )


@contextmanager
def packed_linears(model: nn.Module, rows: int) -> Iterator[None]:
    """Run the float32 linear layers of a model on the CPU with reordered weights.

    Weights must not change within the context. Layers of another kind, precision or device, and
    layers whose forward was already replaced, stay as they are.

    Args:
        rows: most rows that are decoded at once, for which the layout is chosen.
    """
    packed = [module for module in model.modules() if _can_pack(module)]
    try:
        for module in packed:
            module.forward = _packed_forward(module, rows)
        yield
    finally:
        for module in packed:
            vars(module).pop("forward", None)


def _can_pack(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
    )


def _packed_forward(module: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    # What torch's own compiler emits for a linear layer with constant weights (torch 2.13).
    weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), rows)
    bias = module.bias

    def forward(value: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(value, weight, bias, "none", [], "")

    return forward
