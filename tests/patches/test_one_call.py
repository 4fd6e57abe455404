"""Seams pass messages to their channel: they choose no codec and count no bytes."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.paths import ROOT

#: methods of a channel that ``run`` is made of
PARTS = {"codec", "handling", "record", "recorded"}
#: copies between device and host are not messages of a group (see ``channels.offload.host_copies``)
COPIES = {"offload12.py", "offload3.py", "offload_sums.py", "offload_accumulation.py"}


def _calls(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }


def test_no_seam_does_what_the_channel_does() -> None:
    found = {
        path.name: sorted(_calls(path) & PARTS)
        for path in (ROOT / "patches").rglob("*.py")
        if _calls(path) & PARTS
    }
    found.pop("tied_weights.py", None)  # records upstream's broadcast, which is not ours
    found.pop("ignored_tables.py", None)  # sums that torch leaves out: there is no native call
    found.pop("frozen.py", None)  # of ZeRO 3 and FSDP2: record a gather that sent nothing
    assert not found


def test_only_copies_to_the_host_are_given_their_native_bytes() -> None:
    files = [
        path for path in (ROOT / "patches").rglob("*.py") if "raw_nbytes" in path.read_text("utf-8")
    ]
    assert {path.name for path in files} <= COPIES


def test_no_other_seam_copies_by_the_engines_host_moves() -> None:
    """Those that do pass every copy to them and do not encode."""
    parts = {"to_host", "to_device", "pack", "unpack", "kept", "copy_codec"}
    found = {
        path.name
        for path in (ROOT / "patches").rglob("*.py")
        if _calls(path) & parts and "channels.host" in path.read_text("utf-8")
    }
    assert found == COPIES
    for name in COPIES:
        path = ROOT / "patches" / "ds" / "offload" / name
        assert not _calls(path) & {"encode", "decode", "decode_add"}
