"""The base of every configuration section: unknown keys are refused by name, edits are checked.

A section knows the whole tree it belongs to (`root`), so a part handed around alone, as in
`PPOTrainer(config=config.train.ppo)`, still finds the batch size or the rollout settings.
"""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from verl.errors import ConfigError


class Section(BaseModel):
    """A group of settings; assignment validates, and a wrong name raises `ConfigError`."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False
    )

    _root: Any = PrivateAttr(default=None)
    _path: str = PrivateAttr(default="")

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic reads true as 1, which would turn a slip into a batch size.
        if isinstance(value, bool) and _takes_number(
            cls.model_fields[str(info.field_name)].annotation
        ):
            raise ValueError("must be a number, not true or false")
        return value

    @property
    def root(self) -> Section | None:
        """The tree this section is part of, or None for a section made alone."""
        return self._root

    @property
    def path(self) -> str:
        """Dotted path of this section in its tree, "" for the root."""
        return self._path

    def link(self, root: Section | None = None, path: str = "") -> Section:
        """Tell this section and all below it which tree they belong to; returns self."""
        root = root or self
        self._root, self._path = root, path
        for name in type(self).model_fields:
            child = getattr(self, name)
            if isinstance(child, Section):
                child.link(root, f"{path}.{name}" if path else name)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
            return
        if name not in type(self).model_fields:
            raise ConfigError(unknown_key_message(type(self), name, self._path))
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise ConfigError(describe_validation_error(error, self._path, type(self))) from None
        child = getattr(self, name)
        if isinstance(child, Section) and self._root is not None:
            child.link(self._root, f"{self._path}.{name}" if self._path else name)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Section)
            and type(self) is type(other)
            and self.model_dump() == other.model_dump()
        )

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Section:
        return type(self).model_validate(self.model_dump()).link()


def unknown_key_message(section: type[Section], name: str, path: str) -> str:
    """Say that `name` does not exist in `section` and which key was probably meant."""
    where = f"{path}.{name}" if path else name
    hint = difflib.get_close_matches(name.replace("-", "_"), HINTS, n=1, cutoff=0.85)
    if hint:
        return f"unknown key {where!r}: {HINTS[hint[0]]}"
    own = difflib.get_close_matches(name.replace("-", "_"), section.model_fields, n=1, cutoff=0.6)
    if own:
        return f"unknown key {where!r}; did you mean {(path + '.' if path else '') + own[0]!r}?"
    elsewhere = KEY_INDEX.get(name.replace("-", "_"))
    if elsewhere:
        return f"unknown key {where!r}; a key of that name is {' or '.join(map(repr, elsewhere))}"
    known = ", ".join(sorted(section.model_fields))
    return f"unknown key {where!r}; known keys here: {known}"


#: Settings that readers of tutorials and users of other programs try, and what to do instead.
HINTS: dict[str, str] = {
    "use_vllm": "this version generates with the `native` engine; remove the key",
    "vllm_config": "this version generates with the `native` engine; remove the key",
    "learning_rate": "each model has its own: train.ppo.actor_lr, train.ppo.critic_lr, train.sft.lr, "
    "train.reward_model.lr",
    "micro_batch_size": "micro-batches follow from train.tokens_per_microbatch",
    "max_steps": "the length of a run is train.total_steps or train.num_epochs",
    "<<": "YAML merge keys are not read; write the keys out",
}

#: Last part of a key -> full paths that end in it; filled by `verl.config.schema`.
KEY_INDEX: dict[str, list[str]] = {}


def section_at(section: type[Section], location: tuple[Any, ...]) -> type[Section]:
    """The section class reached by walking `location` (field names) down from `section`."""
    current = section
    for part in location:
        field = current.model_fields.get(str(part))
        inner = section_class(field.annotation) if field else None
        if inner is None:
            break
        current = inner
    return current


def _takes_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(_takes_number(part) for part in get_args(annotation))


def section_class(annotation: Any) -> type[Section] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def describe_validation_error(
    error: ValidationError, path: str, section: type[Section], origin: Any = None
) -> str:
    """Turn pydantic's report into lines `key: problem (file:line)`.

    `origin` maps a dotted key to the place its value came from, when that is known.
    """
    reasons: dict[str, list[str]] = {}
    for item in error.errors():
        parts = _field_path(section, item["loc"])
        key = ".".join([path, *parts] if path else parts)
        if item["type"] == "extra_forbidden":
            owner = section_at(section, tuple(parts[:-1]))
            text = unknown_key_message(owner, parts[-1], key.rpartition(".")[0])
        else:
            reason = item["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
            text = f"{reason} (got {item['input']!r})"
            text = f"{key}: {text}" if key and key not in reasons else text
        reasons.setdefault(key, []).append(text)
    lines = []
    for key, texts in reasons.items():
        place = origin(key) if origin else None
        lines.append(" or ".join(texts) + (f" [{place}]" if place else ""))
    return "\n".join(lines)


def _field_path(section: type[Section], location: tuple[Any, ...]) -> list[str]:
    """The keys of `location`, without the list positions and union tags pydantic adds below a key."""
    parts: list[str] = []
    current: type[Section] | None = section
    for part in location:
        if current is None:
            break
        parts.append(str(part))
        field = current.model_fields.get(str(part))
        current = section_class(field.annotation) if field else None
    return parts
