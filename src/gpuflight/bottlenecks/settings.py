"""The section ``rules`` of the settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ThresholdOverride(_Block):
    """Other thresholds of one rule, for all elements or for some."""

    rule: str = Field(min_length=1, description="name of the rule")
    thresholds: dict[str, float] = Field(
        min_length=1, description="name → value, in the rule's unit; `<name>.clear` where an open finding ends"
    )
    where: dict[str, str] = Field(
        default_factory=dict,
        description="which elements: kind, id, namespace or any attribute → pattern with * and ?; all when empty",
    )


class RulesSettings(_Block):
    """Whether and how rounds are judged."""

    enabled: bool = Field(default=True, description="judge each round")
    only: list[str] = Field(default_factory=list, description="names of the rules that judge; all when empty")
    off: list[str] = Field(default_factory=list, description="names of rules that do not judge")
    overrides: list[ThresholdOverride] = Field(
        default_factory=list, description="thresholds of your own; the last one that matches counts"
    )
    folders: list[str] = Field(default_factory=list, description="folders with rules of your own (*.toml)")
