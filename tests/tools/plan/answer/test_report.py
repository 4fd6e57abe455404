"""Table, reasons and picture of plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridcomp.config.memory import size
from hybridcomp.tools.plan.answer import picture
from hybridcomp.tools.plan.answer.report import answer, duration, reasons, ruled_out, table
from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.plan import MEMORY_KINDS
from hybridcomp.tools.plan.request import Found
from tests.tools.plan.answer.made import CLUSTER, plan, prediction

SLOW = plan(
    Layout(data=4, zero_stage=1),
    prediction(0.8, exposed={"dp": 0.5}, bubble_seconds=0.0, nbytes={"dp": 9e6}),
)


def test_a_row_for_each_plan_in_order() -> None:
    head, line, first, second = table([plan(), SLOW])
    assert head.count("|") == line.count("|") == first.count("|") == second.count("|")
    assert "| 500 ms | 475 ms to 550 ms | 8,192 | 500 MB | dp 1 MB, pp 2 MB | 42% |" in first
    assert "pp2 dp2 zero1 mb2x8" in first
    assert "dp blockint(bits=4) feedback; pp forward blockint(bits=8), backward expcode()" in first
    assert second.startswith("| 2 |")


def test_reasons_name_the_parts_that_differ_largest_first_and_the_price() -> None:
    found = reasons(plan(), SLOW)
    assert found[0] == "Its step is 300 ms (60.0%) shorter."
    assert found[1] == (
        "Messages of dp lengthen its step by 100 ms (1 MB sent), the second's by 500 ms (9 MB)."
    )
    assert any("wait for the pipeline for 50 ms, the second's for 0 ms" in text for text in found)
    assert not any("encode" in text for text in found), "equal parts are no reason"


def test_equal_steps_are_not_called_a_win() -> None:
    found = reasons(plan(), plan(told=prediction(0.5005)))
    assert found == [
        "Steps are equally long within 0.5%; the first plan needs 500 MB a rank, the second 500 MB."
    ]


def test_overlapping_intervals_are_said() -> None:
    assert any("overlap" in text for text in reasons(plan(), plan(told=prediction(0.52))))
    assert not any("overlap" in text for text in reasons(plan(), SLOW))


def test_the_whole_answer() -> None:
    text = "\n".join(
        answer(Found((plan(), SLOW), 12, 5, refused={"memory": 3}), CLUSTER)
    )  # fmt: skip
    assert "memory of the fullest rank: weights 400 MB, activations 100 MB, host 1 GB" in text
    assert "(its device has 1 GB)" in text
    assert "dp: 1 MB a step instead of 8 MB; 100 ms seen, 100 ms behind compute" in text
    assert "12 looked at, 5 simulated" in text and "\n  3: memory" in text
    assert "Why" not in "\n".join(answer(Found((plan(),)), CLUSTER)), "nothing to compare with"


def test_memory_that_nobody_knows_is_no_device_without() -> None:
    ranks = tuple(replace(rank, nbytes=0) for rank in CLUSTER.ranks)
    text = "\n".join(answer(Found((plan(),)), replace(CLUSTER, ranks=ranks)))
    assert "(nobody knows what its device has)" in text


def test_every_kind_of_memory_has_a_colour() -> None:
    assert len(set(picture.COLOURS)) >= len(set(MEMORY_KINDS) - {"host"})


def test_figures_for_people() -> None:
    assert [size(n) for n in (0, 999, 1e3, 2.5e6, 1.234e9, 5e12)] == [
        "0 B", "999 B", "1 kB", "2.5 MB", "1.23 GB", "5 TB",
    ]  # fmt: skip
    assert [duration(s) for s in (0.0005, 0.25, 2.0)] == ["0.5 ms", "250 ms", "2 s"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    native = plan()
    native = type(native)(**{**vars(native), "choices": Choices.of({})})
    path = tmp_path / "deep" / "plan.png"
    picture.draw([plan(), SLOW, native], 9e8, path, "tiny on 4 ranks")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert picture.share(plan()) == pytest.approx(3 / 12)


def test_reasons_that_differ_in_a_number_are_one_line_most_layouts_first() -> None:
    refused = {
        "the model cannot be cut so: tensor 12 does not divide 64 heads": 2,
        "more stages than layers": 4,
        "the model cannot be cut so: tensor 3 does not divide 64 heads": 3,
    }
    assert list(ruled_out(refused)) == [
        "5: the model cannot be cut so: tensor 3 or 12 does not divide 64 heads",
        "4: more stages than layers",
    ]
