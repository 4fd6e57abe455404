"""Cluster files: round trip, and one-sentence errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.errors import ConfigError
from hybridcomp.tools.plan.machines import cluster_file
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.estimates import Estimate
from hybridcomp.tools.plan.machines.rows import Coding, Copy, Encoded, Kernel, Rank, Timing

SECONDS = Estimate(0.2, 0.1, 0.3)
WHOLE = Cluster(
    (Rank(0, "CPU", 1 << 30, {"fp32": Estimate(1e9, 9e8, 2e9)}),),
    (Timing("send", 2, 1, 4096, SECONDS, "compute", Estimate(0.5, 0.4, 0.6)),),
    (Encoded("all_reduce", "expcode()", "bf16", 2, 1, 100, 80, SECONDS),),
    (Coding("expcode()", "bf16", "decode_add", 100, SECONDS, "alone", False),),
    (Copy("to_host", 100, SECONDS),),
    (Kernel(0, "block_forward", "fp32", 123456789.0, SECONDS, "width 8", 77),),
    made={"torch": "2.13"},
    drives=(Copy("to_drive", 100, SECONDS),),
    host_nbytes=1 << 33,
)
DESCRIBED: dict[str, Any] = {
    "version": 1, "kind": "described", "nodes": 2, "ranks_per_node": 2, "device": "V100",
    "memory_gb": 16, "tflops": {"fp16": 37.5}, "memory_gbytes_per_second": 800,
    "inside": {"gbytes_per_second": 40, "latency_us": 10}, "between": {"gbytes_per_second": 20},
    "codecs": {"blockint": {"gbytes_per_second": 250}}, "host": {"gbytes_per_second": 12},
    "speeds": {"3": 0.5},
}  # fmt: skip


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    cluster_file.write(WHOLE, path)
    assert cluster_file.read(path) == WHOLE
    assert len(path.read_text().splitlines()) > 10  # one row per line


def test_a_description_becomes_a_cluster_of_assumed_figures(tmp_path: Path) -> None:
    cluster = cluster_file.parse(DESCRIBED)
    assert [rank.node for rank in cluster.ranks] == [0, 0, 1, 1]
    assert cluster.speeds == (1.0, 1.0, 1.0, 0.5)
    assert cluster.ranks[0].nbytes == 16_000_000_000
    near, far = (cluster.seconds("send", 20e6, 2, nodes) for nodes in (1, 2))
    assert near.value == pytest.approx(10e-6 + 20e6 / 40e9)
    assert far.value == pytest.approx(10e-6 + 20e6 / 20e9)
    assert far.assumed
    assert (far.low, far.high) == pytest.approx((0.9 * far.value, 1.1 * far.value))
    assert cluster.kernel("block_forward", "fp16", 37.5e12, 3).value == pytest.approx(2.0)
    assert cluster.kernel("elementwise", "bf16", 8e9).value == pytest.approx(0.01)
    assert cluster.coding("blockint(bits=4)", "bf16", 1e9, "encode").value == pytest.approx(
        20e-6 + 2 / 250
    )
    assert cluster.copy("to_device", 12e9).value == pytest.approx(1.0, rel=1e-4)
    drive = {"drive": {"gbytes_per_second": 4, "latency_us": 0}, "host_memory_gb": 64}
    more = cluster_file.parse({**DESCRIBED, **drive})
    assert more.copy("from_drive", 2e9).value == pytest.approx(1.0)  # two ranks share it
    assert (more.host_nbytes, cluster.host_nbytes) == (64_000_000_000, 0)
    path = tmp_path / "cluster.json"
    cluster_file.write(cluster, path)
    again = cluster_file.read(path)
    assert again.by_hand
    assert again.seconds("send", 20e6, 2, 2).assumed


def changed(**fields: object) -> dict[str, Any]:
    return {**DESCRIBED, **fields}


def measured(**fields: object) -> dict[str, Any]:
    return {**cluster_file.to_json(WHOLE), **fields}


ROW = {"operation": "send", "ranks": 2, "nodes": 1, "nbytes": 4, "seconds": [1, 1, 1]}


@pytest.mark.parametrize(("content", "said"), [
    (measured(version=2), "c: version: found 2; this hybridcomp reads version 1"),
    (changed(kind="guessed"), "c: kind: found 'guessed'"),
    ([], "c: found 'list'; expected an object"),
    ({**DESCRIBED, "tflops": None}, "c: tflops: found None"),
    ({k: v for k, v in DESCRIBED.items() if k != "device"}, "c: device: found 'nothing'"),
    (changed(memory_gb=-1), "c: memory_gb: found -1"),
    (changed(colour="red"), "c: colour: found 'red'; there is no such field"),
    (changed(between=None), 'several nodes need the link "between" them'),
    (changed(nodes_per_site=2), '"nodes_per_site" and the "uplink" of a site need each other'),
    (
        changed(nodes_per_site=3, uplink={"gbytes_per_second": 1}),
        "nodes are no multiple of 3 a site",
    ),
    (measured(nodes_per_site=2), "c: nodes_per_site: found 2; sites need nodes_per_site and upl"),
    (changed(speeds={"4": 0.5}), '"speeds" names rank 4; there are 4 ranks'),
    (changed(codecs={"blokint": {"gbytes_per_second": 1}}), "\"codecs\" has 'blokint'; expected s"),
    (changed(host_codecs={"bits=4": {"gbytes_per_second": 1}}), "\"host_codecs\" has 'bits=4'; e"),
    (changed(tflops={"bfloat16": 100}), "\"tflops\" has 'bfloat16'; expected some of bf16, fp16"),
    (measured(ranks=[]), "c: ranks: found []"),
    (measured(links=[{**ROW, "seconds": [-1, -2, 3]}]), "c: links[0].seconds[0]: found -1"),
    (measured(links=[{**ROW, "seconds": [1, 2, 3]}]), "low <= value <= high"),
    (measured(links=[{**ROW, "operation": "gossip"}]), "c: links[0].operation: found 'gossip'"),
    (measured(links=[{**ROW, "seconds": [1, 1, float("nan")]}]), "c: links[0].seconds[2]"),
    (measured(kernels=[{"rank": 9, "kind": "product", "dtype": "fp32", "size": 1,
                        "seconds": [1, 1, 1]}]), "kernels: rank: found 9; the file has ranks 0"),
])  # fmt: skip
def test_bad_files_are_told_in_one_sentence(content: object, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        cluster_file.parse(content, "c")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file.*hybridcomp measure"):
        cluster_file.read(tmp_path / "none.json")
    path = tmp_path / "bad.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="expected JSON"):
        cluster_file.read(path)


def test_the_schema_knows_both_forms() -> None:
    schema = cluster_file.schema()
    one, two = schema["oneOf"]
    assert one["properties"]["kind"] == {"const": "measured"}
    assert {"nodes", "device", "version"} <= set(two["required"])
    text = json.dumps(schema)
    for kind, definitions in schema["$defs"].items():
        for name in definitions:
            assert f"#/$defs/{kind}/{name}" in text


def test_the_example_of_the_page_is_read() -> None:
    from tests.docs.pages import DOCS, fences

    (example,) = [f for f in fences("json") if f.page == DOCS / "planning.md" and
                  '"described"' in f.body]  # fmt: skip
    assert cluster_file.parse(json.loads(example.body)).world_size == 24
