"""The JSON schema describes every field."""

from __future__ import annotations

from hybridcomp.config import schema
from hybridcomp.dimensions import DIMENSIONS


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
