"""The report as a file: self-contained, safe, complete for every kind of run."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from verl.cli.report import register
from verl.errors import ConfigError, RunDirectoryError
from verl.monitor.log import MetricLog
from verl.monitor.report import build_report
from verl.monitor.report.samples import samples_section
from verl.monitor.report.text import escape, number

VOID = {"meta", "br", "path", "use", "rect"}


class Page(HTMLParser):
    """Collects tags and ids, and checks that elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self.ids.extend(value for name, value in attrs if name == "id" and value)
        self.references.extend(v for k, v in values.items() if k in ("href", "src") and v)
        assert not [name for name in values if name.startswith("on")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag


@pytest.fixture(scope="module")
def shared() -> dict[str, str]:
    """The healthy report's text, built once for the tests that only read it."""
    return {}


@pytest.fixture
def healthy(shared: dict[str, str], ppo_run) -> str:
    """HTML of the healthy PPO run."""
    if "text" not in shared:
        path = build_report(ppo_run())
        assert path.name == "report.html"
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        shared["text"] = path.read_text(encoding="utf-8")
    return shared["text"]


def test_page_loads_nothing_and_runs_nothing(healthy: str) -> None:
    page = Page(healthy)
    assert not {"script", "link", "iframe", "img", "object", "embed", "form"} & set(page.tags)
    assert all(reference.startswith("#") for reference in page.references)
    assert "http" not in healthy.replace("http-equiv", "")
    assert "@import" not in healthy and re.findall(r"url\((?!#)", healthy) == []
    assert "default-src 'none'" in healthy


def test_ids_of_the_drawings_do_not_collide(healthy: str) -> None:
    page = Page(healthy)
    assert len(page.ids) == len(set(page.ids))
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert set(re.findall(r"url\(#([^)]+)\)", healthy)) <= set(page.ids)


def test_page_has_verdict_settings_plots_tooltips_and_table(healthy: str) -> None:
    assert "rose by 1.8 SFT standard deviations" in healthy
    assert "models/sft-policy" in healthy and "40 of 40 steps logged" in healthy
    for title in (
        "Reward-model score", "Distance from the reference policy", "Policy entropy",
        "Value: explained variance", "Clip fraction", "Response length and endings",
        "Gradient norms", "Seconds per step",
    ):  # fmt: skip
        assert f"<h3>{title}</h3>" in healthy
    assert healthy.count("<svg") == 11
    assert "held-out, greedy" in healthy  # Text in drawings stays text.
    assert 'title="kl/sequence_mean [nats]\nKL of the policy from the reference' in healthy
    assert re.search(r"policy/entropy</abbr></td><td class=\"number\">1\.5<", healthy)


def test_drawings_follow_the_colour_scheme(healthy: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", healthy, flags=re.DOTALL))
    assert "var(--series-0)" in drawings and "var(--ink-primary)" in drawings
    assert re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", drawings) == []
    assert "prefers-color-scheme:dark" in healthy


def test_answers_are_shown_side_by_side_ten_open(healthy: str) -> None:
    greedy, sampled = healthy.split("Sampled answers (12)")
    assert greedy.count('<details class="card sample" open>') == 10
    assert greedy.count('<details class="card sample">') == 2
    assert greedy.count('<div class="turn user">') == 24  # Two user turns per prompt.
    assert greedy.count("Hello, what can I do for you?") == 12
    assert "Just google it." in greedy and "Here is what works (0)" in greedy
    order = [int(index) for index in re.findall(r"<b>#(\d+)</b>", greedy)]
    assert order == list(range(12))
    assert '<span class="delta up">+1.70</span>' in greedy and sampled


def test_model_output_is_escaped() -> None:
    attack = "</div><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;\x00\u202e\ud800"
    row = {
        "index": attack, "mode": attack, "prompt": [{"role": attack, "content": attack}],
        "response": attack, "score": attack, "length": attack, "finish_reason": attack,
        "baseline_response": attack, "baseline_score": attack,
    }  # fmt: skip
    html = samples_section([row], 3)
    assert {"script", "img"} & set(Page(html).tags) == set()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html and "&amp;amp;␀" in html
    html.encode("utf-8")


def test_script_in_files_does_not_reach_the_page(tmp_path: Path) -> None:
    run_dir = tmp_path / "<b onclick=x>run"
    with MetricLog(run_dir) as log:
        log.log(1, "train", {"score/mean": 1.0})
    (run_dir / "config.yaml").write_text("train: {seed: <script>x</script>}\n")
    line = json.dumps({"index": 0, "mode": "greedy", "response": "<script>alert(1)</script>"})
    (run_dir / "samples").mkdir()
    (run_dir / "samples" / "step_000001.jsonl").write_text(line + "\n")
    text = build_report(run_dir).read_text(encoding="utf-8")
    assert "script" not in Page(text).tags and text.count("&lt;script&gt;") >= 3
    assert "&lt;b onclick=x&gt;run" in text


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [("plain", "plain"), (None, ""), ([], ""), ([{"role": "user", "content": "hi"}, 3], "hi")],
)
def test_samples_of_other_shapes(prompt: object, shown: str) -> None:
    html = samples_section([{"index": 0, "prompt": prompt, "response": ""}], 0)
    assert shown in html and "(empty answer)" in html and "before" not in html
    Page(html)


def test_no_samples_yet() -> None:
    assert "No samples have been written yet" in samples_section([], None)


def test_one_step_without_anything_else(tmp_path: Path) -> None:
    with MetricLog(tmp_path / "run") as log:
        log.log(1, "train", {"score/mean": float("nan"), "kl/sequence_mean": 0.5})
    text = build_report(tmp_path / "run").read_text(encoding="utf-8")
    Page(text)
    assert "not finite" in text and "config.yaml is missing" in text
    assert text.count("<svg") == 1  # Only the KL has a value to draw.


def test_resumed_run_says_so(tmp_path: Path) -> None:
    with MetricLog(tmp_path) as log:
        log.log(1, "train", {"kl/coef": 0.1})
    with MetricLog(tmp_path, 1) as log:
        log.log(2, "train", {"kl/coef": 0.1})
    assert "resumed before step 2" in build_report(tmp_path).read_text(encoding="utf-8")


def test_sft_report(sft_run: Path) -> None:
    text = build_report(sft_run).read_text(encoding="utf-8")
    Page(text)
    assert "Supervised fine-tuning" in text and "<h3>Perplexity</h3>" in text
    assert "sft/loss" in text and "Answers" not in text


def test_reward_model_report(rm_run: Path) -> None:
    text = build_report(rm_run).read_text(encoding="utf-8")
    Page(text)
    assert "Reward model" in text and "<h3>Held-out accuracy by margin</h3>" in text


def test_comparison_of_two_runs(tmp_path: Path) -> None:
    for seed in (0, 1):  # Names that matplotlib would read as formula or hide.
        with MetricLog(tmp_path / f"_seed$x^{seed}$") as log:
            for step in (1, 2):
                log.log(step, "train", {"kl/sequence_mean": float(step + seed)})
    path = build_report([tmp_path / "_seed$x^0$", tmp_path / "_seed$x^1$"])
    assert path == tmp_path / "_seed$x^0$" / "comparison.html"
    assert path.with_suffix(".png").exists()
    text = path.read_text(encoding="utf-8")
    ids = Page(text).ids
    assert len(ids) == len(set(ids)) and "2 runs compared" in text and "_seed$x^1$ in full" in text
    assert re.search(r">seed\$x\^1\$</text>", text)


def test_what_cannot_be_reported(tmp_path: Path, sft_run: Path, rm_run: Path) -> None:
    with pytest.raises(RunDirectoryError, match="has no metrics.jsonl"):
        build_report(tmp_path)
    with pytest.raises(ConfigError, match="no run directory"):
        build_report([])
    with pytest.raises(ConfigError, match="different stages"):
        build_report([sft_run, rm_run])


def test_numbers_are_readable() -> None:
    values = [1.23456, 12345.6, 0.00001234, 5, 3.0, None, float("nan"), True, 128.46]
    assert [number(value) for value in values] == [
        "1.23", "12,346", "1.23e-05", "5", "3", "–", "nan", "–", "128.5",
    ]  # fmt: skip
    assert escape("a\x1b[31m\r") == "a␛[31m␍"


def test_command_prints_path_and_verdict(tmp_path: Path) -> None:
    with MetricLog(tmp_path / "run") as log:
        log.log(1, "train", {"kl/sequence_mean": 0.5})
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    result = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == f"report: {tmp_path / 'run' / 'report.html'}"
    assert "run: There is no later held-out evaluation" in result.output
