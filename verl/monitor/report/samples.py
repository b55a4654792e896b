"""Answers before and after training, side by side.

In: rows of a samples file. Out: HTML. Every text is escaped; fields may be missing.
"""

from __future__ import annotations

from typing import Any

from verl.monitor.report.text import escape, number

#: Rows whose `<details>` is open, and rows shown at most, per mode.
OPEN_ROWS = 10
MAX_ROWS = 200

Row = dict[str, Any]


def samples_section(rows: list[Row], step: int | None) -> str:
    """The section on sample answers; greedy first, sampled ones folded behind them."""
    if step is None:
        return '<h2>Answers</h2><p class="sub">No samples have been written yet.</p>'
    modes = sorted({str(row.get("mode", "")) for row in rows}, key=lambda m: (m != "greedy", m))
    before = "" if step == 0 else "before (start policy) and after, "
    parts = [f"<h2>Answers: {before}step {step}</h2>"]
    for position, mode in enumerate(modes):
        chosen = [row for row in rows if str(row.get("mode", "")) == mode]
        body = "".join(
            _sample(row, index < OPEN_ROWS) for index, row in enumerate(chosen[:MAX_ROWS])
        )
        if len(chosen) > MAX_ROWS:
            body += f'<p class="sub">{len(chosen) - MAX_ROWS} more in the samples file.</p>'
        label = f"{escape(mode or 'all').capitalize()} answers ({len(chosen)})"
        opened = " open" if position == 0 else ""
        parts.append(f'<details class="block"{opened}><summary>{label}</summary>{body}</details>')
    return "".join(parts)


def _sample(row: Row, is_open: bool) -> str:
    turns = _turns(row.get("prompt"))
    question = turns[-1][1] if turns else ""
    # One line is shown; the rest would only make the file larger.
    ask = escape(" ".join(question[:300].split()))
    summary = f'<b>#{escape(row.get("index", "?"))}</b><span class="ask">{ask}</span>{_delta(row)}'
    chat = "".join(_turn(role, text) for role, text in turns)
    answers = _answer("after", row.get("response"), row.get("score"), row)
    if "baseline_response" in row:
        answers = (
            _answer("before", row["baseline_response"], row.get("baseline_score"), {}) + answers
        )
    return (
        f'<details class="card sample"{" open" if is_open else ""}><summary>{summary}</summary>'
        f'{chat}<div class="answers">{answers}</div></details>'
    )


def _delta(row: Row) -> str:
    score, baseline = row.get("score"), row.get("baseline_score")
    if not isinstance(score, int | float) or not isinstance(baseline, int | float):
        return ""
    change = score - baseline
    direction = "up" if change > 0 else "down" if change < 0 else ""
    return f'<span class="delta {direction}">{change:+.2f}</span>'


def _turns(prompt: Any) -> list[tuple[str, str]]:
    if isinstance(prompt, str):
        return [("user", prompt)]
    if not isinstance(prompt, list):
        return []
    return [
        (str(turn.get("role", "?")), str(turn.get("content", "")))
        for turn in prompt
        if isinstance(turn, dict)
    ]


def _turn(role: str, text: str) -> str:
    side = "user" if role == "user" else "other"
    return (
        f'<div class="turn {side}"><div class="role">{escape(role)}</div>'
        f'<div class="text" dir="auto">{escape(text)}</div></div>'
    )


def _answer(when: str, text: Any, score: Any, details: Row) -> str:
    facts = [f"<b>{when}</b>", f"score {escape(number(score))}"]
    if details.get("length") is not None:
        facts.append(f"{escape(details['length'])} tokens")
    if details.get("finish_reason") == "length":
        facts.append('<span class="cut">cut at the length limit</span>')
    body = (
        f'<div class="text" dir="auto">{escape(text)}</div>'
        if text
        else '<div class="empty">(empty answer)</div>'
    )
    header = "".join(f"<span>{fact}</span>" for fact in facts)
    return f'<div class="answer {when}"><header>{header}</header>{body}</div>'
