"""What the report concludes, on runs whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl.errors import RunDirectoryError
from verl.monitor.log import MetricLog
from verl.monitor.report import Verdict, judge, load_run


def levels(verdict: Verdict) -> set[str]:
    return {finding.level for finding in verdict.findings}


def evaluate(run_dir: Path, *records: dict[str, float]) -> Verdict:
    with MetricLog(run_dir) as log:
        for step, record in enumerate(records):
            log.log(10 * step, "eval", record)
    return judge(load_run(run_dir))


def scores(mean: float, **more: float) -> dict[str, float]:
    extra = {f"eval/{name}": value for name, value in more.items()}
    return {
        "eval/score_sampled_mean": mean, "eval/score_sampled_ci95": 0.3,
        "eval/score_sampled_std": 2.0, **extra,
    }  # fmt: skip


def test_healthy_run(ppo_run) -> None:
    verdict = judge(load_run(ppo_run()))
    assert verdict.level == "good" and levels(verdict) == {"good"}
    assert verdict.headline == (
        "The held-out score rose by 1.8 SFT standard deviations, beyond its confidence interval, "
        "and the answers show no sign of degeneration."
    )
    assert (
        "Held-out score, sampled answers: 0.20 at step 0, 1.82 at step 40 (+1.62 ± 0.31 = +1.79 "
        "SFT standard deviations; 95 % interval)."
    ) in verdict.text()


def test_degenerate_run_is_not_praised_for_its_score(ppo_run) -> None:
    verdict = judge(load_run(ppo_run(degenerate=True)))
    assert verdict.level == "bad" and "degenerate" in verdict.headline
    text = verdict.text()
    assert "x KL from the reference: 24.00 nats" in text and "alert limit 12." in text
    assert "! Answers that end by themselves: 96 % → 26 %." in text
    assert "! Mean answer length: 60 → 130 tokens." in text
    assert "! Distinct-2: 0.81 → 0.21." in text
    assert "One and the same greedy answer is given to 100 % of the prompts." in text


def test_gain_within_the_interval_is_no_gain(tmp_path: Path) -> None:
    verdict = evaluate(tmp_path, scores(1.0), scores(1.4))
    assert verdict.level == "warning"
    assert "did not change beyond its confidence interval" in verdict.headline


def test_gain_below_one_deviation_asks_for_a_look(tmp_path: Path) -> None:
    verdict = evaluate(tmp_path, scores(1.0), scores(2.5))
    assert verdict.level == "warning" and "rose by 0.8 SFT" in verdict.headline


def test_fall(tmp_path: Path) -> None:
    verdict = evaluate(tmp_path, scores(1.0), scores(-2.0, win_rate=0.2, win_rate_ci95=0.1))
    assert verdict.level == "bad" and "fell, by 1.5 SFT" in verdict.headline
    assert "x Win rate against the start policy: 20 % ± 10 %." in verdict.text()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"finished_fraction": 0.9}, {"finished_fraction": 0.7}),
        ({"length_mean": 40.0}, {"length_mean": 15.0}),
        ({"distinct_1": 0.6}, {"distinct_1": 0.35}),
        ({"same_opening": 0.1}, {"same_opening": 0.7}),
    ],
)
def test_each_sign_of_degeneration_alone_spoils_the_verdict(
    tmp_path: Path, before: dict[str, float], after: dict[str, float]
) -> None:
    verdict = evaluate(tmp_path, scores(1.0, **before), scores(5.0, **after))
    assert verdict.level == "bad" and "degenerate" in verdict.headline


def test_run_without_a_second_evaluation(tmp_path: Path) -> None:
    verdict = evaluate(tmp_path, scores(1.0))
    assert verdict.level == "info" and "no later held-out evaluation" in verdict.headline


def test_zero_deviation_and_missing_values_do_not_break_it(tmp_path: Path) -> None:
    broken = {"eval/score_sampled_mean": float("nan"), "eval/score_greedy_mean": 2.0}
    start = {"eval/score_sampled_mean": 1.0, "eval/score_greedy_mean": 1.0}
    verdict = evaluate(tmp_path, {**start, "eval/score_sampled_std": 0.0}, broken)
    assert "greedy answers: 1.00 at step 0, 2.00 at step 10 (+1.00 ± 0.00" in verdict.text()


def test_skipped_updates_are_reported(tmp_path: Path) -> None:
    with MetricLog(tmp_path) as log:
        log.log(1, "train", {"policy/skipped_steps": 2, "score/mean": 1.0})
    assert (
        "2 optimiser step(s) had a gradient that was not finite" in judge(load_run(tmp_path)).text()
    )


def test_sft(sft_run: Path, supervised_run) -> None:
    assert judge(load_run(sft_run)).headline == "The held-out loss fell."
    overfitted = supervised_run(
        "over", lambda step: {"sft/loss": 1.0 / step},
        lambda step: {"eval/loss": 2.0 + (step - 10) ** 2 / 100},
    )  # fmt: skip
    verdict = judge(load_run(overfitted))
    assert verdict.level == "bad" and "lowest, 2.000, at step 10" in verdict.text()


def test_reward_model(rm_run: Path, supervised_run) -> None:
    verdict = judge(load_run(rm_run))
    assert verdict.level == "good" and "ranks 88 % of the held-out pairs" in verdict.headline
    long_winded = supervised_run(
        "long", lambda step: {"rm/accuracy": 0.99},
        lambda step: {"eval/accuracy": 0.7, "eval/accuracy_ci_low": 0.6,
                      "eval/accuracy_ci_high": 0.8, "eval/length_bias": 0.7},
    )  # fmt: skip
    verdict = judge(load_run(long_winded))
    assert verdict.level == "warning"
    assert "+0.70; it pays longer answers." in verdict.text() and "overfitting" in verdict.text()
    chance = supervised_run(
        "chance", lambda step: {"rm/accuracy": 0.5},
        lambda step: {"eval/accuracy": 0.52, "eval/accuracy_ci_low": 0.45},
    )  # fmt: skip
    assert "beyond chance" in judge(load_run(chance)).headline


def test_directory_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=f"{tmp_path}: has no metrics.jsonl"):
        load_run(tmp_path)
    with pytest.raises(RunDirectoryError, match="nothing-here: does not exist"):
        load_run(tmp_path / "nothing-here")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunDirectoryError, match="no step has been logged yet"):
        load_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("hello\nworld\n")
    with pytest.raises(RunDirectoryError, match="line 1"):
        load_run(tmp_path)


def test_samples_come_from_the_last_file_in_order_and_damage_is_told(ppo_run) -> None:
    run_dir = ppo_run(steps=10)
    path = run_dir / "samples" / "step_000010.jsonl"
    path.write_text(path.read_text() + '{"index": 99, "resp')
    run = load_run(run_dir)
    assert run.samples_step == 10
    assert [row["index"] for row in run.samples[::2]] == list(range(12))
    assert run.notes == ("1 line(s) of step_000010.jsonl are not JSON and are left out.",)
    assert json.loads(path.read_text().splitlines()[0])["index"] == 11
