"""The block's key ``pipeline``: DeepSpeed's pipeline without a flush after every batch."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from hybridcomp.config.codec_settings import Count, Strict
from hybridcomp.config.error_messages import problem

Versions = Literal["flush", 2, "stash", 1]
Correction = Literal["none", "error_feedback", "look_ahead", "pipemare", "spike"]

#: correction -> weight versions for which the correction is defined
FITS: dict[Correction, tuple[Versions, ...]] = {
    "none": ("flush", 2, "stash", 1),
    "error_feedback": (2,),
    "look_ahead": ("stash", 2, 1),
    "pipemare": (1,),
    "spike": (1,),
}


class AsyncPipelineConfig(Strict):
    """Configure pipelines that do not wait for the end of a batch: which weights a stage uses."""

    versions: Versions = Field(
        "flush",
        description="flush: DeepSpeed's schedule. 2: PipeDream-2BW, all gradients one step late, "
        "two versions. stash: PipeDream, a pass backward has the weights of its pass forward. 1: "
        "the newest weights in both passes.",
    )
    correction: Correction = Field(
        "none",
        description="What is done about late gradients. error_feedback (with 2): makes up for "
        "the last update's error. look_ahead (with stash, 2 or 1): Nesterov's point"
        " ahead. pipemare (with 1): its two corrections. spike (with 1, SGD with "
        "momentum): spike compensation and weight prediction.",
    )
    slack: Count = Field(
        0,
        description="Micro-batches under way on every link beyond the one in work, to hide "
        "messages. Gradients get later: (1 + slack) micro-batches for each stage that follows.",
    )
    warmup: Count = Field(0, description="Optimizer steps that DeepSpeed's schedule makes first.")
    momentum: float = Field(0.99, ge=0, lt=1, description="look_ahead: its momentum.")
    decay: float = Field(
        0.135,
        gt=0,
        lt=1,
        description="pipemare: weight of a step in the trend after as many steps as a "
        "gradient is late.",
    )
    anneal: Count = Field(
        500,
        description="pipemare: steps until early stages' smaller learning rates reach the "
        "schedule's. 0: at once.",
    )

    @field_validator("versions", mode="before")
    @classmethod
    def _one_of(cls, written: Any) -> Any:
        if isinstance(written, bool) or written not in ("flush", 2, "stash", 1):
            raise problem("", written, 'expected "flush", 2, "stash" or 1')
        return written

    @model_validator(mode="after")
    def _fits(self) -> AsyncPipelineConfig:
        fit = FITS[self.correction]
        if self.versions not in fit:
            names = " or ".join(map(json.dumps, fit))
            todo = f"its recurrence has other weights; set pipeline.versions to {names}"
            raise problem("correction", self.correction, todo)
        owners = {"momentum": "look_ahead", "decay": "pipemare", "anneal": "pipemare"}
        for name, owner in owners.items():
            if name in self.model_fields_set and self.correction != owner:
                todo = f'only correction "{owner}" reads it; remove it'
                raise problem(name, getattr(self, name), todo)
        for name in ("slack", "warmup"):
            if (value := getattr(self, name)) and not self.waitless:
                raise problem(name, value, "DeepSpeed's schedule makes all steps; remove it")
        return self

    @property
    def waitless(self) -> bool:
        """Return whether the pipeline runs on across batches without a flush."""
        return self.versions != "flush"
