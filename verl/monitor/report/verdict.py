"""Say in words whether a run did what it should: the head of the report.

In: `RunData`. Out: a verdict, one headline and findings that each carry their figures. The
thresholds below are judgement calls, named here so that they can be argued with.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from verl.config.schema import Alerts
from verl.monitor.report.load import RunData

Level = Literal["good", "warning", "bad", "info"]

#: Held-out gain, in standard deviations of the start policy's scores, that counts as success.
TARGET_DEVIATIONS = 1.0
#: Largest fall of the finished fraction that is still normal.
MAX_FINISHED_DROP = 0.1
#: Largest factor (either way) by which the mean length may change.
MAX_LENGTH_FACTOR = 2.0
#: Largest relative fall of distinct-1 and distinct-2.
MAX_DISTINCT_DROP = 1 / 3
#: Share of held-out answers that may begin with the same three words.
MAX_SAME_OPENING = 0.5
#: Share of held-out prompts that may get the very same answer.
MAX_SAME_ANSWER = 0.2
#: |correlation| of score and length differences above which a reward model prefers length.
MAX_LENGTH_BIAS = 0.4
#: Gap of training over held-out accuracy that counts as overfitting.
MAX_ACCURACY_GAP = 0.1
#: Rise of the held-out loss above its minimum that counts as overfitting.
MAX_LOSS_RISE = 0.02


@dataclass(frozen=True)
class Finding:
    """One observation with its figures."""

    level: Level
    text: str


@dataclass(frozen=True)
class Verdict:
    """A headline and what it rests on."""

    level: Level
    headline: str
    findings: tuple[Finding, ...]

    def text(self) -> str:
        """Plain lines for a terminal."""
        marks = {"good": "+", "warning": "!", "bad": "x", "info": "-"}
        return "\n".join([self.headline, *(f"  {marks[f.level]} {f.text}" for f in self.findings)])


def judge(run: RunData) -> Verdict:
    """Return the verdict on a run of any stage, finished or not."""
    return {"ppo": _judge_ppo, "sft": _judge_sft, "rm": _judge_rm}[run.stage](run)


def _judge_ppo(run: RunData) -> Verdict:
    if len(run.eval) < 2:
        text = "There is no later held-out evaluation to compare with the start policy yet."
        return Verdict("info", text, (*_kl(run), *_skipped(run)))
    first, last = run.eval[0], run.eval[-1]
    drift = _degeneration(run, first, last)
    gains = [gain for mode in ("sampled", "greedy") if (gain := _gain(first, last, mode))]
    gain = gains[0] if gains else None
    findings = [
        *(finding for _, finding in gains),
        *_win_rate(last),
        *_kl(run),
        *drift,
        *_skipped(run),
    ]
    degenerate = [finding for finding in drift if finding.level in ("warning", "bad")]
    level, headline = _ppo_headline(gain, bool(degenerate), last["step"])
    if level == "good" and any(finding.level in ("warning", "bad") for finding in findings):
        level, headline = "warning", headline + " Some figures below need a look."
    return Verdict(level, headline, tuple(findings))


def _ppo_headline(
    gain: tuple[float, Finding] | None, degenerate: bool, step: int
) -> tuple[Level, str]:
    if gain is None:
        return "info", f"The evaluation of step {step} has no held-out score."
    deviations, finding = gain
    size = f"{abs(deviations):.1f} SFT standard deviations" if math.isfinite(deviations) else ""
    if finding.level == "bad":
        return "bad", f"The held-out score fell, by {size or 'more than its interval'}."
    if finding.level == "info":
        return "warning", "The held-out score did not change beyond its confidence interval."
    if degenerate:
        return "bad", (
            f"The held-out score rose{f' by {size}' if size else ''}, but the answers look "
            "degenerate: the policy is likely to exploit the reward model."
        )
    return "good", (
        f"The held-out score rose{f' by {size}' if size else ''}, beyond its confidence interval, "
        "and the answers show no sign of degeneration."
    )


def _gain(first: dict[str, Any], last: dict[str, Any], mode: str) -> tuple[float, Finding] | None:
    """Gain in standard deviations of the start policy's sampled scores, and the finding."""
    mean, ci = f"eval/score_{mode}_mean", f"eval/score_{mode}_ci95"
    before, after = first.get(mean), last.get(mean)
    if before is None or after is None:
        return None
    # Two independent means; the prompts are the same, so this errs on the wide side.
    margin = math.hypot(first.get(ci) or 0.0, last.get(ci) or 0.0)
    change = after - before
    deviation = first.get("eval/score_sampled_std")
    relative = change / deviation if deviation else math.nan
    level: Level = "info" if abs(change) <= margin else ("good" if change > 0 else "bad")
    if level == "good" and mode == "sampled" and relative < TARGET_DEVIATIONS:
        level = "warning"
    in_deviations = f" = {relative:+.2f} SFT standard deviations" if deviation else ""
    return relative, Finding(
        level,
        f"Held-out score, {mode} answers: {before:.2f} at step {first['step']}, {after:.2f} at "
        f"step {last['step']} ({change:+.2f} ± {margin:.2f}{in_deviations}; 95 % interval).",
    )


def _win_rate(last: dict[str, Any]) -> list[Finding]:
    rate = last.get("eval/win_rate")
    if rate is None:
        return []
    ci = last.get("eval/win_rate_ci95") or 0.0
    level: Level = "good" if rate - ci > 0.5 else ("bad" if rate + ci < 0.5 else "info")
    text = f"Win rate against the start policy: {100 * rate:.0f} % ± {100 * ci:.0f} %."
    return [Finding(level, text)]


def _kl(run: RunData) -> list[Finding]:
    steps, values = run.series("kl/sequence_mean")
    finite = [(value, step) for step, value in zip(steps, values, strict=True) if value == value]
    if not finite:
        return []
    highest, at = max(finite)
    limit = alert_limit(run)
    level: Level = "good" if highest <= limit else "bad"
    return [
        Finding(
            level,
            f"KL from the reference: {finite[-1][0]:.2f} nats per response at step "
            f"{finite[-1][1]}, at most {highest:.2f} (step {at}); alert limit {limit:g}.",
        )
    ]


def alert_limit(run: RunData) -> float:
    """monitor.alerts.sequence_kl.limit of the run, the default where it is not recorded."""
    limit = run.setting("monitor.alerts.sequence_kl.limit")
    return float(limit) if isinstance(limit, int | float) else Alerts().sequence_kl.limit


def _degeneration(run: RunData, first: dict[str, Any], last: dict[str, Any]) -> list[Finding]:
    findings = []
    before, after = first.get("eval/finished_fraction"), last.get("eval/finished_fraction")
    if before is not None and after is not None:
        level: Level = "warning" if before - after > MAX_FINISHED_DROP else "good"
        text = f"Answers that end by themselves: {100 * before:.0f} % → {100 * after:.0f} %."
        findings.append(Finding(level, text))
    before, after = first.get("eval/length_mean"), last.get("eval/length_mean")
    if before and after:
        factor = max(after / before, before / after)
        level = "warning" if factor > MAX_LENGTH_FACTOR else "good"
        text = f"Mean answer length: {before:.0f} → {after:.0f} tokens."
        findings.append(Finding(level, text))
    for n in (1, 2):
        before, after = first.get(f"eval/distinct_{n}"), last.get(f"eval/distinct_{n}")
        if before and after is not None:
            level = "warning" if 1 - after / before > MAX_DISTINCT_DROP else "good"
            findings.append(Finding(level, f"Distinct-{n}: {before:.2f} → {after:.2f}."))
    before, after = first.get("eval/same_opening"), last.get("eval/same_opening")
    if before is not None and after is not None:
        level = "warning" if after > max(MAX_SAME_OPENING, before) else "good"
        text = (
            f"Answers with the most frequent opening: {100 * before:.0f} % → {100 * after:.0f} %."
        )
        findings.append(Finding(level, text))
    return findings + _same_answers(run)


def _same_answers(run: RunData) -> list[Finding]:
    """Many prompts with one and the same answer: the policy ignores what is asked."""
    answers: dict[str, dict[str, set[str]]] = {}
    for row in run.samples:
        by_text = answers.setdefault(str(row.get("mode")), {})
        by_text.setdefault(str(row.get("response")), set()).add(str(row.get("prompt")))
    if not answers:
        return []
    shares = Counter(
        {
            mode: max(map(len, by_text.values())) / len(set().union(*by_text.values()))
            for mode, by_text in answers.items()
            if len(set().union(*by_text.values())) >= 5
        }
    )
    if not shares:
        return []
    mode, share = shares.most_common(1)[0]
    if share <= MAX_SAME_ANSWER:
        return []
    text = f"One and the same {mode} answer is given to {100 * share:.0f} % of the prompts."
    return [Finding("bad", text)]


def _skipped(run: RunData) -> list[Finding]:
    count = sum(
        value
        for name in ("policy/skipped_steps", "value/skipped_steps")
        for value in run.series(name)[1]
        if value == value
    )
    if not count:
        return []
    return [
        Finding("warning", f"{count:.0f} optimiser step(s) had a gradient that was not finite.")
    ]


def _judge_sft(run: RunData) -> Verdict:
    steps, losses = run.series("eval/loss", "eval")
    points = [(loss, step) for step, loss in zip(steps, losses, strict=True) if loss == loss]
    if len(points) < 2:
        _, train = run.series("sft/loss", "train")
        text = f"Training loss {train[0]:.3f} → {train[-1]:.3f}; " if train else ""
        return Verdict("info", text + "there are not two held-out evaluations to compare.", ())
    (first, _), (last, last_step) = points[0], points[-1]
    best, best_step = min(points)
    findings = [
        Finding(
            "good" if last < first else "bad",
            f"Held-out loss: {first:.3f} → {last:.3f} at step {last_step} (perplexity "
            f"{math.exp(min(first, 50)):.1f} → {math.exp(min(last, 50)):.1f}).",
        )
    ]
    if last > best * (1 + MAX_LOSS_RISE):
        text = f"It was lowest, {best:.3f}, at step {best_step} and has risen since: overfitting."
        findings.append(Finding("warning", text))
    if last >= first:
        return Verdict("bad", "The held-out loss did not fall.", tuple(findings))
    if len(findings) > 1:
        return Verdict("warning", "The held-out loss fell and rose again.", tuple(findings))
    return Verdict("good", "The held-out loss fell.", tuple(findings))


def _judge_rm(run: RunData) -> Verdict:
    evaluated = [record for record in run.eval if record.get("eval/accuracy") is not None]
    if not evaluated:
        return Verdict("info", "There is no held-out evaluation yet.", ())
    last = evaluated[-1]
    accuracy = last["eval/accuracy"]
    low, high = last.get("eval/accuracy_ci_low"), last.get("eval/accuracy_ci_high")
    interval = f" (95 % interval {100 * low:.1f} to {100 * high:.1f} %)" if low and high else ""
    learned = (accuracy if low is None else low) > 0.5
    findings = [
        Finding(
            "good" if learned else "bad",
            f"Held-out accuracy {100 * accuracy:.1f} %{interval} at step {last['step']}.",
        ),
        *_length_bias(last),
        *_accuracy_gap(run, accuracy),
    ]
    if not learned:
        text = "The reward model does not prefer the chosen answers beyond chance."
        return Verdict("bad", text, tuple(findings))
    warned = any(finding.level == "warning" for finding in findings)
    text = f"The reward model ranks {100 * accuracy:.0f} % of the held-out pairs as people did."
    return Verdict("warning" if warned else "good", text, tuple(findings))


def _length_bias(last: dict[str, Any]) -> list[Finding]:
    bias = last.get("eval/length_bias")
    if bias is None:
        return []
    level: Level = "warning" if abs(bias) > MAX_LENGTH_BIAS else "good"
    side = "longer" if bias > 0 else "shorter"
    text = f"Correlation of score and length differences: {bias:+.2f}"
    return [Finding(level, text + (f"; it pays {side} answers." if level == "warning" else "."))]


def _accuracy_gap(run: RunData, held_out: float) -> list[Finding]:
    _, values = run.series("rm/accuracy", "train")
    recent = [value for value in values[-10:] if value == value]
    if not recent:
        return []
    train = sum(recent) / len(recent)
    level: Level = "warning" if train - held_out > MAX_ACCURACY_GAP else "good"
    text = f"Training accuracy over the last {len(recent)} step(s): {100 * train:.1f} %"
    return [Finding(level, text + ("; overfitting." if level == "warning" else "."))]
