"""Layouts of ranks in which a study of losses trains, each with the committed file it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Engine = Literal["deepspeed", "ddp", "fsdp2"]


@dataclass(frozen=True)
class Layout:
    """Layout of the ranks: its DeepSpeed file, their number and the arguments of the example."""

    config: str  # the committed file without a block
    ranks: int
    arguments: tuple[str, ...] = ()
    peers: bool = False  # whether this is data parallelism and nothing else
    engine: Engine = "deepspeed"

    @property
    def known_peers(self) -> tuple[str, ...]:
        """Return the peers that ``--peers`` may name under this layout."""
        from benchmarks.peers.methods import PEERS
        from benchmarks.peers.torch_engines import METHODS

        if self.engine == "deepspeed":
            return tuple(PEERS) if self.peers else ()
        return tuple(METHODS[self.engine])


LAYOUTS = {
    "dp2": Layout("ds_zero1_baseline.json", 2, peers=True),
    "dp4": Layout("ds_zero1_baseline.json", 4, peers=True),
    "dp2z0": Layout("ds_zero0_baseline.json", 2, peers=True),  # whose checkpoints fit any island
    "pp2": Layout("ds_pipe2_baseline.json", 2, ("--pp", "2")),
    "pp2dp2": Layout("ds_pipe2_baseline.json", 4, ("--pp", "2")),
    "3d": Layout("ds_3d_baseline.json", 8, ("--tp", "2", "--pp", "2")),
    "tp2d": Layout("ds_zero0_baseline.json", 4, ("--tp2d", "2")),  # which no preset names
    "cp4": Layout("ds_zero1_baseline.json", 4, ("--cp", "4")),  # nor this
    "ddp2": Layout("ds_zero1_baseline.json", 2, ("--engine", "ddp"), engine="ddp"),
    "fsdp2": Layout("ds_zero1_baseline.json", 2, ("--engine", "fsdp2"), engine="fsdp2"),
}
