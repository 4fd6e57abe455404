"""The JSON schema is current and describes every field."""

from __future__ import annotations

import json

from hybridcomp.config import schema
from hybridcomp.dimensions import DIMENSIONS
from tests.paths import CONFIGS


def test_schema_is_current() -> None:
    committed = json.loads((CONFIGS / "compression.schema.json").read_text())
    assert committed == schema(), "run scripts/make_docs.py"


def test_schema_describes_every_field() -> None:
    definitions = schema()["$defs"]
    properties = [p for d in definitions.values() for p in d.get("properties", {}).items()]
    assert len(properties) > 20
    assert [name for name, value in properties if "description" not in value] == []
    dimensions = definitions["CompressionConfig"]["properties"]
    for name in DIMENSIONS:
        shorthand, reference = dimensions[name]["anyOf"]
        assert "blockint" in shorthand["enum"]
        assert reference["$ref"].removeprefix("#/$defs/") in definitions
