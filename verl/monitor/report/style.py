"""Colours and CSS of the report, for light and dark.

The drawings use the light colours; on the page each is a CSS variable with a dark counterpart.
"""

from __future__ import annotations

INK = {
    "primary": "#0b0b0b",
    "secondary": "#52514e",
    "muted": "#898781",
    "axis": "#c3c2b7",
    "grid": "#e1e0d9",
    "alarm": "#d03b3b",
}
SERIES = ("#2a78d6", "#eb6834", "#1baf7a", "#4a3aa7", "#eda100", "#e87ba4", "#008300")

_LIGHT = {
    **{f"ink-{name}": colour for name, colour in INK.items()},
    **{f"series-{index}": colour for index, colour in enumerate(SERIES)},
}
_DARK = {
    "ink-primary": "#ffffff",
    "ink-secondary": "#c3c2b7",
    "ink-muted": "#a09e97",
    "ink-axis": "#4a4a47",
    "ink-grid": "#2c2c2a",
    "ink-alarm": "#e66767",
    "series-0": "#3987e5",
    "series-1": "#e8743b",
    "series-2": "#199e70",
    "series-3": "#9085e9",
    "series-4": "#c98500",
    "series-5": "#d55181",
    "series-6": "#35a335",
}
#: Colour in a drawing -> CSS variable.
DARK_FOR_LIGHT = {colour: name for name, colour in _LIGHT.items()}

_PAGE_LIGHT = {
    "page": "#f6f5f2", "card": "#fcfcfb", "line": "#e1e0d9", "chip": "#efeeea",
    "good": "#0a7a0a", "warning": "#9a5b00", "bad": "#c02f2f", "info": "#2a62b0",
    "good-back": "#eaf6ea", "warning-back": "#fdf3e0", "bad-back": "#fcebeb",
    "info-back": "#e9f1fb", "user": "#e9f1fb", "assistant": "#f1f0ec",
}  # fmt: skip
_PAGE_DARK = {
    "page": "#111110", "card": "#1a1a19", "line": "#33332f", "chip": "#2a2a27",
    "good": "#5fc75f", "warning": "#e5a83b", "bad": "#f08080", "info": "#7db3f2",
    "good-back": "#15251a", "warning-back": "#2b2212", "bad-back": "#2d1818",
    "info-back": "#152131", "user": "#16263a", "assistant": "#252522",
}  # fmt: skip


def _variables(*tables: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for table in tables for name, colour in table.items())


_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink-primary);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","Noto Sans CJK SC",sans-serif}
main{max-width:1240px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:26px;margin:0;overflow-wrap:anywhere}h2{font-size:19px;margin:36px 0 12px}
h3{font-size:15px;margin:0}
p{margin:0}.sub{color:var(--ink-secondary);overflow-wrap:anywhere}.small{font-size:13px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px 18px}
.verdict{border-left:6px solid;margin:18px 0}
.verdict .headline{font-size:18px;font-weight:600}
.verdict ul{list-style:none;margin:10px 0 0;padding:0}
.verdict li{display:grid;grid-template-columns:74px 1fr;gap:10px;padding:3px 0;align-items:start}
.level{font-size:12px;font-weight:600;border-radius:6px;padding:2px 0;text-align:center}
.level.good{color:var(--good);background:var(--good-back)}
.level.warning{color:var(--warning);background:var(--warning-back)}
.level.bad{color:var(--bad);background:var(--bad-back)}
.level.info{color:var(--info);background:var(--info-back)}
.verdict.good{border-left-color:var(--good)}.verdict.warning{border-left-color:var(--warning)}
.verdict.bad{border-left-color:var(--bad)}.verdict.info{border-left-color:var(--info)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,230px),1fr));gap:12px}
.tile .value{font-size:24px;font-weight:600;line-height:1.25}
.tile .from{font-size:15px;font-weight:400;color:var(--ink-secondary)}
.tile .label{font-size:13px;color:var(--ink-secondary)}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,520px),1fr));gap:16px}
figure{margin:0;min-width:0}figure svg{display:block;width:100%;height:auto;margin-top:6px}
figcaption .sub{font-size:13px}
.chips{display:flex;flex-wrap:wrap;gap:6px;margin-top:8px}
abbr{text-decoration:none;cursor:help}
.chips abbr{font:12px/1.4 ui-monospace,Consolas,"DejaVu Sans Mono",monospace;
 background:var(--chip);border-radius:6px;padding:2px 7px;color:var(--ink-secondary)}
abbr:focus{outline:2px solid var(--series-0)}
.settings{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));
 gap:0 28px;margin:0}
.settings div{display:flex;justify-content:space-between;gap:14px;padding:4px 0;
 border-bottom:1px solid var(--line);min-width:0}
.settings dt{color:var(--ink-secondary);font-size:13px;flex:none}
.settings dd{margin:0;text-align:right;overflow-wrap:anywhere;min-width:0;font-size:13px}
summary{cursor:pointer;color:var(--ink-secondary)}
details.block{margin-top:12px}
pre{overflow:auto;max-height:420px;font:12px/1.5 ui-monospace,Consolas,"DejaVu Sans Mono",monospace;
 background:var(--chip);border-radius:8px;padding:12px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{text-align:left;padding:5px 10px;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--ink-secondary);font-weight:600}
td.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.name{font-family:ui-monospace,Consolas,"DejaVu Sans Mono",monospace;font-size:12px;
 white-space:nowrap}
.sample{margin-bottom:10px;padding:10px 16px}
.sample>summary{display:flex;flex-wrap:wrap;gap:4px 12px;align-items:baseline}
.sample>summary .ask{color:var(--ink-primary);flex:1 1 260px;min-width:0;overflow:hidden;
 text-overflow:ellipsis;white-space:nowrap}
.delta{font-variant-numeric:tabular-nums;font-weight:600}
.delta.up{color:var(--good)}.delta.down{color:var(--bad)}
.turn{border-radius:10px;padding:8px 12px;margin:8px 0;max-width:92%;width:fit-content}
.turn.user{background:var(--user);margin-left:auto}.turn.other{background:var(--assistant)}
.role{font-size:11px;color:var(--ink-secondary);text-transform:uppercase;letter-spacing:.04em}
.text{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;max-height:420px;
 overflow-y:auto}
.answers{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr));gap:14px;
 margin:12px 0 4px}
.answer{border:1px solid var(--line);border-radius:10px;padding:10px 12px;min-width:0}
.answer.after{border-color:var(--series-0)}
.answer header{display:flex;flex-wrap:wrap;gap:4px 10px;font-size:12px;
 color:var(--ink-secondary);margin-bottom:6px}
.answer header b{color:var(--ink-primary)}
.cut{color:var(--warning)}.empty{color:var(--ink-muted);font-style:italic}
@media print{details.sample{break-inside:avoid}}
"""


def stylesheet() -> str:
    """The page's CSS."""
    return (
        f":root{{color-scheme:light dark;{_variables(_LIGHT, _PAGE_LIGHT)}}}"
        f"@media(prefers-color-scheme:dark){{:root{{{_variables(_DARK, _PAGE_DARK)}}}}}{_RULES}"
    )
