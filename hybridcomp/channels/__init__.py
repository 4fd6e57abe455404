"""Channels: the interface that patches call, one for each dimension, with the engine's state."""

from __future__ import annotations

from hybridcomp.autotune.trials import StepTraffic
from hybridcomp.channels.channel import Channel, Message
from hybridcomp.channels.engine_channels import NAME, Channels, channels_of
from hybridcomp.channels.engine_state import ATTRIBUTE, EngineState
from hybridcomp.channels.messages.all_reduce import AllReduce, ReduceToOwners
from hybridcomp.channels.messages.broadcast_reduce import Broadcast, Reduce
from hybridcomp.channels.messages.p2p_and_gather import (
    AllGather,
    AllToAll,
    Posted,
    PostReceive,
    PostSend,
    Receive,
    Send,
)
from hybridcomp.channels.messages.reduce_scatter import ReduceScatter
from hybridcomp.channels.offload.host_copies import HostMoves, Packed
from hybridcomp.collectives import OwnedRange, ReduceScatterHandle, Shards, native_nbytes

__all__ = [
    "ATTRIBUTE", "NAME", "AllGather", "AllReduce", "AllToAll", "Broadcast", "Channel", "Channels",
    "EngineState", "HostMoves", "Message", "OwnedRange", "Packed", "PostReceive", "PostSend",
    "Posted", "Receive", "Reduce", "ReduceScatter", "ReduceScatterHandle", "ReduceToOwners", "Send",
    "Shards", "StepTraffic", "channels_of", "native_nbytes",
]  # fmt: skip
