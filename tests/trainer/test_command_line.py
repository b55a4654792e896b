"""How the words of `verl sft|rm|ppo` are told apart."""

from __future__ import annotations

import pytest

from verl.cli.main import main
from verl.cli.train import sort_words
from verl.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a.yaml", "x=1"], ("a.yaml", ["x=1"], None)),
        (["x=1", "y=2"], (None, ["x=1", "y=2"], None)),
        (["runs/a=b.yaml", "x=1"], ("runs/a=b.yaml", ["x=1"], None)),
        (["--train.seed=1", "-x"], (None, ["--train.seed=1", "-x"], None)),
        (["4", "x=1"], (None, ["x=1"], 4)),
        (["4", "a.yaml", "x=1"], ("a.yaml", ["x=1"], 4)),
        (["a.yaml", "x=1", "0"], ("a.yaml", ["x=1"], 0)),
        ([], (None, [], None)),
    ],
)
def test_file_settings_and_step_may_come_in_any_order(
    words: list[str], expected: tuple[str | None, list[str], int | None]
) -> None:
    source, *settings = words or [None]
    assert sort_words(source, settings, resume=True) == expected


def test_a_step_without_resume_two_steps_and_two_files_are_refused() -> None:
    with pytest.raises(ConfigError, match="only understood in `--resume STEP`"):
        sort_words("4", [], resume=False)
    with pytest.raises(ConfigError, match="4 5"):
        sort_words("a.yaml", ["4", "5"], resume=True)
    with pytest.raises(ConfigError, match=r"'train\.seed' has no '='"):
        sort_words("a.yaml", ["train.seed"], resume=False)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["sft", "--train.seed=1"], 2, "settings are written without '--'; write 'train.seed=1'"),
        (["ppo", "--resme"], 2, "unknown key 'resme'"),
        (["rm", "--resume", "run_dir=runs/none"], 3, "runs/none holds no run"),
    ],
)
def test_what_a_misspelled_command_line_says(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == code
    assert message in capsys.readouterr().err
