"""The block's key ``publish``: versions of the weights for inference engines."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from hybridcomp.config.codec_settings import AtLeastOne, Positive, Strict
from hybridcomp.config.error_messages import problem
from hybridcomp.escaping import folder_path


class PublishConfig(Strict):
    """Configure published versions of the weights: exact deltas, and sometimes a full version."""

    to: str = Field(
        min_length=1,
        description="Folder for the versions, `file:///folder` or a path, where all ranks "
        "write. Receivers read it, or a copy in an object store.",
    )
    every: AtLeastOne = Field(1, description="Optimizer steps from one version to the next.")
    anchor_every: AtLeastOne = Field(
        100,
        description="Versions from one full version to the next, which a receiver needs that "
        "joins or lacks a version.",
    )
    keep: AtLeastOne | None = Field(
        None,
        description="Full versions that stay in the folder, with those that follow them. "
        "Default: all.",
    )
    wait: bool = Field(
        False,
        description="true: each step waits until its version is readable. false: a thread "
        "encodes and writes beside the training, whose next step waits for its copy"
        " of the weights; the next version raises its errors.",
    )
    limit_s: Positive = Field(
        600.0,
        description="Seconds that a version may take beside the training; then it is given up.",
    )
    codec: Literal["auto", "stepcode", "raw"] = Field(
        "auto",
        description="How changes are encoded. stepcode: exact steps. raw: as they are. auto: "
        "stepcode to a folder; over links of the job raw where coding takes longer than it saves.",
    )
    dtype: Literal["bf16", "fp16"] | None = Field(
        None,
        description="Of the published weights. Default: what the model computes with, if that "
        "has 16 bits.",
    )
    as_: Literal["fp8", "mxfp8"] | None = Field(
        None,
        alias="as",
        description="8 bits in which engines hold matrices: fp8 (E4M3, blocks of 128 x 128) or "
        "mxfp8 (blocks of 32), quantized as vLLM does. Default: 16 bits.",
    )
    lora: Literal["adapters", "merged"] | None = Field(
        None,
        description="For a model of PEFT. adapters: these alone. merged: base with adapters, under "
        "the base's names. Default: both under PEFT's names, which only the same PEFT model takes.",
    )
    names: Literal["own", "hf"] = Field(
        "own",
        description="own: the module's names, under megatron-core those of its "
        "checkpoints. hf: Hugging Face's names and tensors, from megatron-core models of the "
        "families of Llama and GPT-2.",
    )

    @model_validator(mode="after")
    def _can_act(self) -> PublishConfig:
        if self.wait and "limit_s" in self.model_fields_set:
            todo = "with wait no version is written beside the training; remove it, or wait"
            raise problem("limit_s", self.limit_s, todo)
        return self

    @field_validator("to")
    @classmethod
    def _folder(cls, written: Any) -> Any:
        try:
            folder_path(written)
        except ValueError as error:
            raise problem("", written, str(error)) from None
        return written
