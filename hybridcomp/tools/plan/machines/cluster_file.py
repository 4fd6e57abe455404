"""Read, check and write the file of a cluster, measured or described by hand.

A measured file has ``"kind": "measured"`` and a row for everything that was timed. A description
has ``"kind": "described"`` and a few figures, as data sheets have them (``Description``);
everything that follows from them is marked as assumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hybridcomp.errors import ConfigError
from hybridcomp.escaping import parsed_json
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.described import Description
from hybridcomp.tools.plan.machines.estimates import Estimate

#: version of the file; other versions are refused
VERSION = 1
MEASURED, DESCRIBED = "measured", "described"
#: file that `hybridcomp measure` writes and the planner reads by default, in the working folder
DEFAULT = Path("cluster.json")
AGAIN = "write it with `hybridcomp measure`, or describe the cluster as docs/planning.md shows"
#: replacements for messages of pydantic that use terms of Python
SAID = {"unexpected_keyword_argument": "there is no such field"}
_MEASURED: TypeAdapter[Cluster] = TypeAdapter(Cluster)
_DESCRIBED: TypeAdapter[Description] = TypeAdapter(Description)


def read(path: str | Path) -> Cluster:
    """Read the cluster of a file, measured or described.

    Raises ConfigError, one sentence that names the key, where the file cannot be used.
    """
    return parse(document(path, AGAIN), str(path))


def document(path: str | Path, todo: str) -> object:
    """Parse the JSON of a file. Raises ConfigError, which ends with ``todo``."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(str(path), "no such file", todo) from None
    except (OSError, ValueError) as error:  # no text, or a name that no file can have
        raise ConfigError(str(path), f"{type(error).__name__}: {error}", todo) from error
    try:
        return parsed_json(text)
    except ValueError as error:
        raise ConfigError(str(path), str(error), f"expected JSON; {todo}") from error


def parse(found: object, name: str = "cluster") -> Cluster:
    """Check parsed JSON and build its cluster; errors show ``name``. Raises ConfigError."""
    if not isinstance(found, dict):
        raise ConfigError(name, type(found).__name__, f"expected an object; {AGAIN}")
    rest = dict(found)
    version, kind = rest.pop("version", None), rest.pop("kind", None)
    if version != VERSION or isinstance(version, bool):  # JSON's true is 1 to Python
        raise ConfigError(
            f"{name}: version", version, f"this hybridcomp reads version {VERSION}; {AGAIN}"
        )
    if kind not in (MEASURED, DESCRIBED):
        raise ConfigError(f"{name}: kind", kind, f'expected "{MEASURED}" or "{DESCRIBED}"')
    try:
        if kind == DESCRIBED:
            return _DESCRIBED.validate_python(rest).cluster()
        cluster = _MEASURED.validate_python(rest)
    except ValidationError as error:
        raise config_error(error, name) from error
    if not cluster.ranks:
        raise ConfigError(f"{name}: ranks", [], f"expected at least one rank; {AGAIN}")
    if bool(cluster.nodes_per_site) != bool(cluster.uplinks):
        todo = "sites need nodes_per_site and uplinks, sends between two of them; write both"
        raise ConfigError(f"{name}: nodes_per_site", cluster.nodes_per_site, todo)
    _check_rates(cluster, name)
    strange = next((row for row in cluster.kernels if row.rank >= cluster.world_size), None)
    if strange is not None:
        todo = f"the file has ranks 0 to {cluster.world_size - 1}"
        raise ConfigError(f"{name}: kernels: rank", strange.rank, todo)
    return cluster


def _check_rates(cluster: Cluster, name: str) -> None:
    """Raise ConfigError for a rank with 0 FLOP/s, whose seconds would be infinite."""
    for number, rank in enumerate(cluster.ranks):
        for dtype, rate in rank.flops.items():
            if not rate.value > 0:
                todo = "expected FLOP/s above 0, or no figure of this dtype"
                raise ConfigError(f"{name}: ranks[{number}].flops.{dtype}", list(rate[:3]), todo)


def write(cluster: Cluster, path: str | Path) -> None:
    """Write a measured cluster, one row a line, so that two files can be compared.

    Raises OSError, and then leaves an existing file at ``path`` as it was and creates none.
    """
    whole = to_json(cluster)
    parts = []
    for key, value in whole.items():
        if isinstance(value, list):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            parts.append(f'"{key}": [\n  {rows}\n ]' if rows else f'"{key}": []')
        else:
            parts.append(f'"{key}": {json.dumps(value)}')
    part = Path(f"{path}.part")
    try:
        part.write_text("{\n " + ",\n ".join(parts) + "\n}\n", encoding="utf-8")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def to_json(cluster: Cluster) -> dict[str, Any]:
    """Convert to the JSON that ``parse`` reads; figures have five digits."""
    rows = {key: _plain(value) for key, value in asdict(cluster).items() if value is not None}
    return {"version": VERSION, "kind": MEASURED, **rows}


def schema() -> dict[str, Any]:
    """Return the JSON schema of both forms."""
    parts = []
    for kind, adapter in ((MEASURED, _MEASURED), (DESCRIBED, _DESCRIBED)):
        found = adapter.json_schema(ref_template=f"#/$defs/{kind}/{{model}}")
        definitions = found.pop("$defs", {})
        found["properties"].update(version={"const": VERSION}, kind={"const": kind})
        found["required"] = ["version", "kind", *found.get("required", ())]
        parts.append((kind, found, definitions))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A cluster of hybridcomp",
        "oneOf": [found for _, found, _ in parts],
        "$defs": {kind: definitions for kind, _, definitions in parts},
    }


def _plain(value: Any) -> Any:
    """Convert to JSON types: figures with five digits, without empty fields."""
    if isinstance(value, Estimate):
        digits = [float(f"{one:.5g}") for one in value[:3]]
        return [*digits, True] if value.assumed else digits
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items() if one not in (None, "")}
    return [_plain(one) for one in value] if isinstance(value, (tuple, list)) else value


def config_error(error: ValidationError, name: str) -> ConfigError:
    """Turn the first error of pydantic about the file ``name`` into a ConfigError, one sentence."""
    first = error.errors()[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    where = f"{name}: {path[1:]}" if path else name
    more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "missing":
        return ConfigError(where, "nothing", f"the field is needed{more}")
    if first["type"] == "dataclass_type":
        return ConfigError(where, type(first["input"]).__name__, f"expected an object{more}")
    found = first["input"] if path else "fields that do not fit together"
    said = SAID.get(first["type"], first["msg"].removeprefix("Value error, "))
    return ConfigError(where, found, said + more)
