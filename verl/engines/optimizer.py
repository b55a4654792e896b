"""AdamW on float32 master weights, whatever precision the model computes in.

In: named trainable parameters with gradients from backward passes. Out: updated parameters, and a
state of plain tensors for checkpoints. With float32 compute the masters are the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verl.config.schema import Optimizer as OptimizerSection
from verl.errors import CheckpointError


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimiser step; `skipped` means the gradient was not finite."""

    grad_norm: float
    lr: float
    skipped: bool


def learning_rate(section: OptimizerSection, peak: float, step: int, total: int) -> float:
    """Rate of optimiser step `step` (from 0) of `total`: warm-up, then the schedule down to 0."""
    warmup = math.ceil(section.warmup_ratio * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    if section.lr_schedule == "constant":
        return peak
    progress = (step - warmup) / max(1, total - warmup)
    if section.lr_schedule == "linear":
        return peak * max(0.0, 1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


class MasterAdamW:
    """AdamW whose weights, gradients and moments are float32.

    For a model in lower precision each backward pass adds its gradients to float32 buffers at
    once, so micro-batches are summed without rounding and no low-precision gradient stays around.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        section: OptimizerSection,
        peak_lr: float,
        total_steps: int,
    ) -> None:
        self.parameters = dict(named)
        self.section, self.peak_lr, self.total_steps = section, peak_lr, total_steps
        self.steps_taken = 0
        self.masters: dict[str, nn.Parameter] = {}
        for name, parameter in self.parameters.items():
            self.masters[name] = self._master(parameter)
        self._adam = torch.optim.AdamW(
            list(self.masters.values()),
            lr=peak_lr,
            betas=section.adam_betas,
            eps=section.adam_eps,
            weight_decay=section.weight_decay,
            fused=True,
        )

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype == torch.float32:
            return parameter
        master = nn.Parameter(parameter.detach().float())
        parameter.register_post_accumulate_grad_hook(_move_gradient_to(master))
        return master

    def step(self) -> StepResult:
        """Clip, check, step, clear. A gradient with NaN or inf changes nothing but the count."""
        rate = learning_rate(self.section, self.peak_lr, self.steps_taken, self.total_steps)
        masters = [m for m in self.masters.values() if m.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(masters, self.section.max_grad_norm, foreach=True)
        grad_norm = float(norm)
        finite = math.isfinite(grad_norm)
        if finite:
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
            self._publish()
        self._adam.zero_grad(set_to_none=True)
        self.steps_taken += 1
        return StepResult(grad_norm, rate, not finite)

    @torch.no_grad()
    def _publish(self) -> None:
        """Write the masters into the model's own lower-precision parameters."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name: `weight/…`, `exp_avg/…`, `exp_avg_sq/…`, `step/…`."""
        tensors: dict[str, Tensor] = {"steps_taken": torch.tensor(self.steps_taken)}
        for name, master in self.masters.items():
            tensors[f"weight/{name}"] = master.detach()
            moments = self._adam.state.get(master, {})
            for key, value in moments.items():
                tensors[f"{key}/{name}"] = value
            if not moments:  # said, so that at loading a lost state differs from an empty one
                tensors[f"step/{name}"] = torch.zeros(())
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor], where: str) -> None:
        """Restore what `state` gave; nothing changes unless everything fits.

        Raises:
            CheckpointError: a tensor is missing, left over or of another shape; the message
                names it.
        """
        wanted = {"steps_taken"}
        for name in self.masters:
            wanted |= {f"weight/{name}", f"step/{name}"}
            if float(tensors.get(f"step/{name}", torch.ones(()))):
                wanted |= {f"exp_avg/{name}", f"exp_avg_sq/{name}"}
        missing, extra = sorted(wanted - tensors.keys()), sorted(tensors.keys() - wanted)
        wrong = sorted(
            key
            for key in wanted & tensors.keys()
            if key.partition("/")[0] not in ("step", "steps_taken")
            and tensors[key].shape != self.masters[key.partition("/")[2]].shape
        )
        if missing or extra or wrong:
            raise CheckpointError(
                f"{where}: the optimiser state does not fit this model; missing: {missing[:3]}, "
                f"unknown: {extra[:3]}, of another shape: {wrong[:3]}. Resume with the model and "
                "the trained layers of the run that saved it"
            )
        self.steps_taken = int(tensors["steps_taken"])
        for name, master in self.masters.items():
            master.copy_(tensors[f"weight/{name}"])
            self._adam.state.pop(master, None)
            if float(tensors[f"step/{name}"]):
                self._adam.state[master] = {
                    key: tensors[f"{key}/{name}"].clone().to(master.device)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }
        self._publish()


def _move_gradient_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return move
