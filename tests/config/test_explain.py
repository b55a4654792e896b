"""Every setting, section and metric can be explained; the schema accepts what the loader accepts."""

from __future__ import annotations

import pytest

from verl.config.explain import explain_metric, explain_setting, json_schema
from verl.config.keys import all_keys
from verl.errors import ConfigError
from verl.monitor.glossary import GLOSSARY


@pytest.mark.parametrize("key", [key for key, _ in all_keys()])
def test_every_key_has_a_description_and_an_explanation(key):
    field = dict(all_keys())[key]
    assert field.description
    assert explain_setting(key).splitlines()[0] == key
    assert field.description in explain_setting(key)


def test_a_setting_shows_type_range_and_default():
    assert explain_setting("train.ppo.dual_clip").splitlines()[-3:] == [
        "  type:    number or null",
        "  range:   > 1",
        "  default: null",
    ]
    assert explain_setting("train.ppo.clip_epsilon").splitlines()[-3:] == [
        "  type:    number",
        "  range:   > 0, < 1",
        "  default: 0.2",
    ]
    assert "one of error, drop, truncate_left" in explain_setting("data.overlong")
    assert "default: none, it must be given" in explain_setting("monitor.alerts.first_ratio.limit")


def test_a_section_shows_its_keys_and_a_key_inside_a_mapping_its_setting():
    assert "batch_size" in explain_setting("data")
    assert "turns it on" in explain_setting("model.actor.lora")
    assert explain_setting("resource.actor.gpu").startswith("resource.actor\n")


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'train.ppo.kl_coef'"):
        explain_setting("train.ppo.klcoef")
    with pytest.raises(ConfigError, match="kl/sequence_mean"):
        explain_metric("kl/sequence_men", GLOSSARY)
    with pytest.raises(ConfigError, match="docs/metrics.md"):
        explain_metric("zzz/qqq", GLOSSARY)


@pytest.mark.parametrize("name", sorted(GLOSSARY))
def test_every_metric_is_explained(name):
    entry = GLOSSARY[name]
    text = explain_metric(name, GLOSSARY)
    assert text.startswith(name)
    assert entry.meaning in text
    assert entry.healthy in text
    assert entry.advice in text


def test_the_schema_names_every_top_level_section_and_refuses_other_keys():
    schema = json_schema()
    assert {"run_dir", "model", "data", "train", "rollout"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False
