"""List the facts that must be equal in all islands before islands that are separate jobs meet."""

from __future__ import annotations

import hashlib
from typing import Any

from hybridcomp.channels import Channel
from hybridcomp.job import small_messages
from hybridcomp.job.agreement import versions
from hybridcomp.sync.master_weights import Masters


def facts_of(channel: Channel, masters: Masters) -> dict[str, Any]:
    """Return settings, layout and a digest of the weights' form of this island, as JSON-like data.

    A collective of the island's ranks.
    """
    config = channel.state.config
    codec = channel.state.policy.codecs.get(("sync", "forward"))
    facts = {f"compression.sync.{key}": value for key, value in config.sync.agreed().items()}
    del facts["compression.sync.islands"]
    held = small_messages.gather_objects((masters.digest, masters.numel, str(masters.dtype)))
    numel = sum(numel for _, numel, _ in held) // masters.shares(None)[0]
    return {
        **facts,
        "compression.sync.codec": codec.spec if codec else "none",
        "compression.min_bytes": config.min_bytes,
        "ranks of an island": len(held),
        "trained weights": numel,
        "dtype of weights": held[0][2],
        "names and sizes of weights": hashlib.sha256(repr(held).encode()).hexdigest()[:16],
        "version of hybridcomp": versions()["hybridcomp"],
    }
