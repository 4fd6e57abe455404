"""A damaged entry of one rank raises an error on all ranks at once, naming rank and entry."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.errors import CheckpointError, ConfigError
from hybridcomp.patches.torch.attached import Attached
from tests.ranks import RunRanks

BLOCK: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 3, "error_feedback": True}, "min_bytes": 0,
    "ledger": {"every": 1_000_000},
}  # fmt: skip
ENTRY = "rank_00001"


def trained() -> tuple[Any, Attached]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 30))
    attached = hybridcomp.attach(model, BLOCK)
    assert attached is not None
    model(torch.randn(4, 40)).square().mean().backward()
    return model, attached


def changed(packed: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    state = torch.load(io.BytesIO(packed), weights_only=True)
    change(state)
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def not_finite(state: dict[str, Any]) -> None:
    state["residuals"]["sender"]["weight"][0][1][3] = float("nan")


def far_away(state: dict[str, Any]) -> None:
    state["residuals"]["sender"]["weight"].append((10**9, torch.ones(2)))


def no_factors(state: dict[str, Any]) -> None:
    state["factors"] = {"weight[0:30]": [1.0, 2.0]}


def no_units(state: dict[str, Any]) -> None:
    state["divisors"] = {}


DAMAGE: dict[str, Callable[[bytes], Any]] = {
    "cut": lambda packed: packed[:100],
    "empty": lambda packed: b"",
    "no bytes": lambda packed: 3,
    "a list": lambda packed: changed(packed, dict.clear),
    "not finite": lambda packed: changed(packed, not_finite),
    "far away": lambda packed: changed(packed, far_away),
    "no factors": lambda packed: changed(packed, no_factors),
    "no units": lambda packed: changed(packed, no_units),
}


def refused() -> dict[str, str]:
    """Return this rank's error for each damage of rank 1's entry."""
    model, attached = trained()
    state, norm = attached.state_dict(), attached.channels.residuals.norm()
    assert norm > 0
    found = {}
    for title, damage in DAMAGE.items():
        mine = dict(state)
        if dist.get_rank() == 1:
            mine[ENTRY] = damage(state[ENTRY])
        with pytest.raises(CheckpointError) as caught:
            attached.load_state_dict(mine)
        found[title] = str(caught.value)
        assert attached.channels.residuals.norm() == norm, "nothing was taken over"
    return found


def test_damage_of_one_rank_is_told_on_all(on_ranks: RunRanks) -> None:
    for found in on_ranks(2, refused):
        for title, text in found.items():
            assert "rank 1" in text and ENTRY in text, (title, text)


def flipped() -> int:
    """Return how many bits of an entry's residuals can be flipped without an error."""
    model, attached = trained()
    state = attached.state_dict()
    mine = state[f"rank_{dist.get_rank():05d}"]
    values = attached.channels.residuals.state_dict()["sender"]["weight"][0][1]
    place = mine.index(values.numpy().tobytes()[:64])
    silent = 0
    for byte in range(place, place + 4 * values.numel(), 97):
        bad = mine[:byte] + bytes([mine[byte] ^ 4]) + mine[byte + 1 :]
        try:
            attached.load_state_dict({f"rank_{dist.get_rank():05d}": bad})
            silent += 1
        except CheckpointError:
            pass
    return silent


def test_no_flipped_bit_is_taken(on_ranks: RunRanks) -> None:
    assert on_ranks(2, flipped) == [0, 0]


def of_another_version() -> tuple[str, float, float]:
    """Load another version's guard, then an older entry; return the error and both norms."""
    guarded = {**BLOCK, "dp": {**BLOCK["dp"], "guard": {"error": 0.9}}}
    model = DistributedDataParallel(nn.Linear(40, 30))
    attached = hybridcomp.attach(model, guarded)
    assert attached is not None
    model(torch.randn(4, 40)).square().mean().backward()
    ((name, mine),) = attached.state_dict().items()
    norm = attached.channels.residuals.norm()
    unknown = changed(mine, lambda state: state.update(guard={"dp": {"of_later": 1}}))
    with pytest.raises(CheckpointError) as caught:
        attached.load_state_dict({name: unknown})
    attached.load_state_dict({name: changed(mine, lambda state: state.pop("offload"))})
    return str(caught.value), norm, attached.channels.residuals.norm()


def test_a_part_of_another_version_is_told_and_one_that_came_later_may_lack(
    on_ranks: RunRanks,
) -> None:
    for text, before, after in on_ranks(2, of_another_version):
        assert "rank_00000" in text and "'guard'" in text and "of_later" in text
        assert before == after > 0


def lacking() -> tuple[str, str]:
    """Load with rank 1's entry missing; then with one of another step."""
    model, attached = trained()
    state = attached.state_dict()
    texts = []
    for case in ("none", "other"):
        mine = dict(state)
        if dist.get_rank() == 1 and case == "none":
            del mine[ENTRY]
        if dist.get_rank() == 1 and case == "other":
            mine[ENTRY] = changed(state[ENTRY], lambda found: found.update(step=7))
        with pytest.raises(ConfigError) as caught:
            attached.load_state_dict(mine)
        texts.append(str(caught.value))
    return texts[0], texts[1]


def test_what_does_not_belong_together_is_told_on_all(on_ranks: RunRanks) -> None:
    for missing, other in on_ranks(2, lacking):
        assert "rank 1 lacks" in missing
        assert "ranks 0 and 1" in other


def _update(values: dict[str, Any], found: dict[str, Any]) -> None:
    found.update(values)


def of_two_saves() -> str:
    """Load entries of four ranks on rank 0 of two, one of them from an earlier save."""
    _, attached = trained()
    (mine,) = attached.state_dict().values()
    names = [f"rank_{rank:05d}" for rank in range(dist.get_rank(), 4, 2)]
    steps = (3, 2 if dist.get_rank() == 0 else 3)
    state = {}
    for name, step in zip(names, steps, strict=True):
        of = {"world_size": 4, "step": step, "rank": int(name[-5:])}
        state[name] = changed(mine, functools.partial(_update, of))
    with pytest.raises(ConfigError) as caught:
        attached.load_state_dict(state)
    return str(caught.value)


def test_entries_of_one_rank_that_were_not_saved_together_are_told_on_all(
    on_ranks: RunRanks,
) -> None:
    for text in on_ranks(2, of_two_saves):
        assert "not saved together" in text


def handed_all() -> tuple[float, float]:
    """Return the residuals' norms before and after loading all ranks' entries on each rank."""
    _, attached = trained()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, attached.state_dict())
    norm = attached.channels.residuals.norm()
    attached.load_state_dict({name: one for state in every for name, one in state.items()})
    return norm, attached.channels.residuals.norm()


def test_a_rank_takes_its_own_entry_of_all(on_ranks: RunRanks) -> None:
    for before, after in on_ranks(2, handed_all):
        assert before == pytest.approx(after, rel=1e-6) and before > 0
