"""Both tutorial documents: every code block runs, every key and link they name exists.

The English blocks are executed in order in a folder like a checkout; the Chinese ones must be the
same code. `MODELS` and `SMALLER` are every change: a tiny base model, and shorter runs.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = REPOSITORY / "docs/tutorial.md", REPOSITORY / "docs/zh/tutorial.md"
DOCUMENTS = pytest.mark.parametrize("document", [ENGLISH, CHINESE], ids=["en", "zh"])
TUTORIAL = Path("examples/tutorial")

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
#: Sizes in config.py.
SIZES = {
    "batch_size = 16": "batch_size = 4",
    "minibatch_size = 8": "minibatch_size = 4",
    "response_length = 48": "response_length = 8",
    "seq_length = 96": "seq_length = 160",
    "num_epochs = 8": "num_epochs = 2",
    "train_layers = 10": "train_layers = 1",
}
SHORT = ["train.total_steps=1", "data.batch_size=2", "data.max_rows=4", "eval.num_prompts=2",
         "data.overlong=truncate_left", "monitor.trackers=[]"]  # fmt: skip
#: Arguments added to a command that trains: one step, with all of a tiny model.
SMALLER = {
    "sft": [*SHORT, "model.actor.train_layers=null"],
    "rm": [*SHORT, "model.reward_model.train_layers=null"],
    "ppo": [*SHORT, "model.actor.train_layers=null", "model.critic.train_layers=null",
            "data.response_length=8", "train.ppo.minibatch_size=2"],
}  # fmt: skip
#: Commands that are only parsed: what they do depends on the machine, and has its own tests.
PARSED = {"doctor"}


class Block(NamedTuple):
    """One fenced block."""

    language: str
    code: str
    line: int

    @property
    def file(self) -> str | None:
        """The file that a block says it is, in a comment at its start."""
        found = re.match(rf"# ({TUTORIAL}/\w+\.py)\n", self.code)
        return found[1] if found else None


def blocks_of(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    fence = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = [Block(m[1], m[2], text.count("\n", 0, m.start()) + 2) for m in fence.finditer(text)]
    assert 2 * len(found) == len(re.findall("^```", text, re.MULTILINE)), (
        "a block names no language"
    )
    return found


def commands_of(code: str) -> list[list[str]]:
    """The commands of a bash block, in words; lines that end in a backslash go on."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


@pytest.fixture
def checkout(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the examples in it; logging and modules are as before afterwards."""
    shutil.copytree(REPOSITORY / TUTORIAL, tmp_path / TUTORIAL)
    shipped = REPOSITORY / "examples/preferences/courteous.jsonl"
    (tmp_path / "examples/preferences").mkdir()
    rows = shipped.read_text(encoding="utf-8").splitlines(keepends=True)[:30]
    (tmp_path / "examples/preferences/courteous.jsonl").write_text("".join(rows))
    prompts = tmp_path / TUTORIAL / "prompts.jsonl"
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:6]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / TUTORIAL)
    package = logging.getLogger("verl")
    before = list(package.handlers), package.propagate, package.level
    yield tmp_path
    package.handlers[:], package.propagate = before[0], before[1]
    package.setLevel(before[2])
    sys.modules.pop("config", None)


def run_verl(words: list[str], model: Path) -> None:
    from verl.cli.main import load_command, main

    words = [word.replace(BASE_MODEL, str(model)) for word in words]
    if words[0] in PARSED:
        load_command(words[0]).make_context(words[0], words[1:])
        return
    with pytest.raises(SystemExit) as ended:
        main([*words, *SMALLER.get(words[0], [])])
    assert ended.value.code in (0, None), shlex.join(words)


def run_python(block: Block, names: dict[str, Any]) -> None:
    code = block.code
    if block.file == f"{TUTORIAL}/config.py":
        for old, new in SIZES.items():
            assert old in code, f"{old!r} is no longer in config.py"
            code = code.replace(old, new)
    if block.file is not None:
        Path(block.file).write_text(code)
    if block.file != f"{TUTORIAL}/train_ppo.py":
        exec(compile(code, f"{ENGLISH.name}:{block.line}", "exec"), names)


def test_every_block_of_the_tutorial_runs(checkout: Path, tiny_llama: Path, capsys):
    names: dict[str, Any] = {}
    for block in blocks_of(ENGLISH):
        if block.language == "python":
            run_python(block, names)
        elif block.language == "bash":
            for program, *words in commands_of(block.code):
                if program == "python":
                    names |= runpy.run_path(words[0], run_name="__main__")
                else:
                    assert program == "verl", f"{ENGLISH.name}:{block.line}"
                    run_verl(words, tiny_llama)
    printed = capsys.readouterr().out
    shown = output_lines(printed)
    assert [line[:2] for line in shown] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert printed.count("\n  before: ") == 6, "eight answers of six prompts"
    for made in ("loop/curves.png", "loop/history.json", "ppo/report.html", "ppo/report.png"):
        assert (checkout / "runs/tutorial" / made).stat().st_size > 0
    assert len(json.loads((checkout / "runs/tutorial/loop/history.json").read_text())) == 4

    from transformers import AutoModelForCausalLM

    for folder in ("loop/policy", "aligned"):
        AutoModelForCausalLM.from_pretrained(checkout / "runs/tutorial" / folder)


def output_lines(text: str) -> list[tuple[str, ...]]:
    number = r"(-?\d+\.\d{3,4})"
    return re.findall(
        rf"^Epoch (\d+) \| Step (\d+) \| Policy Loss: {number} \| Value Loss: {number} \| "
        rf"KL: {number} \| Avg Reward: {number}$",
        text,
        re.MULTILINE,
    )


def test_the_chinese_tutorial_has_the_same_code():
    def code(document: Path) -> list[Any]:
        return [
            ast.dump(ast.parse(block.code))
            if block.language == "python"
            else commands_of(block.code)
            for block in blocks_of(document)
            if block.language != "text"
        ]

    assert len(code(CHINESE)) > 10
    assert code(CHINESE) == code(ENGLISH)


@DOCUMENTS
def test_the_examples_are_the_files_of_the_tutorial(document):
    files = {block.file: block.code for block in blocks_of(document) if block.file}
    assert set(files) == {f"{TUTORIAL}/config.py", f"{TUTORIAL}/train_ppo.py"}
    for name, code in files.items():
        shipped = (REPOSITORY / name).read_text(encoding="utf-8")
        if document == ENGLISH:
            assert code == shipped
        else:  # the comments are translated
            assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(shipped))


@DOCUMENTS
def test_texts_that_show_output_are_what_is_printed(document):
    import torch

    from verl.cluster.resources import resolve_placements
    from verl.config import get_default_config
    from verl.errors import PlacementError

    placement, output = (block.code for block in blocks_of(document) if block.language == "text")
    lines = output.splitlines()
    loop = [line for line in lines if line.startswith("Epoch")]
    assert len(loop) >= 3 and len(output_lines(output)) == len(loop)
    assert lines[0].startswith("Initializing ResourcePool: actor cpu[0], critic cpu[0], ")
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    config = get_default_config()
    config.resource.actor = config.resource.ref_policy = {"gpu": [0, 1, 2, 3]}
    config.resource.critic, config.resource.reward_model = {"gpu": [4, 5]}, {"gpu": [6]}
    with pytest.raises(PlacementError) as caught:
        resolve_placements(config.resource)
    assert placement.split() == str(caught.value).split()


@DOCUMENTS
def test_settings_metrics_and_links_that_the_text_names_exist(document):
    from verl.config.explain import explain_setting
    from verl.config.section import HINTS
    from verl.monitor.glossary import GLOSSARY

    text = document.read_text(encoding="utf-8")
    sections = "model|data|train|rollout|resource|checkpoint|eval|monitor"
    settings = set(re.findall(rf"`((?:{sections})\.[a-z_.]+)", text))
    assert len(settings) > 10
    for key in settings:
        if key.rpartition(".")[2] not in HINTS:
            assert explain_setting(key)
    metrics = set(re.findall(r"`((?:kl|response|value|policy|score|reward)/[a-z_0-9]+)`", text))
    assert metrics
    assert metrics <= {metric.name for metric in GLOSSARY.values()}
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (document.parent / link).exists(), link


def test_the_prompts_are_not_those_the_reward_model_has_learned_from():
    def prompts(name: str) -> list[str]:
        lines = (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["prompt"] for line in lines]

    own = prompts(f"{TUTORIAL}/prompts.jsonl")
    assert len(own) == len(set(own)) == 48
    assert not set(own) & set(prompts("examples/preferences/courteous.jsonl"))
