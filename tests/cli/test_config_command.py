"""`verl config show|schema|explain` as a person uses them."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from verl.cli.config import app, split_source
from verl.config.keys import all_keys
from verl.config.load import load_config
from verl.errors import ConfigError

runner = CliRunner()


def test_show_prints_every_setting_with_its_origin(tmp_path):
    source = tmp_path / "run.yaml"
    source.write_text("data:\n  batch_size: 8\n")
    shown = runner.invoke(app, ["show", str(source), "train.ppo.kl_coef=0.1"])
    assert shown.exit_code == 0
    assert re.search(rf"^  batch_size: 8 +# {re.escape(str(source))}:2$", shown.output, re.M)
    assert re.search(r"^    kl_coef: 0\.1 +# command line$", shown.output, re.M)
    assert re.search(r"^    gamma: 1\.0 +# default$", shown.output, re.M)
    for key, _ in all_keys():
        assert f"{key.rpartition('.')[2]}:" in shown.output or ".lora." in key


def test_what_show_prints_is_a_configuration_file_for_the_same_tree(tmp_path):
    overrides = [
        "run_dir=null-ish: #1".replace(": ", "-"),
        "data.train='null'",
        "data.eval='C:\\données # 2'",
        "model.actor.lora.rank=4",
        "resource.actor={gpu: [0, 1]}",
        "train.ppo.value_clip=null",
        "rollout.stop_token_ids=[1, 2]",
    ]
    shown = runner.invoke(app, ["show", *overrides])
    (tmp_path / "again.yaml").write_text(shown.output, encoding="utf-8")
    again = load_config(str(tmp_path / "again.yaml")).config
    assert again == load_config(None, overrides).config


def test_show_changed_leaves_out_the_defaults():
    shown = runner.invoke(app, ["show", "--changed", "train.ppo.epochs=2"])
    assert shown.output == "train:\n  ppo:\n    epochs: 2  # command line\n"


def test_settings_in_the_spelling_of_options_reach_the_loader():
    for argument, advice in (
        ("--train.seed=1", "train.seed=1"),
        ("+train.seed=1", "without '\\+'"),
    ):
        ended = runner.invoke(app, ["show", argument])
        assert isinstance(ended.exception, ConfigError)
        assert re.search(advice, str(ended.exception))


@pytest.mark.parametrize(
    ("arguments", "source", "overrides"),
    [
        ([], None, []),
        (["a.yaml"], "a.yaml", []),
        (["a.yaml", "b=1"], "a.yaml", ["b=1"]),
        (["b=1", "c=2"], None, ["b=1", "c=2"]),
        (["--b=1"], None, ["--b=1"]),
        (["run=3/config.yaml", "b=1"], None, ["run=3/config.yaml", "b=1"]),
        (["./run=3/config.yaml"], "./run=3/config.yaml", []),
    ],
)
def test_the_first_argument_is_a_file_unless_it_sets_something(arguments, source, overrides):
    assert split_source(arguments) == (source, overrides)


def test_schema_is_json():
    schema = json.loads(runner.invoke(app, ["schema"]).output)
    assert schema["title"] == "Config"


def test_explain_tells_settings_sections_and_metrics_apart():
    assert "range:   >= 0" in runner.invoke(app, ["explain", "train.ppo.kl_coef"]).output
    assert "  keys:" in runner.invoke(app, ["explain", "train.ppo"]).output
    assert "healthy:" in runner.invoke(app, ["explain", "kl/sequence_mean"]).output
