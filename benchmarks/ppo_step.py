"""PPO step of SmolLM2-135M on a CPU: this project beside TRL 1.9.2, in one run.

In: the environment of the peer (``peers/trl_setup.sh``) and ours (the Python that runs this file).
Out: a table of seconds per stage, samples/s, peak memory, ratios and distance from the floor; with
``--json`` everything as a file. Each side has its own process and the same prompts; the two take
turns, an iteration each, so that a machine that changes its speed changes it for both.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from floor import operation_counts
from machine import OtherLoad, available_cores, cpu_model, memory_gib
from workload import sizes_of

HERE = Path(__file__).resolve().parent
OURS = HERE / "ours_ppo_step.py"
PEER = HERE / "peers" / "trl_ppo_step.py"
STAGES = ("generation", "scoring", "update")
QUIET_CORES = 0.1

# What each --dtype runs, in this order: groups of (side, dtype) that take turns.
RUNS = {
    "float32": [[("ours", "float32"), ("trl", "float32")]],
    "default": [[("ours", "default"), ("trl", "bfloat16")]],
    "all": [
        [("ours", "float32"), ("trl", "float32")],
        [("ours", "default"), ("trl", "bfloat16")],
    ],
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    sides = parser.add_mutually_exclusive_group()
    sides.add_argument("--ours-only", action="store_true", help="leave the peer out")
    sides.add_argument("--peer-only", action="store_true", help="leave our side out")
    parser.add_argument(
        "--dtype",
        choices=tuple(RUNS),
        default="float32",
        help="float32: both in float32; default: our default precision beside TRL with everything "
        "in bfloat16; all: the four of them",
    )
    parser.add_argument("--iterations", type=int, default=1, help="measured iterations per side")
    parser.add_argument("--warmup", type=int, default=1, help="iterations before those")
    parser.add_argument("--ppo-epochs", type=int, default=4)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument(
        "--apart",
        action="store_true",
        help="one side after the other, where both do not fit into memory (19 GiB)",
    )
    parser.add_argument("--workdir", type=Path, default=Path(".cache/bench"))
    parser.add_argument("--peer-venv", type=Path, default=Path(".venv-trl"))
    parser.add_argument("--model", type=Path, help="a Llama folder instead of SmolLM2-135M")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    arguments = parser.parse_args()
    if arguments.iterations < 1 or arguments.warmup < 0:
        parser.error("--iterations must be at least 1 and --warmup at least 0")
    return arguments


def planned_runs(arguments: argparse.Namespace) -> list[list[tuple[str, str]]]:
    """Return groups of (side, dtype); those of a group take turns.

    Raises:
        SystemExit: a side cannot run; said before anything slow starts.
    """
    groups = [
        [
            (side, dtype)
            for side, dtype in group
            if not (arguments.ours_only and side != "ours")
            and not (arguments.peer_only and side == "ours")
        ]
        for group in RUNS[arguments.dtype]
    ]
    if arguments.apart:
        groups = [[run] for group in groups for run in group]
    sides = {side for group in groups for side, _ in group}
    if "ours" in sides and not OURS.is_file():
        raise SystemExit(
            f"ppo_step: our side is missing: {OURS} does not exist, so there is nothing to compare "
            "with. Run the peer alone with --peer-only."
        )
    if "trl" in sides and not peer_python(arguments).is_file():
        raise SystemExit(
            f"ppo_step: the peer's environment is missing: {peer_python(arguments)} does not exist."
            f" Make it with: bash benchmarks/peers/trl_setup.sh {arguments.peer_venv}\n"
            "or run our side alone with --ours-only."
        )
    return groups


def peer_python(arguments: argparse.Namespace) -> Path:
    """Return the Python of the peer's environment."""
    return arguments.peer_venv / "bin" / "python"


class Program:
    """A running script; its messages go to `log`, and its last line of output is its result.

    Raises:
        SystemExit: from `advance`, when it failed; shows the end of its messages.
    """

    def __init__(self, command: list[str | Path], log: Path, threads: int) -> None:
        self.command, self.log, self.last_line = [str(part) for part in command], log, ""
        with log.open("w", encoding="utf-8") as messages:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
                text=True,
            )

    def advance(self) -> bool:
        """Let it make an iteration; whether it is ready for another one."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        return self.is_ready()

    def is_ready(self) -> bool:
        """Wait for its next "ready" (True) or its end (False)."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == "ready":
                return True
            self.last_line = line.strip() or self.last_line
        if self.process.wait() != 0 or not self.last_line:
            shown = "\n".join(self.log.read_text(encoding="utf-8").splitlines()[-15:])
            raise SystemExit(
                f"ppo_step: exit status {self.process.returncode} of: {' '.join(self.command)}\n"
                f"{shown}\n(all messages: {self.log})"
            )
        return False


def call(command: list[str | Path], log: Path, threads: int) -> str:
    """Run a command to its end and return its last line of output."""
    program = Program(command, log, threads)
    try:
        program.is_ready()
    finally:
        program.process.kill()
    return program.last_line


def run_group(
    group: list[tuple[str, str]], workload: Path, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run sides in turns, an iteration each; their JSON lines with the load of others beside them."""
    load = OtherLoad.start()
    programs: list[Program] = []
    try:
        for side, dtype in group:
            python, script = (
                (sys.executable, OURS) if side == "ours" else (peer_python(arguments), PEER)
            )
            command: list[str | Path] = [python, script, "--workload", workload, "--dtype", dtype]
            for option in ("iterations", "warmup", "ppo_epochs"):
                command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
            print(f"running {side} {dtype} ...", file=sys.stderr, flush=True)
            log = arguments.workdir / f"{side}-{dtype}.log"
            programs.append(Program([*command, "--turns"], log, arguments.threads))
            programs[-1].is_ready()  # loaded
        running = list(programs)
        while running:
            running = [program for program in running if program.advance()]
    finally:
        for program in programs:
            program.process.kill()
    results = [json.loads(program.last_line) for program in programs]
    for result in results:
        result["other_load_cores"] = load.cores()
    return results


def summarise(result: dict[str, Any], rates: dict, operations: dict, samples: int) -> None:
    """Add medians over the iterations, samples/s, floor and distance from it, in place."""
    iterations = result["iterations"]
    seconds = {
        stage: statistics.median(iteration[stage] for iteration in iterations)
        for stage in ("total", *STAGES)
    }
    rate = rates[result["compute_dtype"]]
    floor = {
        stage: count.seconds(rate["body"], rate["head"]) for stage, count in operations.items()
    }
    result["seconds"] = seconds
    result["samples_per_second"] = samples / seconds["total"]
    result["floor_seconds"] = floor
    result["times_floor"] = {stage: seconds[stage] / floor[stage] for stage in seconds}


def markdown_table(rows: list[list[str]]) -> str:
    """Return rows (the first is the header) as an aligned Markdown table."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def name_of(result: dict[str, Any]) -> str:
    """Return how a row is called in the tables."""
    return f"{result['side']} {result['dtype']}"


def results_table(results: list[dict[str, Any]]) -> str:
    """Return seconds, samples/s and memory of every side, with ratios to every run of the peer."""
    peers = [result for result in results if result["side"] != "ours"]
    header = ["side", "s/iteration", "samples/s", *STAGES, "peak GiB"]
    for peer in peers:
        header += [f"× speed of {name_of(peer)}", "× its memory"]
    rows = [header]
    for result in results:
        seconds = result["seconds"]
        row = [name_of(result), f"{seconds['total']:.1f}", f"{result['samples_per_second']:.3f}"]
        row += [f"{seconds[stage]:.1f}" for stage in STAGES]
        row.append(f"{result['peak_gib']:.2f}")
        for peer in peers:
            row.append(f"{peer['seconds']['total'] / seconds['total']:.2f}")
            row.append(f"{result['peak_gib'] / peer['peak_gib']:.2f}")
        rows.append(row)
    return markdown_table(rows)


def floor_table(results: list[dict[str, Any]]) -> str:
    """Return the floor of every stage and how many times above it each side is."""
    stages = (*STAGES, "total")
    rows = [["side", "computes in", *(f"{stage}: floor s, × floor" for stage in stages)]]
    for result in results:
        floor, times = result["floor_seconds"], result["times_floor"]
        cells = [f"{floor[stage]:.1f}, {times[stage]:.1f}×" for stage in stages]
        rows.append([name_of(result), result["compute_dtype"], *cells])
    return markdown_table(rows)


def describe(report: dict[str, Any]) -> str:
    """Return machine, workload and operation counts as lines of text."""
    machine, work = report["machine"], report["workload"]
    rates = "; ".join(
        f"{dtype} {rate['body'] / 1e9:.3g} / {rate['head'] / 1e9:.3g}"
        for dtype, rate in machine["rates"].items()
    )
    counts = ", ".join(f"{stage} {count:.0f}" for stage, count in report["gflop"].items())
    lengths = work["prompt_lengths"]
    return "\n".join(
        [
            f"machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB,"
            f" torch {machine['torch']} ({machine['cpu_capability']}), "
            f"{machine['threads']} threads",
            f"matmul GFLOP/s (body shape / head shape): {rates}",
            f"workload: {len(lengths)} prompts of {min(lengths)} ... {max(lengths)} tokens "
            f"(sum {sum(lengths)}), {work['response_length']} new tokens each, "
            f"{work['ppo_epochs']} PPO epochs, one mini-batch",
            f"unavoidable GFLOP: {counts}",
        ]
    )


def turn_ratios(results: list[dict[str, Any]]) -> list[str]:
    """Return, per pair that took turns, how many times faster we were in each turn."""
    lines = []
    for ours, peer in zip(results[0::2], results[1::2], strict=False):
        if (ours["side"], peer["side"]) == ("ours", "trl"):
            pairs = zip(ours["iterations"], peer["iterations"], strict=True)
            turns = ", ".join(f"{b['total'] / a['total']:.2f}" for a, b in pairs)
            lines.append(f"× speed of {name_of(peer)} by {name_of(ours)}, turn by turn: {turns}")
    return lines


def noise_warnings(results: list[dict[str, Any]]) -> list[str]:
    """Return a line for every side that other programs disturbed."""
    return [
        f"NOISY: other programs used {result['other_load_cores']:.2f} cores on average while "
        f"{name_of(result)} ran; do not quote its times"
        for result in results
        if (result["other_load_cores"] or 0.0) > QUIET_CORES
    ]


def main() -> None:
    """Prepare, measure the machine, run the sides, print and save."""
    # Ended from outside, the running sides must end too: they are killed on an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = parse_arguments()
    groups = planned_runs(arguments)
    arguments.workdir.mkdir(parents=True, exist_ok=True)
    logs, threads = arguments.workdir, arguments.threads

    prepare: list[str | Path] = [sys.executable, HERE / "workload.py", "--workdir", logs]
    if arguments.model:
        prepare += ["--model", arguments.model]
    workload_path = Path(call(prepare, logs / "workload.log", threads))
    content = json.loads(workload_path.read_text(encoding="utf-8"))
    measured = json.loads(call([sys.executable, HERE / "floor.py"], logs / "floor.log", threads))

    operations = operation_counts(sizes_of(content, arguments.ppo_epochs))
    report: dict[str, Any] = {
        "machine": {
            "cpu": cpu_model(),
            "cores": available_cores(),
            "memory_gib": memory_gib(),
            **measured,
        },
        "workload": {
            "model": Path(content["policy"]).name,
            "prompt_lengths": content["prompt_lengths"],
            "response_length": content["response_length"],
            "ppo_epochs": arguments.ppo_epochs,
        },
        "gflop": {stage: count.total / 1e9 for stage, count in operations.items()},
        "results": [],
    }
    results = report["results"]
    for group in groups:
        for result in run_group(group, workload_path, arguments):
            summarise(result, measured["rates"], operations, len(content["prompts"]))
            results.append(result)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")

    print(describe(report), results_table(results), floor_table(results), sep="\n\n")
    for line in [*turn_ratios(results), *noise_warnings(results)]:
        print(line)


if __name__ == "__main__":
    main()
