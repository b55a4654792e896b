"""How the words of `verl sft|rm|ppo` are told apart."""

from __future__ import annotations

import pytest

from verl.cli.train import sort_words
from verl.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a.yaml", "x=1"], ("a.yaml", ["x=1"], None)),
        (["x=1", "y=2"], (None, ["x=1", "y=2"], None)),
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
