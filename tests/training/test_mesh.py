"""The example on a 2 x 2 mesh under DeepSpeed: as the whole model, compressed, resumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hybridcomp.dimensions import KINDS
from tests.ranks import Trained, run_ranks
from tests.selection import by_day
from tests.training.in_turn import first
from tests.training.mesh_trainer import Job, run

pytest.importorskip("deepspeed")

QUIET = {"min_bytes": 0, "ledger": {"every": 10**6}}
EIGHT: dict[str, Any] = {"tp2d": {"codec": "blockint", "bits": 8}, **QUIET}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """Return each job's results on four ranks, by name."""
    folder = tmp_path_factory.mktemp("mesh")
    plain, meshed = str(folder / "plain.pt"), str(folder / "meshed.pt")
    jobs = {
        "whole": Job(tp2d=1, plain=plain),
        "whole tied": Job(tp2d=1, tied=True, norm="layernorm"),
        "native": Job(folder=str(folder / "checkpoint"), save=2),
        "resumed": Job(folder=str(folder / "checkpoint"), load=True),
        "tied": Job(tied=True, norm="layernorm"),
        "zero 1": Job(stage=1),
        "zero 2": Job(stage=2, plain=meshed),
        "none": Job(block={"preset": "none", **QUIET}),
        "lossless": Job(block={"tp2d": "mpc", **QUIET}),
        "eight": Job(block=EIGHT),
        "from plain": Job(start_from=plain, steps=1),
        "from meshed": Job(tp2d=1, start_from=meshed, steps=1),
        "without layers": Job(tp2d=1, start_from=plain, steps=1),
    }
    with Trained(4, run, jobs) as trained:
        yield trained


#: trainings and the whole model's that they are like
LIKE = {"native": "whole", "zero 1": "whole", "zero 2": "whole", "tied": "whole tied"}


@pytest.mark.parametrize("name", by_day(LIKE, ["native"]))
def test_trains_as_the_whole_model(outcomes: Trained, name: str) -> None:
    whole = first(outcomes, LIKE[name]).losses
    assert whole[-1] < whole[0]
    assert first(outcomes, name).losses == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", by_day(["none", "lossless"], ["lossless"]))
def test_lossless_is_native(outcomes: Trained, name: str) -> None:
    assert first(outcomes, name).losses == first(outcomes, "native").losses


@pytest.mark.nightly
def test_native_is_counted(outcomes: Trained) -> None:
    for outcome in outcomes["none"]:
        assert set(outcome.ledger) == set(KINDS)
        assert all(m == n > 0 and raw == sent > 0 for m, n, raw, sent in outcome.ledger.values())


def test_eight_bits_train_and_are_counted(outcomes: Trained) -> None:
    found = first(outcomes, "eight")
    assert found.losses != first(outcomes, "native").losses
    assert found.losses == pytest.approx(first(outcomes, "native").losses, rel=5e-3)
    for outcome in outcomes["eight"]:
        assert set(outcome.ledger) == set(KINDS)
        for kind, (messages, native, raw, sent) in outcome.ledger.items():
            assert 0 < native < messages, kind  # statistics and vectors stay exact
            assert sent < 0.5 * raw, kind
    for rank, outcome in enumerate(outcomes["eight"]):  # ranks hold different shards
        assert all(name.endswith(f"#tp{rank}") for name in outcome.names) is bool(rank)


def test_resumed_run_is_the_unbroken_one(outcomes: Trained) -> None:
    native = first(outcomes, "native").losses  # which saves
    assert first(outcomes, "resumed").losses == native[2:]


@pytest.mark.nightly
def test_weights_go_to_the_plain_model_and_back(outcomes: Trained) -> None:
    for saves in ("whole", "zero 2"):
        first(outcomes, saves)
    there, back = first(outcomes, "from plain").losses, first(outcomes, "from meshed").losses
    again = first(outcomes, "without layers").losses
    assert there == pytest.approx(again, rel=1e-6) and back == pytest.approx(again, rel=1e-4)
    assert again[0] < first(outcomes, "whole").losses[0]


@pytest.mark.nightly
def test_replicas_of_a_mesh_reduce_their_gradients() -> None:
    """Eight ranks: two meshes, and data parallel with error feedback between them."""
    feedback = {"dp": {"codec": "blockint", "bits": 8, "error_feedback": True}, **EIGHT}
    jobs = [Job(tp2d=1, steps=3), Job(steps=3, stage=1), Job(steps=3, stage=1, block=feedback)]
    ranks = run_ranks(8, run, jobs, timeout=300.0)
    for whole, native, encoded in ranks:
        assert native.losses == pytest.approx(whole.losses, rel=1e-5)
        assert encoded.losses == pytest.approx(whole.losses, rel=1e-2)
        assert encoded.losses != native.losses
