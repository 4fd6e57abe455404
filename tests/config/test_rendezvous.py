"""``sync.islands`` as an object: the meeting place of islands that are jobs, and conflicts."""

from __future__ import annotations

import pytest

from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError

WHERE = {"rendezvous": "tcp://10.0.0.1:29400"}
ISLANDS: dict[str, tuple[object, str]] = {
    "empty": ({}, "islands.rendezvous: found nothing; rendezvous is required"),
    "no scheme": ({"rendezvous": "a:1"}, r'islands.rendezvous: found "a:1"; expected tcp://host'),
    "no port": ({"rendezvous": "tcp://a:0"}, "islands.rendezvous: found .*; expected tcp://host"),
    "a number": ({"rendezvous": 3}, "islands.rendezvous: found 3; expected a string"),
    "words": ({**WHERE, "name": "a b"}, 'islands.name: found "a b"; expected letters, digits'),
    "no time": ({**WHERE, "timeout_s": 0}, "islands.timeout_s: found 0; expected greater than 0"),
    "none": ({**WHERE, "at_start": 0}, "islands.at_start: found 0; expected greater than or"),
    "unknown": ({**WHERE, "every": 3}, "islands.every: found 3; unknown key; known keys are rend"),
    "text": ("x", r'islands: found "x"; expected "node", the number .*, or \{"rendezvous":'),
}


@pytest.mark.parametrize("name", ISLANDS)
def test_a_bad_object_is_named(name: str) -> None:
    islands, words = ISLANDS[name]
    with pytest.raises(ConfigError, match=f"^compression.sync.{words}") as error:
        CompressionConfig.parse({"sync": {"islands": islands}})
    assert "\n" not in str(error.value)


def test_islands_that_are_jobs_have_no_ramp() -> None:
    ramp = {"codec": "blockint", "bits": 4, "ramp": {"from": 8, "steps": 10}}
    CompressionConfig.parse({"sync": {"islands": 2, **ramp}})
    words = "^compression.sync.ramp: found .*; islands that join count other steps"
    with pytest.raises(ConfigError, match=words):
        CompressionConfig.parse({"sync": {"islands": WHERE, **ramp}})


def test_an_address_of_ipv6_and_what_is_agreed() -> None:
    block = CompressionConfig.parse({"sync": {"islands": {"rendezvous": "tcp://[fe80::1]:29400"}}})
    assert block.sync.jobs is not None and block.sync.jobs.address == ("fe80::1", 29400)
    other = CompressionConfig.parse({"sync": {"islands": WHERE}})
    assert block.flat() != other.flat()
