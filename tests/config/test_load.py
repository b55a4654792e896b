"""Defaults, file, overrides: who wins, where a value came from, what is refused and how."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config import Config, get_default_config
from verl.config.load import PRESETS, load_config, preset_names, resolved_text, settings_of
from verl.config.yaml_tree import dump_yaml, parse_yaml
from verl.errors import ConfigError


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(source, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return str(caught.value)


def test_without_a_source_the_tree_is_the_default_tree():
    resolved = load_config(None, [])
    assert resolved.config == get_default_config()
    assert set(resolved.origins.values()) == {"default"}


def test_overrides_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    source = write(tmp_path, "train:\n  seed: 5\n  ppo:\n    kl_coef: 0.2\n    gamma: 0.9\n")
    resolved = load_config(source, ["train.ppo.gamma=0.99"])
    ppo = resolved.config.train.ppo
    assert (resolved.config.train.seed, ppo.kl_coef, ppo.gamma, ppo.lam) == (5, 0.2, 0.99, 0.95)
    assert resolved.origins["train.seed"] == f"{source}:2"
    assert resolved.origins["train.ppo.kl_coef"] == f"{source}:4"
    assert resolved.origins["train.ppo.gamma"] == "command line"
    assert resolved.origins["train.ppo.lam"] == "default"


def test_every_setting_has_an_origin(tmp_path):
    source = write(tmp_path, "model: {actor: {lora: {rank: 4}}}\nresource: {actor: {cpu: 1}}\n")
    resolved = load_config(source, ["monitor.alerts.sequence_kl.action=stop"])
    assert list(resolved.origins) == [key for key, _ in settings_of(resolved.config)]
    assert resolved.origins["model.actor.lora.rank"] == f"{source}:1"
    assert resolved.origins["model.actor.lora.alpha"] == "default"
    assert resolved.origins["resource.actor"] == f"{source}:2"


def test_an_empty_file_and_empty_sections_keep_the_defaults(tmp_path):
    assert load_config(write(tmp_path, "# nothing yet\n")).config == Config()
    assert load_config(write(tmp_path, "train:\n  ppo:\ndata:\n")).config == Config()


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.ppo.actor_lr=1e-5", "actor_lr", 1e-5),
        ("train.ppo.adam_betas=[0.8, 0.9]", "adam_betas", (0.8, 0.9)),
        ("train.ppo.normalize_reward=true", "normalize_reward", "batch"),
        ("train.ppo={epochs: 2}", "epochs", 2),
        ("train.ppo.dual_clip=3", "dual_clip", 3.0),
        ("train.ppo.value_clip=null", "value_clip", None),
    ],
)
def test_override_values_are_yaml(override, key, value):
    assert getattr(load_config(None, [override]).config.train.ppo, key) == value


def test_null_takes_a_setting_back_to_its_default(tmp_path):
    source = write(tmp_path, "data: {batch_size: 8}\nmodel: {actor: {lora: {rank: 2}}}\n")
    resolved = load_config(source, ["data.batch_size=null", "model.actor.lora=null"])
    assert resolved.config.data.batch_size == 32
    assert resolved.origins["data.batch_size"] == "default"
    assert resolved.config.model.actor.lora is None
    assert load_config(source, ["train=null"]).config.train == Config().train


def test_a_section_given_as_an_override_is_laid_over_the_file(tmp_path):
    source = write(tmp_path, "train: {ppo: {kl_coef: 0.3, gamma: 0.9}}\n")
    ppo = load_config(source, ["train.ppo={gamma: 0.5}"]).config.train.ppo
    assert (ppo.kl_coef, ppo.gamma) == (0.3, 0.5)


def test_a_placement_given_as_an_override_replaces_the_one_of_the_file(tmp_path):
    source = write(tmp_path, "resource: {actor: {gpu: [0]}}\n")
    assert load_config(source, ["resource.actor={cpu: 1}"]).config.resource.actor == {"cpu": 1}
    dotted = load_config(None, ["resource.actor.gpu=[0, 1]"])
    assert dotted.config.resource.actor == {"gpu": [0, 1]}
    assert dotted.origins["resource.actor"] == "command line"


def test_the_action_of_an_alert_alone_keeps_its_limit():
    alert = load_config(None, ["monitor.alerts.sequence_kl.action=stop"]).config.monitor.alerts
    assert (alert.sequence_kl.limit, alert.sequence_kl.action) == (30.0, "stop")


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("data:\n  batch_size: 0\n", 2, "data.batch_size"),
        ("data:\n  batch_size: many\n", 2, "data.batch_size"),
        ("data:\n  batch_size: true\n", 2, "data.batch_size"),
        ("train:\n  ppo:\n    # c\n    clip_epsilon: 1.0\n", 4, "train.ppo.clip_epsilon"),
        ("train:\n  ppo:\n    dual_clip: 0.2\n", 3, "train.ppo.dual_clip"),
        ("train:\n  ppo:\n    actor_lr: .inf\n", 3, "train.ppo.actor_lr"),
        ("train:\n  ppo:\n    adam_betas: [0.9, 1.0]\n", 3, "train.ppo.adam_betas"),
        ("model:\n  actor:\n    lora:\n      rank: -1\n", 4, "model.actor.lora.rank"),
        ("monitor:\n  trackers: [wandb]\n", 2, "monitor.trackers"),
        ("data: 5\n", 1, "data"),
    ],
)
def test_a_bad_value_is_refused_with_its_key_and_line(tmp_path, text, line, key):
    source = write(tmp_path, text)
    message = refusal(source)
    assert message.startswith(f"{key}: ")
    assert message.endswith(f"[{source}:{line}]")


def test_all_faults_of_a_file_are_reported_together(tmp_path):
    source = write(tmp_path, "data:\n  batch_size: 0\ntrain:\n  sead: 1\n")
    message = refusal(source, "rollout.top_p=2")
    assert len(message.splitlines()) == 3
    assert "rollout.top_p: must be less than or equal to 1 (got 2) [command line]" in message
    assert f"unknown key 'train.sead'; did you mean 'train.seed'? [{source}:4]" in message


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path):
    source = write(tmp_path, "data:\n  batch_size: 1\n  overlong: drop\n  batch_size: 2\n")
    message = refusal(source)
    assert f"{source}:4" in message
    assert f"{source}:2" in message
    assert "'data.batch_size'" in message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("data:\n\tbatch_size: 1\n", 2),
        ("data: {batch_size: 1\n", 2),
        ("- a\n- b\n", None),
        ("data: &d\n  train: *d\n", 1),
        ("run_dir: !!python/object/apply:os.getcwd []\n", 1),
        ("a: 1\n---\nb: 2\n", 2),
        ("? [x]\n: 1\n", 1),
    ],
)
def test_text_that_is_not_a_configuration_is_refused_with_its_place(tmp_path, text, line):
    source = write(tmp_path, text)
    assert (f"{source}:{line}:" if line else f"{source}:") in refusal(source)


def test_files_that_cannot_be_read_are_named(tmp_path):
    assert "no configuration file 'absent.yaml'" in refusal("absent.yaml")
    assert str(tmp_path) in refusal(str(tmp_path))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "binary.yaml" in refusal(str(binary))


def test_every_preset_loads_by_name_and_is_listed_in_the_error():
    message = refusal("no-such-preset")
    assert preset_names() == sorted(path.stem for path in PRESETS.glob("*.yaml"))
    for name in preset_names():
        assert name in message
        origins = set(load_config(name).origins.values()) - {"default"}
        assert all(origin.startswith(f"preset {name}:") for origin in origins)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("+train.num_epochs=3", "without '+'; write 'train.num_epochs=3'"),
        ("--train.seed=3", "without '--'; write 'train.seed=3'"),
        ("~train.seed", "without '~'; write 'train.seed=VALUE'"),
        ("+actor.x=1", "unknown key 'actor'; a key of that name is 'model.actor'"),
        ("num-epochs=3", "'train.num_epochs'"),
        ("train.num-epochs=3", "did you mean 'train.num_epochs'?"),
        ("trian.ppo.kl_coef=1", "did you mean 'train.ppo.kl_coef'?"),
        ("train.sft.kl_coef=1", "'train.ppo.kl_coef'"),
        ("learnig_rate=1", "train.ppo.actor_lr"),
        ("train.seed.x=1", "'train.seed' is a single setting"),
        ("train.seed", "write 'train.seed=VALUE'"),
        ("train.seed=", "no value"),
        ("=3", "write key=value"),
        ("train.seed=[", "not valid YAML"),
        ("data={train: a, train: b}", "given twice"),
    ],
)
def test_a_bad_override_says_what_to_write(override, says):
    assert says in refusal(None, override)


def keys_of_the_schema():
    return [key for key, _ in settings_of(load_config(None, ["model.actor.lora.rank=8"]).config)]


@pytest.mark.parametrize("key", keys_of_the_schema())
def test_a_slip_in_any_key_at_any_depth_is_refused_with_the_real_key(tmp_path, key):
    parents, _, name = key.rpartition(".")
    typo = name + name[-1]
    message = refusal(None, f"{parents + '.' if parents else ''}{typo}=1")
    assert "unknown key" in message
    assert repr(key) in message
    nested = "".join(
        "  " * depth + part + ":\n" for depth, part in enumerate(parents.split(".")) if part
    )
    indent = "  " * (len(parents.split(".")) if parents else 0)
    source = write(tmp_path, f"{nested}{indent}{typo}: 1\n")
    message = refusal(source)
    assert repr(key) in message
    assert f"[{source}:{nested.count(chr(10)) + 1}]" in message


def test_a_saved_tree_reads_back_as_it_was(tmp_path):
    config = load_config(
        None,
        [
            "train.ppo.value_clip=null",
            "model.actor.lora={rank: 3, target_modules: [q_proj]}",
            "resource.actor={gpu: [0, 1]}",
            "run_dir='null'",
            "data.train='1e-5'",
            "train.ppo.actor_lr=3.3e-7",
        ],
    ).config
    (tmp_path / "config.yaml").write_text(resolved_text(config), encoding="utf-8")
    again = load_config(str(tmp_path / "config.yaml")).config
    assert again == config
    assert (again.run_dir, again.data.train) == ("null", "1e-5")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=4,
    )
)
def test_yaml_writes_what_it_reads(value):
    assert parse_yaml(dump_yaml({"key": value}), str)[0] == {"key": value}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("010", 10), ("on", "on"), ("1:30", "1:30"), ("~", None), ("-.5", -0.5)],
)
def test_scalars_follow_yaml_1_2(text, value):
    assert parse_yaml(text, str)[0] == value


def test_configuration_does_not_import_torch():
    code = "import sys, verl.config.load, verl.config.explain; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
