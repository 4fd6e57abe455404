"""Channels: the interface that patches call, one for each dimension, with the engine's state."""

from __future__ import annotations

from hybridcomp.autotune.trials import Sent
from hybridcomp.channels.channel import Channel, channel_of
from hybridcomp.channels.engine_channels import NAME, Channels, channels_of
from hybridcomp.channels.engine_state import ATTRIBUTE, EngineState
from hybridcomp.channels.host_copies import HostMoves, Packed
from hybridcomp.channels.moves import Posted
from hybridcomp.collectives import OwnedRange, ReduceScatterHandle, native_nbytes

__all__ = [
    "ATTRIBUTE", "NAME", "Channel", "Channels", "EngineState", "HostMoves", "OwnedRange", "Packed",
    "Posted", "ReduceScatterHandle", "Sent", "channel_of", "channels_of", "native_nbytes",
]  # fmt: skip
