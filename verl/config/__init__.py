"""Configuration: one typed tree, from defaults, a YAML file and `a.b.c=value` overrides."""

from __future__ import annotations

from verl.config.schema import Config, get_default_config

__all__ = ["Config", "get_default_config"]
