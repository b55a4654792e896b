"""The tutorial's import path of `create_llm_model`."""

from __future__ import annotations

from verl.workers.create import create_llm_model

__all__ = ["create_llm_model"]
