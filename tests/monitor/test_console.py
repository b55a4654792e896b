"""The line per step, the progress bar and the plain lines."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from verl.monitor.console import Progress, step_line
from verl.monitor.step_line import duration

PPO = {
    "score/mean": 1.234, "score/std": 0.8, "kl/sequence_mean": 3.1, "policy/entropy": 1.9,
    "policy/clip_fraction": 0.04, "response/length_mean": 31.2, "value/explained_variance": 0.42,
    "time/step": 21.3, "time/rollout": 4.1, "time/score": 2.0, "time/update_actor": 10.0,
    "time/update_critic": 4.2, "time/advantages": 0.001,
}  # fmt: skip


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_ppo_line() -> None:
    assert step_line(12, 40, PPO) == (
        "step 12/40  score 1.23±0.80  KL 3.10  entropy 1.90  clip 4 %  len 31  EV 0.42  "
        "21.3 s (rollout 4.1 score 2.0 update 14.2)  eta 10m"
    )


def test_skipped_updates_are_shouted() -> None:
    assert "SKIPPED 2" in step_line(1, 2, {"policy/skipped_steps": 2, "value/skipped_steps": 0})


def test_sft_line() -> None:
    metrics = {"sft/loss": 1.5, "sft/perplexity": 4.4817, "sft/tokens": 4096, "sft/lr": 2e-5}
    assert step_line(3, 9, metrics) == (
        "step 3/9  loss 1.5000  perplexity 4.48  tokens 4096  lr 2e-05"
    )


def test_reward_model_line_with_nan() -> None:
    metrics = {"rm/loss": float("nan"), "rm/accuracy": 0.875, "rm/margin_mean": 0.3}
    assert step_line(9, 9, metrics) == "step 9/9  loss nan  accuracy 88 %  margin 0.30"


def test_evaluation_line() -> None:
    metrics = {"eval/score_greedy_mean": 1.0, "eval/score_greedy_ci95": 0.2, "eval/win_rate": 0.7}
    assert step_line(0, 9, metrics) == "step 0/9  held-out greedy 1.00±0.20  win rate 70 %"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (60, "1m"), (540, "9m"), (3900, "1h05m"), (180000, "2d02h"),
     (float("inf"), "?")],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_stream_gets_plain_lines_only() -> None:
    stream = io.StringIO()
    with Progress(2, title="ppo", stream=stream) as progress:
        with progress.stage("rollout", total=4) as advance:
            advance(4)
        progress.step(1, {"score/mean": 1.0})
        progress.message("saved checkpoints/step_000001")
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step 1/2  score 1.00  eta ")
    assert lines[1:] == ["saved checkpoints/step_000001"]


def test_long_stage_says_that_it_is_alive() -> None:
    stream, now = io.StringIO(), [0.0]
    progress = Progress(2, stream=stream, clock=lambda: now[0])
    with progress, progress.stage("rollout", total=8) as advance:
        for _ in range(8):
            now[0] += 10
            advance(1)
    assert stream.getvalue().splitlines() == ["  rollout 3/8  30s", "  rollout 6/8  1m"]


def test_remaining_time_counts_only_steps_of_this_session() -> None:
    stream, now = io.StringIO(), [0.0]
    with Progress(100, start_step=90, stream=stream, clock=lambda: now[0]) as progress:
        now[0] = 20.0
        progress.step(92, {})
    assert stream.getvalue() == "step 92/100  eta 1m\n"


def test_terminal_gets_a_bar_and_the_lines() -> None:
    stream = Terminal()
    with Progress(3, title="ppo", stream=stream) as progress:
        with progress.stage("rollout", total=4) as advance:
            advance(2)
        progress.step(1, {"score/mean": 1.0})
        progress.message("path [red]not markup[/red]")
    text = stream.getvalue()
    assert "ppo" in text and "\x1b[" in text
    assert "step 1/3  score 1.00" in text and "path [red]not markup[/red]" in text


def test_console_needs_no_torch() -> None:
    program = (
        "import sys; from verl.monitor.console import Progress, step_line; step_line(1, 2, {})\n"
        "import verl.monitor.alerts, verl.monitor.log, verl.monitor.trackers\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
