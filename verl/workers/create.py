"""Make one role by hand, as tutorials do: `create_llm_model(model_type="actor", config=...)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from verl.cluster.local import LocalExecutor
from verl.cluster.worker_group import WorkerGroup
from verl.config.schema import Config, PretrainedModel
from verl.errors import ConfigError
from verl.workers.build import BUILDERS, describe_load

Role = Literal["actor", "critic", "ref_policy", "reward_model"]


@dataclass(frozen=True)
class UnloadedModel:
    """A model that was named but given no role, so nothing was loaded."""

    model_name: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(
            f"the model {self.model_name!r} is not loaded: pass model_type "
            f"({', '.join(get_args(Role))}) to create_llm_model"
        )


def create_llm_model(
    model_type: Role | None = None,
    config: PretrainedModel | Mapping[str, Any] | None = None,
    model_name: str | None = None,
) -> WorkerGroup | UnloadedModel:
    """Load the model of a role and start its workers where the configuration places them.

    Args:
        model_type: the role. Without one nothing is loaded, and what comes back only knows its
            name (a check that the installation works).
        config: the role's section, such as `config.model.actor`, which knows the tree it belongs
            to; or a mapping of its settings.
        model_name: hub id or folder, when `config` does not name one.

    Raises:
        ConfigError: an unknown role or setting.
        ModelError: the model cannot be loaded, or not for this role.
        PlacementError: the role's devices are not there.
    """
    if model_type is None:
        return UnloadedModel(model_name or "")
    if model_type not in BUILDERS:
        raise ConfigError(f"model_type {model_type!r} is no role; roles are {', '.join(BUILDERS)}")
    tree = _tree_with(model_type, config, model_name)
    executor = LocalExecutor(tree.resource)
    print(describe_load(tree, model_type), flush=True)
    return executor.start(model_type, lambda device: BUILDERS[model_type](tree, device))


def _tree_with(
    role: str, config: PretrainedModel | Mapping[str, Any] | None, model_name: str | None
) -> Config:
    """A copy of the section's tree with the section in the place of `role`."""
    root = config.root if isinstance(config, PretrainedModel) else None
    tree = Config.model_validate(root.model_dump() if isinstance(root, Config) else {})
    settings = dict(config.model_dump() if isinstance(config, PretrainedModel) else config or {})
    if model_name is not None and not settings.get("pretrained_path"):
        settings["pretrained_path"] = model_name
    section = getattr(tree.model, role)
    for name, value in settings.items():
        setattr(section, name, value)
    return tree
