"""What a patch calls: one channel for each dimension of an engine, and the state they share."""

from __future__ import annotations

from hybridcomp.autotune.trials import Sent
from hybridcomp.channels.channel import Channel
from hybridcomp.channels.engine_channels import ATTRIBUTE, NAME, Channels, channels_of
from hybridcomp.channels.host_copies import HostMoves, Packed

__all__ = [
    "ATTRIBUTE", "NAME", "Channel", "Channels", "HostMoves", "Packed", "Sent", "channels_of",
]  # fmt: skip
