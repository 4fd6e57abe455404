"""Plans: a layout, its choices and their block, with the predicted cost of a step."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hybridcomp.config.error_messages import show
from hybridcomp.config.planned import FORMAT, VERSION
from hybridcomp.dimensions import Key
from hybridcomp.errors import HybridcompError
from hybridcomp.escaping import one_line, parsed_json
from hybridcomp.tools.plan.choices import Choice, Choices
from hybridcomp.tools.plan.layout import Layout

#: kinds of a rank's memory
MEMORY_KINDS = (
    "weights", "gradients", "optimizer", "gathered", "frozen", "copy", "sums", "activations",
    "residuals", "references", "payloads", "keys", "host",
)  # fmt: skip


@dataclass(frozen=True)
class Span:
    """One task of the predicted step: its name, its resource, its start and end (s)."""

    name: str
    resource: str
    start: float
    end: float


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds, memory and bytes of one optimizer step.

    seconds, low, high: of a step, with the interval that the measurements' spread gives.
    tokens_per_second: of the whole job. compute_seconds, bubble_seconds, codec_seconds: of the
    busiest rank's device: computing, waiting for the pipeline, encoding and decoding.
    memory: bytes by kind (``MEMORY_KINDS``) of the rank that needs most; ``host`` is not on the
    device. memory_by_stage: device bytes of a rank of every stage.
    nbytes, native_nbytes: bytes by dimension that the rank with the most traffic sends in a step,
    encoded, and natively. exposed, hidden: seconds of messages by dimension that lengthen the step,
    and that compute hides.
    job_nbytes, job_native_nbytes, job_codec_seconds: by dimension, of all ranks together, as the
    ledger counts them (``wire_MB``, ``raw_MB``, codec seconds).
    between_nbytes, between_native_nbytes: the parts of ``nbytes`` and ``native_nbytes`` that cross
    nodes, averaged over the ranks of a group.
    spans: the timeline, by stage.
    """

    seconds: float
    low: float
    high: float
    tokens_per_second: float
    compute_seconds: float
    bubble_seconds: float
    codec_seconds: float
    memory: Mapping[str, float]
    memory_by_stage: tuple[float, ...]
    nbytes: Mapping[str, float]
    native_nbytes: Mapping[str, float]
    exposed: Mapping[str, float]
    hidden: Mapping[str, float]
    job_nbytes: Mapping[str, float] = field(default_factory=dict)
    job_native_nbytes: Mapping[str, float] = field(default_factory=dict)
    job_codec_seconds: Mapping[str, float] = field(default_factory=dict)
    between_nbytes: Mapping[str, float] = field(default_factory=dict)
    between_native_nbytes: Mapping[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def device_nbytes(self) -> float:
        """Bytes of device memory that the fullest rank needs."""
        return sum(value for kind, value in self.memory.items() if kind != "host")

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON types."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        found["memory_by_stage"] = list(self.memory_by_stage)
        found["spans"] = [asdict(span) for span in self.spans]
        return {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in found.items()
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Prediction:
        """Read a prediction of ``to_json``. Raises TypeError for a value that is no number."""
        values = dict(data)
        for one in fields(cls):
            if one.name in values and one.name != "spans":
                _check(one.name, str(one.type), values[one.name])
        values["memory_by_stage"] = tuple(values["memory_by_stage"])
        values["spans"] = tuple(Span(**span) for span in values["spans"])
        return cls(**values)


@dataclass(frozen=True)
class Plan:
    """One answer of the search.

    model, cluster, budget: names of what the plan is for. length: tokens of one sample. dtype: of
    weights and messages, ``"bf16"``, ``"fp16"`` or ``"fp32"``. engine: runs the plan,
    ``"deepspeed"``, ``"megatron"``, ``"neox"`` or ``"fsdp2"``. blocks: index of the model's first
    block, and the index after its last one; None: unknown.
    machines: node and device of every measured rank, a negative node where it is unknown; empty for
    a cluster described by hand. frozen: share of the parameters that do not train.
    """

    layout: Layout
    choices: Choices
    prediction: Prediction
    model: str
    cluster: str
    budget: str
    length: int
    dtype: str
    engine: str
    blocks: tuple[int, int] | None = None
    machines: tuple[tuple[int, str], ...] = ()
    frozen: float = 0.0

    @property
    def repeated(self) -> range:
        """The layers that are blocks; without ``blocks``, all but the first and the last layer."""
        return range(*(self.blocks or (1, sum(self.layout.cuts) - 1)))

    @property
    def block(self) -> dict[str, Any]:
        """The ``"compression"`` block of the choices.

        Sums of encoded gradients stay on the device, as the memory estimate assumes.
        """
        found = self.choices.block(hierarchy=self.layout.hierarchy)
        encoded = not self.choices["offload", "backward"].native
        if self.layout.offload and self.layout.accumulation > 1 and encoded:
            found["offload"] = {**found["offload"], "sums": "device"}
        if self.layout.sums_ours:
            found["dp"] = {**found["dp"], "accumulate": "node"}
        if self.layout.copy != "native":
            found.pop("preset", None)
            found["zero"] = {"secondary": "exact" if self.layout.copy == "exact" else {"bits": 8}}
        if self.layout.frozen != "gathered":
            found.pop("preset", None)
            found["zero"] = {**found.get("zero", {}), "frozen": self.layout.frozen}
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the plan with its block; ``from_json`` and the preset ``planned`` read it."""
        return {
            FORMAT: VERSION,
            **{name: getattr(self, name) for name in _NAMES},
            **({} if self.blocks is None else {"blocks": list(self.blocks)}),
            **({"frozen": self.frozen} if self.frozen else {}),
            "layout": self.layout.to_json(),
            "machines": [list(one) for one in self.machines],
            "block": self.block,
            "choices": [[*key, choice.to_json()] for key, choice in self.choices],
            "prediction": self.prediction.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Read a plan of ``to_json``. Raises HybridcompError for other versions, missing keys."""
        if not isinstance(data, Mapping):
            raise HybridcompError(
                f"plan: {type(data).__name__}; expected what hybridcomp plan wrote"
            )
        if data.get(FORMAT) != VERSION:
            raise HybridcompError(
                f"plan: version {data.get(FORMAT)!r}; expected {VERSION}; run hybridcomp plan "
                "of this version again"
            )
        try:
            chosen: dict[Key, Choice] = {
                (name, way): Choice.of(written) for name, way, written in data["choices"]
            }
            _check("length", "float", data["length"])
            return cls(
                Layout.from_json(data["layout"]),
                Choices.of(chosen),
                Prediction.from_json(data["prediction"]),
                **{name: data[name] for name in _NAMES},
                blocks=tuple(data["blocks"]) if "blocks" in data else None,
                machines=tuple((node, device) for node, device in data.get("machines", ())),
                frozen=_share(data.get("frozen", 0.0)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            said = one_line(f"{type(error).__name__}: {error}")
            raise HybridcompError(f"plan: {said}; expected what hybridcomp plan wrote") from None

    def write(self, path: Path) -> None:
        """Write ``plan.json``."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read ``plan.json``. Raises HybridcompError, OSError."""
        try:
            data = parsed_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise HybridcompError(f"{path}: {error}; expected what hybridcomp plan wrote") from None
        try:
            return cls.from_json(data)
        except HybridcompError as error:
            raise HybridcompError(f"{path}: {error}") from None


def _check(name: str, annotation: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a number, or several numbers, as annotated."""
    several = Mapping if annotation.startswith("Mapping") else list | tuple
    if annotation != "float" and not isinstance(value, several):
        raise TypeError(f"{name}: expected several numbers, found {type(value).__name__}")
    single = [value] if annotation == "float" else value
    for one in single.values() if isinstance(single, Mapping) else single:
        number = isinstance(one, int | float) and not isinstance(one, bool)
        if not (number and abs(one) <= sys.float_info.max):
            raise TypeError(f"{name}: expected a number, found {show(one)}")


def _share(value: Any) -> float:
    """Return a written share of parameters. Raises TypeError or ValueError for anything else."""
    _check("frozen", "float", value)
    if not 0 <= value < 1:
        raise ValueError(f"frozen: expected a share from 0 to below 1, found {show(value)}")
    return float(value)


_NAMES = ("model", "cluster", "budget", "length", "dtype", "engine")
