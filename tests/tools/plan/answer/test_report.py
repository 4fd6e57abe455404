"""Table, reasons and picture of plans."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.channels.accounting.memory import size
from hybridcomp.dimensions import KEYS
from hybridcomp.tools.plan.answer import picture
from hybridcomp.tools.plan.answer.report import answer, duration, reasons, ruled_out, table
from hybridcomp.tools.plan.choices import Choice, Choices
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.plan import MEMORY_KINDS
from hybridcomp.tools.plan.request import Found
from tests.tools.plan.answer.made import CLUSTER, plan, prediction

SLOW = plan(
    Layout(data=4, zero_stage=1),
    prediction(0.8, exposed={"dp": 0.5}, bubble_seconds=0.0, nbytes={"dp": 9e6}),
)


def test_a_row_for_each_plan_in_order() -> None:
    head, line, first, second, encoded = table([plan(), SLOW])
    assert head.index("layout") == first.index("pp2 dp2 zero1 mb2x8") == second.index("dp4 zero1")
    assert set(line) == {"-"} and "|" not in head + first
    cells = re.split(r" {2,}", first.strip())
    assert cells[:7] == ["1", "500 ms", "475 ms to 550 ms", "8,192", "500 MB", "3 MB", "-"]
    assert cells[7] == "42%"
    assert encoded == (
        "encoded in 1, 2: dp blockint(bits=4) feedback; "
        "pp forward blockint(bits=8), backward expcode()"
    )
    assert second.strip().startswith("2 ")


def test_the_first_layout_without_compression_has_a_row() -> None:
    crossing: dict[str, Any] = {
        "between_nbytes": {"dp": 1e6}, "between_native_nbytes": {"dp": 8e6},
    }  # fmt: skip
    native = plan(
        told=prediction(1.0, between_nbytes={"dp": 8e6}, between_native_nbytes={"dp": 8e6})
    )
    native = replace(native, choices=Choices.of({}))
    *_, first, last, encoded, nothing = table([plan(told=prediction(**crossing))], native)
    assert last.startswith("1 native") and "8 MB" in last and encoded.startswith("encoded in 1: ")
    assert nothing == "encoded in 1 native: nothing"
    assert "1 MB" in first
    text = "\n".join(answer(Found((plan(),), native=native), CLUSTER))
    assert "Natively the first plan's layout would take 1 s a step" in text
    assert "compression makes it 2.00 times as fast" in text


def test_the_table_fits_a_terminal() -> None:
    wide = Layout(stages=4, data=16, tensor=8, virtual=2, zero_stage=1, micro_batch=2,
                  cuts=(4,) * 8, accumulation=64)  # fmt: skip
    every = dict.fromkeys(KEYS, Choice.of({"codec": "blockint", "bits": 4}))
    told = prediction(123.0, between_nbytes={"dp": 1e9}, between_native_nbytes={"dp": 8e9})
    made = replace(plan(wide, told), choices=Choices.of(every))
    lines = table([made, replace(made, layout=replace(wide, zero_stage=0))], made)
    assert max(map(len, lines)) <= 120 and len(lines) > 6, lines


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
    assert found == ["Their steps are equally long."]
    heavier = replace(prediction(0.5005), memory={"weights": 7e8})
    assert reasons(plan(), plan(told=heavier)) == [
        "Their steps are equally long; it needs 500 MB a rank, the second 700 MB."
    ]


def test_overlapping_intervals_are_said() -> None:
    assert any("overlap" in text for text in reasons(plan(), plan(told=prediction(0.52))))
    assert not any("overlap" in text for text in reasons(plan(), SLOW))


def test_the_whole_answer() -> None:
    told = prediction(between_nbytes={"dp": 2e6}, between_native_nbytes={"dp": 7e6})
    found = Found((plan(told=told), SLOW), 12, 5, refused={"memory": 3})
    text = "\n".join(answer(found, CLUSTER))
    assert "memory of the fullest rank: weights 400 MB, activations 100 MB, host 1 GB" in text
    assert "(its device has 1 GB)" in text
    crosses = "dp: 1 MB a step instead of 8 MB, between nodes 2 MB instead of 7 MB; 100 ms seen, "
    assert crosses + "100 ms behind compute" in text
    assert "between nodes in all: 2 MB a step of a rank instead of 7 MB" in text
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
    picture.draw([plan(), SLOW], 9e8, path, "tiny on 4 ranks", native)
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert picture.between(plan()) == pytest.approx(3.0), "all that it sends: no nodes"
    crossing = prediction(between_nbytes={"dp": 1e6}, between_native_nbytes={"dp": 8e6})
    assert picture.between(plan(told=crossing)) == pytest.approx(1.0)


def test_plans_that_lie_together_share_a_label() -> None:
    plans = [*[plan()] * 3, SLOW, plan()]
    found = picture.labels(plans, (10.0, 10_000.0))
    assert list(found.values()) == ["1-3, 5", "4"]


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


def test_the_links_are_drawn_with_the_bytes_of_a_node() -> None:
    """Four ranks on two nodes: half of all ranks' bytes belong to a node, and some leave it."""
    pytest.importorskip("jinja2")
    told = prediction(
        job_nbytes={"dp": 4e6, "offload": 9e9}, job_native_nbytes={"dp": 32e6, "offload": 9e9},
        between_nbytes={"dp": 0.5e6}, between_native_nbytes={"dp": 3e6},
    )  # fmt: skip
    svg = picture.draw_links(plan(told=told), nodes=2, ranks=4)
    shown = re.findall(r">([\d.,]+ [MG]B)</text>", svg)
    assert shown == ["10 MB", "1 MB", "6 MB", "1 MB"]  # inside natively, encoded, then between
    assert "2 ranks" in svg and "node 2 of 2" in svg
