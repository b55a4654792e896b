"""The entry of the command line: lazy commands, exit codes, errors without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.version import Version
from typer.testing import CliRunner

from verl import errors
from verl.cli.main import COMMANDS, app, load_command, main

REPOSITORY = Path(__file__).resolve().parents[2]
START = "from verl.cli.main import main; main()"


def run(*arguments, code=START, **environment):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPOSITORY,
        env={**os.environ, "VERL_TRACEBACK": "", **environment},
    )


def test_help_is_instant_and_imports_nothing_heavy():
    code = (
        "import sys, time; start = time.process_time(); from verl.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy', 'matplotlib', 'pyarrow'}\n"
        "print('HEAVY', heavy & set(sys.modules)); print('SECONDS', time.process_time() - start)"
    )
    shown = run(code=code).stdout
    assert "HEAVY set()" in shown
    assert float(shown.rpartition("SECONDS ")[2]) < 0.5
    for name in COMMANDS:
        assert f"\n  {name}" in shown


def test_importing_verl_is_instant_and_imports_nothing_heavy():
    code = (
        "import sys, time; start = time.perf_counter(); import verl\n"
        "print(time.perf_counter() - start)\n"
        "print({'torch', 'pydantic', 'transformers', 'numpy'} & set(sys.modules))"
    )
    seconds, heavy = run(code=code).stdout.splitlines()
    assert float(seconds) < 0.2
    assert heavy == "set()"


def test_the_public_names_are_those_of_their_modules():
    import verl
    from verl.cluster.dispatch import register
    from verl.cluster.resources import ResourcePool
    from verl.data import DataProvider
    from verl.trainer.base import Trainer

    assert verl.Trainer is Trainer
    assert verl.DataProvider is DataProvider
    assert verl.ResourcePool is ResourcePool
    assert verl.register is register
    assert set(verl.__all__) <= set(dir(verl))
    assert Version(verl.__version__) >= Version("0.3.0")
    with pytest.raises(AttributeError, match="no attribute 'Trianer'"):
        verl.Trianer  # noqa: B018


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_exists_and_has_help(name):
    command = load_command(name)
    assert command.name == name
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0, shown.output
    assert f"Usage: verl {name}" in shown.output or f"Usage: root {name}" in shown.output
    assert COMMANDS[name][1].endswith(".")


def test_a_wrong_command_is_a_usage_error_with_a_suggestion():
    ended = run("confg")
    assert ended.returncode == 2
    assert "Did you mean 'config'?" in ended.stderr


def test_the_version_is_printed():
    assert run("--version").stdout.startswith("verl 0.")


@pytest.mark.parametrize(
    ("arguments", "environment", "traceback"),
    [
        ((), {}, False),
        (("--traceback",), {}, True),
        ((), {"VERL_TRACEBACK": "1"}, True),
        ((), {"VERL_TRACEBACK": "0"}, False),
    ],
)
def test_an_error_is_one_plain_line_unless_a_traceback_is_asked_for(
    arguments, environment, traceback
):
    ended = run("config", "show", "train.sead=1", *arguments, **environment)
    assert ("Traceback" in ended.stderr) == traceback
    if not traceback:
        assert ended.returncode == 2
        assert ended.stdout == ""
        assert ended.stderr == (
            "error: unknown key 'train.sead'; did you mean 'train.seed'? [command line]\n"
        )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError, 2),
        (errors.DataError, 2),
        (errors.ModelError, 2),
        (errors.PlacementError, 3),
        (errors.MissingDependencyError, 3),
        (errors.RunDirectoryError, 3),
        (errors.CheckpointError, 3),
        (errors.TrainingStopped, 4),
        (errors.Interrupted, 130),
        (KeyboardInterrupt, 130),
    ],
)
def test_each_kind_of_error_has_its_exit_code(monkeypatch, capsys, error, code):
    def raise_it(*_):
        raise error("what, where, what to do")

    monkeypatch.delenv("VERL_TRACEBACK", raising=False)
    monkeypatch.setattr("verl.config.load.load_config", raise_it)
    with pytest.raises(SystemExit) as ended:
        main(["config", "show"])
    assert ended.value.code == code
    if error is not KeyboardInterrupt:
        assert capsys.readouterr().err == "error: what, where, what to do\n"


def test_an_unforeseen_error_keeps_its_traceback():
    code = (
        "import verl.config.load as load\n"
        "def fail(*_): raise ZeroDivisionError('a bug')\n"
        "load.load_config = fail\n"
        "from verl.cli.main import main; main(['config', 'show'])"
    )
    ended = run(code=code)
    assert ended.returncode == 1
    assert "ZeroDivisionError: a bug" in ended.stderr


def test_a_closed_pipe_ends_quietly():
    started = time.monotonic()
    command = f'{sys.executable} -c "{START}" config schema | head -1; exit ${{PIPESTATUS[0]}}'
    ended = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=REPOSITORY, timeout=60
    )
    assert ended.stdout == "{\n"
    assert "Traceback" not in ended.stderr
    assert time.monotonic() - started < 30
