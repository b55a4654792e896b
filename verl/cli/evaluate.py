"""`verl generate`, `verl eval`, `verl export`: use what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.config.schema import Config

Target = Annotated[str, typer.Argument(help="Run directory, local model folder, or hub id.")]
Step = Annotated[str, typer.Option(help="Checkpoint of a run: a number, `latest` or `best`.")]
GgufFile = Annotated[str | None, typer.Option(help="GGUF file inside the model folder.")]
Template = Annotated[str | None, typer.Option(help="`chatml`, `plain` or a Jinja file.")]
Seed = Annotated[int, typer.Option(help="Root of the sampling.")]
Length = Annotated[int, typer.Option(help="Longest answer in tokens.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("generate")(generate)
    app.command("eval")(evaluate)
    app.command("export")(export)


def generate(
    model: Target,
    prompts: Annotated[Path, typer.Option(help='File of rl rows, or {"prompt": …} lines.')],
    out: Annotated[Path, typer.Option(help="Where the answers go, one JSON line each.")],
    step: Step = "latest",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_tokens: Length = 256,
    limit: Annotated[int | None, typer.Option(help="Answer only the first prompts.")] = None,
    seed: Seed = 0,
    gguf_file: GgufFile = None,
    chat_template: Template = None,
) -> None:
    """Answer every prompt of a file and write prompt, answer and finish reason."""
    from verl.evaluation.policy import write_samples
    from verl.trainer.ppo import PPOTrainer

    config, worker = _policy(model, step, gguf_file, chat_template)
    config.train.seed = seed
    _allow_answers_of(config, max_tokens)
    trainer = PPOTrainer(actor=_group("actor", worker), config=config)
    batch = trainer.prompt_batch(_prompts(prompts, limit), "generate", 0)
    batch = trainer.with_text(trainer.actor.generate(batch, trainer.sampling(temperature)))
    records = [
        {"prompt": prompt, "response": text, "finish_reason": reason}
        for prompt, text, reason in zip(
            batch["prompt"], batch["response"], batch["finish_reason"], strict=True
        )
    ]
    write_samples(out, records)
    typer.echo(f"{len(records)} answers in {out}")


def evaluate(
    target: Target,
    step: Step = "latest",
    prompts: Annotated[
        Path | None, typer.Option(help="Held-out prompts; default: data.eval of the run.")
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option(help="Held-out pairs, to evaluate a reward model.")
    ] = None,
    reward_model: Annotated[
        str | None, typer.Option(help="Reward model that scores; default: that of the run.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first rows.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Of the sampled answers. Default: eval.temperature of the run, or 1."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Root of the sampling. Default: train.seed of the run, or 0.")
    ] = None,
    gguf_file: GgufFile = None,
    chat_template: Template = None,
    out: Annotated[Path | None, typer.Option(help="Write the metrics as JSON, too.")] = None,
) -> None:
    """Score a policy on held-out prompts, or a reward model on held-out pairs (--pairs)."""
    from verl.trainer.restore import find_step, is_run

    stage = find_step(Path(target), step)[2] if is_run(Path(target)) else None
    if pairs is not None and stage not in (None, "rm"):
        raise ConfigError(f"--pairs: {target} is a {stage} run; name an rm run or a reward model")
    if prompts is not None and (pairs is not None or stage == "rm"):
        raise ConfigError("--prompts is for policies; a reward model is evaluated on --pairs")
    if pairs is not None or stage == "rm":
        metrics = _evaluate_reward_model(target, step, pairs, limit, gguf_file, chat_template)
    else:
        metrics = _evaluate_policy(
            target, step, prompts, reward_model, limit, max_tokens, temperature, seed,
            gguf_file, chat_template,
        )  # fmt: skip
    for name, value in metrics.items():
        typer.echo(f"{name:<32}{value:.4f}")
    if out is not None:
        from verl.checkpoint.atomic import write_json_atomic

        write_json_atomic(out, metrics)


def export(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    out: Annotated[Path, typer.Option(help="Folder of the model that is written.")],
    step: Step = "latest",
    role: Annotated[
        str | None, typer.Option(help="`actor`, `critic` or `reward_model`; default: the main one.")
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder (safetensors, config, tokenizer)."""
    from verl.trainer.restore import ROLES_OF_STAGE, find_step, restored_worker, run_config
    from verl.trainer.run import export_to

    config = run_config(run)
    number, folder, stage = find_step(run, step)
    roles = ROLES_OF_STAGE[stage]
    role = role or roles[0]
    if role not in roles:
        raise ConfigError(f"--role {role}: a {stage} checkpoint holds {', '.join(roles)}")
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"{out} is there already; choose another folder with --out")
    worker = restored_worker(config, role, folder)

    def write(temporary: Path) -> None:
        worker.export(temporary)
        if role == "reward_model":
            _write_score_statistics(config, worker.engine, temporary)

    export_to(out, write)
    typer.echo(f"{role} of step {number} in {out}")


def _write_score_statistics(config: Config, engine: Any, folder: Path) -> None:
    """What `verl rm` puts beside the model it exports, for train.ppo.normalize_reward=reference."""
    from verl.data.datasets import RowDataset
    from verl.trainer.reward_model import evaluate_pairs, write_statistics

    file = config.data.eval
    if file is None or not Path(file).is_file():
        typer.echo(f"no score statistics: the held-out pairs ({file}) are not there", err=True)
        return
    rows = RowDataset(file, "rm", config.eval.num_prompts)
    length = min(engine.loaded.max_length or config.data.seq_length, config.data.seq_length)
    write_statistics(folder, evaluate_pairs(engine, rows, range(len(rows)), length), len(rows))


def _group(role: str, worker: Any) -> Any:
    from verl.cluster.worker_group import WorkerGroup

    return WorkerGroup(role, [worker])


def _policy(
    target: str, step: str, gguf_file: str | None, chat_template: str | None
) -> tuple[Config, Any]:
    """Configuration and actor of a run's checkpoint, or of a model folder."""
    from verl.cluster.local import LocalExecutor
    from verl.config.schema import get_default_config
    from verl.trainer.restore import find_step, is_run, restored_worker, run_config
    from verl.workers.build import build_actor

    path = Path(target)
    if is_run(path):
        config = run_config(path)
        return config, restored_worker(config, "actor", find_step(path, step)[1])
    config = get_default_config()
    config.model.actor.pretrained_path = target
    config.model.actor.gguf_file, config.model.actor.chat_template = gguf_file, chat_template
    return config, build_actor(config, LocalExecutor(config.resource).device("actor"))


def _allow_answers_of(config: Config, tokens: int) -> None:
    """Set the longest answer; prompts may be as long as before."""
    data = config.data
    data.prompt_length = data.prompt_limit
    data.response_length, data.seq_length = tokens, data.prompt_length + tokens


def _prompts(file: Path, limit: int | None) -> list[Any]:
    from verl.data.datasets import RowDataset

    rows = RowDataset(file, "rl", limit)
    return [row["prompt"] for row in rows]


def _evaluate_policy(
    target: str,
    step: str,
    prompts: Path | None,
    reward_model: str | None,
    limit: int | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    gguf_file: str | None,
    chat_template: str | None,
) -> dict[str, float]:
    from verl.cluster.local import LocalExecutor
    from verl.evaluation.policy import evaluate_policy
    from verl.trainer.ppo import PPOTrainer
    from verl.workers.build import build_reward

    config, worker = _policy(target, step, gguf_file, chat_template)
    if reward_model is not None:
        config.model.reward_model.pretrained_path = reward_model
    if config.model.reward_model.pretrained_path is None:
        raise ConfigError("nothing scores the answers: give --reward-model MODEL")
    if max_tokens is not None:
        _allow_answers_of(config, max_tokens)
    config.train.seed = config.train.seed if seed is None else seed
    heat = config.eval.temperature if temperature is None else temperature
    file = prompts or (Path(config.data.eval) if config.data.eval else None)
    if file is None:
        raise ConfigError("no held-out prompts: give --prompts FILE")
    device = LocalExecutor(config.resource).device("reward_model")
    trainer = PPOTrainer(
        actor=_group("actor", worker),
        reward_model=_group("reward_model", build_reward(config, device)),
        config=config,
    )
    chosen = _prompts(file, limit or config.eval.num_prompts)
    metrics, _ = evaluate_policy(trainer, chosen, heat, baseline=None)
    return {k: v for k, v in metrics.items() if "win_rate" not in k}


def _evaluate_reward_model(
    target: str,
    step: str,
    pairs: Path | None,
    limit: int | None,
    gguf_file: str | None,
    chat_template: str | None,
) -> dict[str, float]:
    from verl.cluster.local import LocalExecutor
    from verl.config.schema import get_default_config
    from verl.data.datasets import RowDataset
    from verl.trainer.restore import find_step, is_run, restored_worker, run_config
    from verl.trainer.reward_model import evaluate_pairs
    from verl.workers.build import build_reward

    path = Path(target)
    if is_run(path):
        config = run_config(path)
        engine = restored_worker(config, "reward_model", find_step(path, step)[1]).engine
        file = pairs or (Path(config.data.eval) if config.data.eval else None)
    else:
        config = get_default_config()
        section = config.model.reward_model
        section.pretrained_path, section.gguf_file = target, gguf_file
        section.chat_template = chat_template
        device = LocalExecutor(config.resource).device("reward_model")
        source: Any = build_reward(config, device).source
        engine = source.engine
        file = pairs
    if file is None:
        raise ConfigError("no held-out pairs: give --pairs FILE")
    rows = RowDataset(file, "rm", limit)
    length = min(engine.loaded.max_length or config.data.seq_length, config.data.seq_length)
    return evaluate_pairs(engine, rows, range(len(rows)), length)
