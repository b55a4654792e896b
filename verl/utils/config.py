"""The tutorial's import path of `get_default_config`."""

from __future__ import annotations

from verl.config import get_default_config

__all__ = ["get_default_config"]
