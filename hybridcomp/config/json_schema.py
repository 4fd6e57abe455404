"""Describe the block as a JSON schema, for editors and readers without Python."""

from __future__ import annotations

from typing import Any

from hybridcomp.config.block import BLOCK, CompressionConfig
from hybridcomp.config.codec_settings import CodecSettings, codec_names
from hybridcomp.config.dimension_fields import MODELS
from hybridcomp.config.directional import DirectionConfig

_MODELS: tuple[type[CodecSettings], ...] = (*MODELS.values(), DirectionConfig)
#: models that may also be written as the bare name of a codec -> their ``under``
SHORTHAND = {model.__name__: model.under for model in _MODELS}


def schema() -> dict[str, Any]:
    """Return the JSON schema of a ds_config.json; it describes only the block."""
    block = _with_shorthand(CompressionConfig.model_json_schema())
    definitions = block.pop("$defs")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ds_config.json with a compression block",
        "type": "object",
        "properties": {BLOCK: {"$ref": "#/$defs/CompressionConfig"}},
        "$defs": {**definitions, "CompressionConfig": block},
    }


def _with_shorthand(node: Any) -> Any:
    """Add "or the name of a codec" in ``node`` wherever an object with a codec may stand."""
    if isinstance(node, list):
        return [_with_shorthand(part) for part in node]
    if not isinstance(node, dict):
        return node
    described = {key: _with_shorthand(part) for key, part in node.items() if key != "allOf"}
    for part in node.get("allOf", ()):  # pydantic before 2.10 wraps references
        described.update(part)
    name = str(described.get("$ref", "")).removeprefix("#/$defs/")
    if name in SHORTHAND:
        reference = {"$ref": described.pop("$ref")}
        names = list(codec_names(SHORTHAND[name]))
        described["anyOf"] = [{"type": "string", "enum": names}, reference]
    return described
