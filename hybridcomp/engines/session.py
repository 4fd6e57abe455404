"""What attaching means, as far as torch's engines share it: read, agree, make channels, report.

The only file here that knows how channels and reporters are made.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp import process
from hybridcomp.agreement import agree, versions
from hybridcomp.channels import Channels, Sent
from hybridcomp.config import BLOCK, CompressionConfig, load_config, read_source
from hybridcomp.policy import Dimension
from hybridcomp.reporter import Reporter, describe_run
from hybridcomp.topology import Ranks

#: a block in any of the forms in which a user has it
Source = Mapping[str, Any] | str | Path | CompressionConfig

_jsonl_in_use: dict[str, int] = {}


def read(source: Source | None) -> CompressionConfig | None:
    """The block of ``source``; None asks what ``hybridcomp.install`` or the environment named.

    Returns None where there is no block, or one that says ``"enabled": false``. Raises ConfigError.
    """
    if source is None:
        return process.configured()
    if isinstance(source, CompressionConfig):
        return source if source.enabled else None
    whole = read_source(source)
    if BLOCK in whole:
        return load_config(whole)
    block = CompressionConfig.parse(whole)
    return block if block.enabled else None


def agree_on(block: CompressionConfig | None, kind: str, ranks: Ranks) -> None:
    """Compare the block and the versions over the ranks of one model. Raises AgreementError."""
    settings = {BLOCK: None} if block is None else block.flat()
    agree({**settings, "engine": kind, **versions()}, ranks=ranks)


class Session:
    """The channels of one model, and who reports about them.

    Making one is a collective over the whole job where the block has two levels (``hierarchy``) or
    measures (``when: auto``): every rank attaches as many models, in the same order.
    """

    def __init__(
        self, block: CompressionConfig, device: torch.device, absent: Collection[Dimension]
    ) -> None:
        self.channels = Channels(block)
        self.device = device
        self._reporter = Reporter(self.channels, _jsonl_of(block), device)
        for line in block.describe(absent):
            say(line)

    def place(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Find the nodes, and make the two levels of these groups where they span several."""
        ranks = {tuple(dist.get_process_group_ranks(group)) for group in groups}
        for note in self.channels.place(ranks):
            say(note)

    def measure(
        self,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        numel: int,
        sent: Mapping[Dimension, Sent],
    ) -> None:
        """Time the dimensions that turn themselves off where their codec does not pay."""
        for note in self.channels.weigh(group, dtype, self.device, numel, sent):
            say(note)

    def describe(self, dtypes: Iterable[torch.dtype]) -> None:
        """Tell the user what a codec cannot save on messages of these dtypes; W&B the block."""
        for dtype in sorted(dtypes, key=str):
            for note in self.channels.config.notes(dtype):
                say(note)
        describe_run(self.channels.config)

    def begin_step(self) -> None:
        """Say that the first forward pass of a step begins, for steps that are compared."""
        if self.channels.config.measured():
            self.channels.open_step(self.device)

    def end_step(self) -> None:
        """Count an optimizer step; report where that is due. A collective over the job."""
        channels = self.channels
        sampled = channels.sampling
        channels.step += 1
        for text in channels.close_step(sampled, self.device):
            say(text)
        if channels.step % channels.config.ledger.interval == 0:
            _log(self._reporter.report(channels.step))

    def take_events(self) -> list[tuple[str, float]]:
        """The figures of the last report, once, for a trainer that logs at moments of its own."""
        return self._reporter.take()

    def close(self) -> None:
        """Write the ledger's summary."""
        self._reporter.close()


def say(text: str) -> None:
    """Print ``text`` on rank 0, once in this process."""
    process.say(text)


def _jsonl_of(block: CompressionConfig) -> Path | None:
    """The ledger's file; further models of the process write ``name.2.jsonl`` and so on."""
    if not block.ledger.jsonl:
        return None
    path = Path(block.ledger.jsonl)
    number = _jsonl_in_use[str(path)] = _jsonl_in_use.get(str(path), 0) + 1
    return path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")


def _log(events: Sequence[tuple[str, float]]) -> None:
    """Give the figures to the W&B run of this process, where it has one.

    Without a step: the trainer numbers its own records, and these go with its next one.
    """
    wandb = sys.modules.get("wandb")
    if events and wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.log(dict(events), commit=False)
