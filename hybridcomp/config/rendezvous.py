"""The object ``sync.islands``: islands that are separate jobs, and the store where they meet."""

from __future__ import annotations

from pydantic import Field, field_validator

from hybridcomp.config.codec_settings import AtLeastOne, Positive, Strict
from hybridcomp.config.error_messages import problem


class RendezvousConfig(Strict):
    """Islands that are separate jobs, and the store where they meet."""

    rendezvous: str = Field(
        description="Where `hybridcomp rendezvous` listens: `tcp://host:port`, the same for all "
        "islands. Whoever reaches it can read and change what the islands send."
    )
    name: str | None = Field(
        None,
        min_length=1,
        description="Name of the island in messages and when it returns; no two living "
        "islands share one. Default: a number, from 0 on as they come.",
    )
    at_start: AtLeastOne = Field(
        2, description="Islands with which a run begins. Others join at a later meeting."
    )
    timeout_s: Positive = Field(
        120.0,
        description="Seconds that an island waits at a meeting for others. It then leaves "
        "them out, and they lose their changes since the last meeting.",
    )
    join_timeout_s: Positive = Field(
        3600.0, description="Seconds that a new island waits for the rendezvous and a meeting."
    )

    @property
    def address(self) -> tuple[str, int]:
        return split_address(self.rendezvous)

    @field_validator("rendezvous")
    @classmethod
    def _address(cls, address: str) -> str:
        host, port = split_address(address)
        if not host or not 0 < port < 1 << 16:
            raise problem("", address, "expected tcp://host:port, where `hybridcomp rendezvous` is")
        return address

    @field_validator("name")
    @classmethod
    def _one_word(cls, name: str | None) -> str | None:
        if name is not None and not all(c.isalnum() or c in "-_." for c in name):
            raise problem("", name, "expected letters, digits, -, _ and . alone")
        return name


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``tcp://host:port``; "" and 0 for anything else."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not port.isascii() or not port.isdigit() or len(port) > 5:
        return "", 0
    return host.removeprefix("[").removesuffix("]"), int(port)
