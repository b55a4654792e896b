"""The report of a run: one self-contained HTML file and a PNG, from files in the run directory."""

from __future__ import annotations

from verl.monitor.report.build import build_report
from verl.monitor.report.load import RunData, load_run
from verl.monitor.report.verdict import Finding, Verdict, judge

__all__ = ["Finding", "RunData", "Verdict", "build_report", "judge", "load_run"]
