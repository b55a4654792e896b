"""Tensors in safetensors files: model weights, and AdamW state by parameter name.

In: named tensors or an optimizer. Out: one `.safetensors` file, and from it the same tensors bit
for bit. Nothing is pickled. This is the one module of the package that imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from verl.errors import CheckpointError

_ALIASES = "verl.aliases"
_SHOWN_NAMES = 8


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    dedup: bool = False,
) -> None:
    """Write `tensors` of any shape (0-dim too), dtype, device and memory layout to `path`.

    Args:
        metadata: text that `load_metadata` returns.
        dedup: store tensors that are the same memory (tied embeddings) once, and let
            `load_tensors` return them tied again.

    Raises:
        CheckpointError: two names share memory and `dedup` is off, or they share it only in part;
            a tensor has no data (meta device) or is sparse; or the file cannot be written.
    """
    extra = dict(metadata or {})
    if _ALIASES in extra:
        raise CheckpointError(f"{path}: the metadata key {_ALIASES!r} is reserved; rename yours")
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.layout != torch.strided:
            raise CheckpointError(
                f"{path}: {name} has device {tensor.device} and layout {tensor.layout}; "
                "only dense tensors with data can be saved"
            )
    aliases = _shared_tensors(path, tensors)
    if aliases and not dedup:
        pairs = ", ".join(f"{name} = {kept}" for name, kept in aliases.items())
        raise CheckpointError(
            f"{path}: these names share one memory: {pairs}; "
            "save one of each, or pass dedup=True to store it once and tie it again at loading"
        )
    if aliases:
        extra[_ALIASES] = json.dumps(aliases)
    stored = {
        name: tensor.detach().contiguous()
        for name, tensor in tensors.items()
        if name not in aliases
    }
    try:
        save_file(stored, path, metadata=extra)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be written ({error})") from error


def load_tensors(path: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Return the tensors of `path` on `device`; names saved as aliases are the same object.

    Raises:
        CheckpointError: the file is missing, torn, or not a safetensors file.
    """
    target = torch.device(device)
    try:
        with safe_open(path, framework="pt", device=str(target)) as file:
            # On the CPU the library returns views of the mapped file: misaligned, and holding the
            # disk space of a checkpoint that is deleted later. A copy is free of both.
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            if target.type == "cpu":
                for name in names:
                    tensors[name] = tensors[name].clone()
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(_unreadable(path, error)) from error
    for alias, kept in json.loads(metadata.get(_ALIASES, "{}")).items():
        if kept not in tensors:
            raise CheckpointError(f"{path}: {alias} is recorded as tied to {kept}, which is absent")
        tensors[alias] = tensors[kept]
    return tensors


def load_metadata(path: Path) -> dict[str, str]:
    """Return the text that was saved with the tensors of `path`, without reading the tensors.

    Raises:
        CheckpointError: the file is missing, torn, or not a safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(_unreadable(path, error)) from error
    metadata.pop(_ALIASES, None)
    return metadata


def flatten_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the AdamW state as `NAME.step`, `NAME.exp_avg`, `NAME.exp_avg_sq`, … tensors.

    A parameter that has never had a gradient gets only `NAME.step` = 0, so that at loading its
    empty state differs from a lost one. Learning rates and other settings are not included.
    The tensors are the optimizer's own, not copies: save them before its next step.

    Args:
        names: parameter of the optimizer by name, as `dict(model.named_parameters())`.

    Raises:
        CheckpointError: the optimizer is not Adam or AdamW, or has a parameter without a name.
    """
    flat = {}
    for name, parameter, keys in _named_parameters(optimizer, names):
        state = optimizer.state.get(parameter, {})
        if not state:
            flat[f"{name}.step"] = torch.zeros((), dtype=torch.float32)
            continue
        for key in ("step", *keys):
            flat[f"{name}.{key}"] = state[key].detach()
    return flat


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Put what `flatten_optimizer_state` returned into `optimizer`, as copies.

    The optimizer changes only when everything fits.

    Raises:
        CheckpointError: names every tensor that is missing, unexpected, or of another shape.
    """
    states: dict[Tensor, dict[str, Tensor]] = {}
    wrong: list[str] = []
    expected: set[str] = set()
    for name, parameter, keys in _named_parameters(optimizer, names):
        step = tensors.get(f"{name}.step")
        never_stepped = step is not None and not step.any() and f"{name}.{keys[0]}" not in tensors
        wanted = ["step"] if never_stepped else ["step", *keys]
        expected.update(f"{name}.{key}" for key in wanted)
        state = {key: tensors[f"{name}.{key}"] for key in wanted if f"{name}.{key}" in tensors}
        wrong += _shape_problems(name, parameter, state)
        states[parameter] = {} if never_stepped else state
    _raise_on_mismatch(expected, set(tensors), wrong)
    on_device = {id(p): _step_is_on_device(g) for g in optimizer.param_groups for p in g["params"]}
    for parameter, state in states.items():
        optimizer.state[parameter] = {
            key: tensor.detach().to(
                device="cpu"
                if key == "step" and not on_device[id(parameter)]
                else parameter.device,
                copy=True,
            )
            for key, tensor in state.items()
        }


def _named_parameters(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, tuple[str, ...]]]:
    """Yield (name, parameter, moment keys) of every parameter of the optimizer."""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        raise CheckpointError(
            f"the state of a {type(optimizer).__name__} optimizer cannot be saved; use AdamW"
        )
    name_of = {id(parameter): name for name, parameter in names.items()}
    for group_index, group in enumerate(optimizer.param_groups):
        keys = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in name_of:
                raise CheckpointError(
                    f"parameter {index} of optimizer group {group_index}, shape "
                    f"{tuple(parameter.shape)}, is not among the {len(names)} named parameters; "
                    "pass the names of the model that the optimizer was built for"
                )
            yield name_of[id(parameter)], parameter, keys


def _step_is_on_device(group: Mapping[str, object]) -> bool:
    # torch keeps `step` on the CPU unless the fused or capturable update reads it on the device.
    return bool(group.get("fused") or group.get("capturable"))


def _shape_problems(name: str, parameter: Tensor, state: Mapping[str, Tensor]) -> list[str]:
    return [
        f"{name}.{key} has shape {tuple(tensor.shape)}, the parameter {tuple(parameter.shape)}"
        for key, tensor in state.items()
        if tensor.shape != (torch.Size() if key == "step" else parameter.shape)
    ]


def _raise_on_mismatch(expected: set[str], found: set[str], wrong: list[str]) -> None:
    complaints = list(wrong)
    for label, names in (("missing", expected - found), ("unexpected", found - expected)):
        if names:
            listed = sorted(names)
            more = f" and {len(listed) - _SHOWN_NAMES} more" if len(listed) > _SHOWN_NAMES else ""
            complaints.append(f"{label}: {', '.join(listed[:_SHOWN_NAMES])}{more}")
    if complaints:
        raise CheckpointError(
            "the saved optimizer state does not belong to this model and optimizer; "
            + "; ".join(complaints)
            + ". Resume with the model and the trainable parameters of the saved run"
        )


def _shared_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return {alias: name kept} for tensors that are the same memory in the same shape.

    Tensors that lie side by side in one buffer share nothing and are not aliases.
    """
    ranges = sorted(
        (_memory(tensor), position, name)
        for position, (name, tensor) in enumerate(tensors.items())
        if tensor.numel()
    )
    aliases: dict[str, str] = {}
    first = ""
    end = ("", 0)
    for (place, start, stop), _, name in ranges:
        if first and place == end[0] and start < end[1]:
            if not _is_same_view(tensors[first], tensors[name]):
                raise CheckpointError(
                    f"{path}: {first} and {name} overlap in memory without being the same tensor; "
                    "pass a .clone() of one of them"
                )
            aliases[name] = first
        else:
            first, end = name, (place, stop)
    return aliases


def _memory(tensor: Tensor) -> tuple[str, int, int]:
    """Return (device, first byte, byte after the last) that the tensor's elements span."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (last + 1) * tensor.element_size()


def _is_same_view(one: Tensor, other: Tensor) -> bool:
    def layout(tensor: Tensor) -> tuple[object, ...]:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype

    return layout(one) == layout(other)


def _unreadable(path: Path, error: Exception) -> str:
    if not Path(path).exists():
        return f"{path} does not exist"
    return f"{path} cannot be read as safetensors ({error}); it is torn or of another format"
