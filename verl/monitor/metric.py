"""One logged number and what a person needs to know to act on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """The glossary entry of one metric.

    Attributes:
        name: as it stands in metrics.jsonl, `group/name`.
        unit: what 1.0 of it is; "" for a pure number.
        meaning: what it measures, over what.
        formula: how it is computed.
        healthy: the values of a run that goes well.
        advice: what to do when it leaves them.
        stages: which of `ppo`, `sft`, `rm` log it.
    """

    name: str
    unit: str
    meaning: str
    formula: str
    healthy: str
    advice: str
    stages: tuple[str, ...] = ("ppo",)

    def hover_text(self) -> str:
        """The entry as a few plain lines, for a tooltip."""
        unit = f" [{self.unit}]" if self.unit else ""
        return (
            f"{self.name}{unit}\n{self.meaning}\nFormula: {self.formula}\n"
            f"Healthy: {self.healthy}\nOtherwise: {self.advice}"
        )
