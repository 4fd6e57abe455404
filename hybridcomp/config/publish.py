"""The block's key ``publish``: versions of the weights for inference engines."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from hybridcomp.config.codec_settings import Strict
from hybridcomp.config.error_messages import problem
from hybridcomp.foreign import folder_path


class PublishConfig(Strict):
    """Versions of the weights, written after optimizer steps: exact deltas, a full one at times."""

    to: str = Field(
        min_length=1,
        description="Folder for the versions: `file:///folder`, or a path. All ranks write there; "
        "synced to an object store, or seen by the receivers, it is what they read.",
    )
    every: int = Field(1, ge=1, description="Optimizer steps from one version to the next.")
    anchor_every: int = Field(
        100,
        ge=1,
        description="Versions from one full version to the next. A receiver that joins, or lacks "
        "a version, begins with a full one. Less often: fewer bytes.",
    )
    keep: int | None = Field(
        None,
        ge=1,
        description="Full versions that remain in the folder, with the versions that follow them. "
        "Older ones are removed when a new full one is there. Default: all remain.",
    )
    wait: bool = Field(
        False,
        description="Whether each step waits until its version is readable. false: a thread copies "
        "the weights, which the next optimizer step waits for, encodes and writes them beside the "
        "training; an error is raised by the next version.",
    )
    limit_s: float = Field(
        600.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that a version may take beside the training; then it is given up.",
    )
    codec: Literal["auto", "stepcode", "raw"] = Field(
        "auto",
        description="How changes are encoded. stepcode: exact steps. raw: as they are. auto: "
        "stepcode to a folder; over links that the job itself feels, raw where coding takes longer "
        "than it saves.",
    )
    dtype: Literal["bf16", "fp16"] | None = Field(
        None,
        description="The 16 bits in which weights that have more are published. Default: what the "
        "model computes with, which has to be bf16 or fp16 then.",
    )
    as_: Literal["fp8", "mxfp8"] | None = Field(
        None,
        alias="as",
        description="8 bits in which engines hold matrices, with their scales: fp8 (E4M3, blocks "
        "of 128 x 128) or mxfp8 (blocks of 32). Each rank quantizes its shard as vLLM does. "
        "Default: 16 bits.",
    )
    lora: Literal["adapters", "merged"] | None = Field(
        None,
        description="Of a model of PEFT. adapters: these alone, under the names of PEFT's "
        "checkpoints. merged: what it computes with, under the names of its base. Default: base "
        "and adapters under PEFT's names, which the same model of PEFT alone takes.",
    )
    names: Literal["own", "hf"] = Field(
        "own",
        description="Under whose names. own: those of the module, under megatron-core those of its "
        "checkpoints. hf: names and tensors as Hugging Face has them, from megatron-core models of "
        "the families of Llama and GPT-2.",
    )

    @field_validator("to")
    @classmethod
    def _folder(cls, found: Any) -> Any:
        try:
            folder_path(found)
        except ValueError as error:
            raise problem("", found, str(error)) from None
        return found
