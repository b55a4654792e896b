"""From a preference file to an exported model by the commands that a person types."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.cli.main import main
from verl.models.chat import decode_response

SMALL = [
    "data.seq_length=96", "data.batch_size=4", "checkpoint.every=2", "eval.every=2",
    "train.total_steps=3", "monitor.trackers=[]",
]  # fmt: skip


class Walk:
    """Folders of one walk along the path."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data, self.sft, self.rm = root / "data", root / "sft", root / "rm"
        self.ppo = root / "ppo"

    def files(self, kind: str) -> list[str]:
        folder = self.data / kind
        return [f"data.train={folder}/train.parquet", f"data.eval={folder}/test.parquet"]


@pytest.fixture(scope="module")
def walked(run_verl: Any, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """prepare, sft, rm and ppo, each from what the one before left."""
    path = Walk(tmp_path_factory.mktemp("path"))
    source = path.root / "pairs.jsonl"
    pairs = [
        {"prompt": f"{n} + 1?", "chosen": f"It is {n + 1}.", "rejected": "No" * (1 + n % 3)}
        for n in range(40)
    ]
    source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    def run(*arguments: object) -> str:
        code, text = run_verl(*arguments)
        assert code == 0, text
        return text

    text = run("prepare", "preferences", source, "--out", path.data, "--test-fraction", "0.2")
    assert "rows read" in text and "40" in text
    run(
        "sft", *path.files("sft"), *SMALL, f"model.actor.pretrained_path={tiny_llama}",
        "train.sft.lr=1e-3", f"run_dir={path.sft}",
    )  # fmt: skip
    run(
        "rm", *path.files("rm"), *SMALL,
        f"model.reward_model.pretrained_path={path.sft / 'export'}",
        "train.reward_model.lr=3e-3", f"run_dir={path.rm}",
    )  # fmt: skip
    run(
        "ppo", *path.files("rl"), *SMALL, "data.response_length=8",
        f"model.actor.pretrained_path={path.sft / 'export'}",
        f"model.reward_model.pretrained_path={path.rm / 'export'}",
        "train.ppo.normalize_reward=reference", "train.ppo.actor_lr=1e-3",
        "train.ppo.epochs=2", f"run_dir={path.ppo}",
    )  # fmt: skip
    return path


@pytest.fixture
def verl_here(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Like `run_verl`, in this process: for commands that only read a run, and their coverage."""

    def run(*arguments: object) -> tuple[int, str]:
        try:
            main([str(argument) for argument in arguments])
            code: Any = 0
        except SystemExit as stop:
            code = stop.code
        shown = capsys.readouterr()
        return int(code or 0), shown.out + shown.err

    return run


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_every_stage_leaves_a_finished_run_with_an_export(walked: Walk) -> None:
    for run in (walked.sft, walked.rm, walked.ppo):
        assert json.loads((run / "state.json").read_text()) == {"finished": 3}
        assert (run / "export" / "model.safetensors").is_file()
        assert [line["step"] for line in records(run, "train")] == [1, 2, 3]
        assert [line["step"] for line in records(run, "eval")] == [0, 2, 3]
    statistics = json.loads((walked.rm / "export" / "score_statistics.json").read_text())
    last = records(walked.rm, "eval")[-1]
    assert statistics["mean"] == last["eval/score_mean"]
    assert statistics["accuracy"] == last["eval/accuracy"]


def test_report_judges_the_run(walked: Walk, run_verl: Any) -> None:
    code, text = run_verl("report", walked.ppo)
    assert code == 0, text
    assert (walked.ppo / "report.html").stat().st_size > 10_000


def figures(text: str) -> dict[str, float]:
    """Lines `name   value` of what a command printed."""
    pairs = [line.split() for line in text.splitlines() if line.startswith("eval/")]
    return {name: float(value) for name, value in pairs}


def test_eval_of_a_run_repeats_the_run_s_own_last_evaluation(
    walked: Walk, verl_here: Any, tmp_path: Path
) -> None:
    code, text = verl_here("eval", walked.ppo, "--out", tmp_path / "metrics.json")
    assert code == 0, text
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert found.keys() == figures(text).keys()
    last = records(walked.ppo, "eval")[-1]
    assert len(found) >= 7
    for name, value in found.items():
        assert value == pytest.approx(last[name], abs=1e-6), name


def test_eval_of_a_reward_model_run_and_of_its_export_agree(walked: Walk, verl_here: Any) -> None:
    code, text = verl_here("eval", walked.rm)
    assert code == 0, text
    last = records(walked.rm, "eval")[-1]
    assert figures(text)["eval/accuracy"] == pytest.approx(last["eval/accuracy"], abs=1e-4)
    pairs = walked.data / "rm" / "test.parquet"
    code, again = verl_here("eval", walked.rm / "export", "--pairs", pairs)
    assert code == 0, again
    assert figures(again) == figures(text)


def test_an_exported_checkpoint_equals_the_run_s_own_export(
    walked: Walk, verl_here: Any, tmp_path: Path
) -> None:
    for run, extra in ((walked.ppo, ()), (walked.rm, ("score_statistics.json",))):
        out = tmp_path / run.name
        code, text = verl_here("export", run, "--out", out, "--step", "3")
        assert code == 0, text
        for name in ("model.safetensors", "config.json", "tokenizer.json", *extra):
            assert (out / name).read_bytes() == (run / "export" / name).read_bytes(), name
        code, text = verl_here("export", run, "--out", out)
        assert code == 2 and "is there already" in text


def test_the_exported_policy_answers_in_plain_transformers_as_in_generate(
    walked: Walk, verl_here: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = walked.data / "rl" / "test.parquet"
    answers = tmp_path / "answers.jsonl"
    code, text = verl_here(
        "generate", walked.ppo, "--prompts", prompts, "--out", answers, "--limit", 3,
        "--max-tokens", 12,
    )  # fmt: skip
    assert code == 0, text
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(lines) == 3

    folder = walked.ppo / "export"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for line in lines:
        ids = tokenizer.apply_chat_template(
            line["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        made = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
        assert line["response"] == decode_response(tokenizer, made)
        assert line["finish_reason"] == ("stop" if made[-1] == 2 else "length")


def test_the_exported_critic_is_a_sequence_classifier_with_one_label(
    walked: Walk, verl_here: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    out = tmp_path / "critic"
    code, text = verl_here("export", walked.ppo, "--out", out, "--role", "critic")
    assert code == 0, text
    model, report = AutoModelForSequenceClassification.from_pretrained(
        out, output_loading_info=True
    )
    assert model.config.num_labels == 1
    assert not report["missing_keys"] and not report["unexpected_keys"]
    code, text = verl_here("export", walked.rm, "--out", tmp_path / "x", "--role", "critic")
    assert code == 2 and "a rm checkpoint holds reward_model" in text
    assert not (tmp_path / "x").exists()


def test_resume_reads_the_settings_that_the_run_was_started_with(
    walked: Walk, run_verl: Any
) -> None:
    code, text = run_verl("ppo", "--resume", f"run_dir={walked.ppo}")
    assert code == 0, text
    assert "is finished (step 3); nothing to do" in text
    code, text = run_verl("ppo", "--resume", "2", f"run_dir={walked.ppo}")
    assert code == 0, text
    segments = [line["segment"] for line in records(walked.ppo, "train")]
    assert segments == [0, 0, 1]


def test_misuse_of_eval_is_refused(walked: Walk, verl_here: Any) -> None:
    cases = [
        (["eval", walked.ppo, "--step", "newest"], 2, "--step newest"),
        (["eval", walked.ppo, "--step", "77"], 3, "no complete checkpoint of step 77"),
        (["eval", walked.ppo, "--pairs", "x.jsonl"], 2, "is a ppo run"),
        (["eval", walked.rm, "--prompts", "x.jsonl"], 2, "--prompts is for policies"),
        (["eval", walked.sft / "export"], 2, "--reward-model"),
        (["export", walked.data, "--out", "x"], 3, "is not a run directory"),
    ]
    for arguments, code, message in cases:
        found, text = verl_here(*arguments)
        assert (found, message in text) == (code, True), text


# --- before anything is loaded -------------------------------------------------------------------


def test_a_dry_run_prints_the_plan_and_creates_nothing(
    files: dict[str, Path], tiny_llama: Path, tmp_path: Path
) -> None:
    arguments = [
        "sft", f"data.train={files['sft/train']}", f"model.actor.pretrained_path={tiny_llama}",
        f"run_dir={tmp_path / 'runs' / 'one'}", "data.batch_size=4", "--dry-run",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from verl.cli.main import main; main(sys.argv[1:])",
         *arguments],
        capture_output=True, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "3 optimiser steps" in done.stdout
    assert "train.sft.lr = 2e-05" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "code", "message"),
    [
        ("train.ppo.clip_epsilom=0.1", 2, "clip_epsilon"),
        ("train.ppo.minibatch_size=3", 2, "not a multiple"),
        ("data.response_length=96", 2, "leaves no room"),
        ("model.actor.pretrained_path=/nowhere/model", 2, "/nowhere/model"),
        ("data.train=/nowhere/rows.jsonl", 2, "/nowhere/rows.jsonl"),
        ("data.eval=/nowhere/rows.jsonl", 2, "/nowhere/rows.jsonl"),
        ('resource.actor={"gpu": [97]}', 3, "gpu[97]"),
        ("model.reward_model.pretrained_path=null", 2, "model.reward_model.pretrained_path"),
        ("9", 2, "--resume STEP"),
        ("other.yaml", 2, "no configuration file 'other.yaml'"),
    ],
)
def test_what_cannot_run_ends_before_a_model_is_loaded(
    changed: str, code: int, message: str, files: dict[str, Path], tiny_llama: Path,
    tiny_reward: Path, run_verl: Any, tmp_path: Path,
) -> None:  # fmt: skip
    run = tmp_path / "run"
    found, text = run_verl(
        "ppo", f"data.train={files['rl/train']}", f"data.eval={files['rl/eval']}",
        f"model.actor.pretrained_path={tiny_llama}",
        f"model.reward_model.pretrained_path={tiny_reward}",
        "data.seq_length=96", "data.response_length=8", "data.batch_size=4",
        f"run_dir={run}", changed,
    )  # fmt: skip
    assert found == code, text
    assert message in text
    assert "Loading" not in text and "Traceback" not in text
    assert not run.exists()
