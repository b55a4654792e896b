"""Text made safe and readable for the page: all that a model or a user wrote passes here."""

from __future__ import annotations

import html
import math
import re
from typing import Any

from verl.monitor.glossary import GLOSSARY

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def escape(value: Any) -> str:
    """HTML-escape any value; control characters become visible symbols.

    Lone surrogates, which JSON can carry but UTF-8 cannot, become U+FFFD.
    """
    text = _CONTROL.sub(lambda match: _symbol(match.group()), str(value))
    return html.escape(_SURROGATE.sub("\ufffd", text), quote=True)


def _symbol(character: str) -> str:
    return "\u2421" if character == "\x7f" else chr(0x2400 + ord(character))


def number(value: Any) -> str:
    """A number with about three significant digits; a dash for what is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–"
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e7:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e5:
        return (
            f"{value:,.3g}"
            if abs(value) < 1e2
            else f"{value:,.1f}"
            if abs(value) < 1e4
            else f"{value:,.0f}"
        )
    return f"{value:.3g}"


def metric_name(name: str, label: str | None = None) -> str:
    """A metric's name (or another label for it) with its glossary entry as hover text."""
    entry = GLOSSARY.get(name)
    hover = f' title="{escape(entry.hover_text())}"' if entry else ""
    return f'<abbr tabindex="0"{hover}>{escape(label or name)}</abbr>'
