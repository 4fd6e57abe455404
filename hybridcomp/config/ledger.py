"""The block's key ``ledger``: the records of the traffic."""

from __future__ import annotations

from pydantic import Field

from hybridcomp.config.codec_settings import AtLeastOne, Count, Strict

#: default of ``ledger.every``
REPORT_EVERY = 10


class LedgerConfig(Strict):
    """Configure which traffic records are written. Counting itself is always on."""

    jsonl: str | None = Field(
        None,
        min_length=1,
        description="File for one JSON record every `every` steps, written by rank 0, relative "
        "to its working directory. null: no file.",
    )
    every: AtLeastOne | None = Field(
        None,
        description="Optimizer steps between two reports. Default: DeepSpeed's `steps_per_print` "
        "where it is finite (the Trainer of Hugging Face writes `inf`), else 10.",
    )
    sample_every: Count = Field(
        10,
        description="Steps between samples of an encoding's relative error, one extra encoding "
        "of up to 65536 values a message. 0: never.",
    )

    @property
    def interval(self) -> int:
        """Return ``every``, or its default, unless a finite steps_per_print replaces it."""
        return REPORT_EVERY if self.every is None else self.every
