"""Translate pydantic's list of errors to one line that names the key."""

from __future__ import annotations

import difflib
import json
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import ErrorDetails, PydanticCustomError

from hybridcomp.config import other_names
from hybridcomp.errors import ConfigError
from hybridcomp.escaping import one_line

Model = TypeVar("Model", bound=BaseModel)
#: maximum characters of a value in a message
WIDTH = 60

_EXPECTED = {
    "bool_type": "expected true or false",
    "int_type": "expected an integer",
    "int_from_float": "expected an integer",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "string_type": "expected a string",
    "model_type": "expected an object",
    "string_too_short": "expected a string that is not empty",
}

#: example for each key that takes an object. If the user wrote a bare string, an error suggests it
#: as ``jsonl`` or ``to`` of the object; a bare number as ``from``
_OBJECTS: Mapping[str, Mapping[str, Any]] = {
    "ledger": {"jsonl": "ledger.jsonl"},
    "publish": {"to": "runs/weights"},
    "pipeline": {"versions": 2},
    "memory": {"policy": "planned"},
    "ramp": {"from": 8, "steps": 1000},
    "outer": {"lr": 0.7, "momentum": 0.9},
    "generate": {"in_flight": 4},
}


class Shown(str):
    """Text that a message shows unquoted."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


#: shown for a missing value
NOTHING = Shown("nothing")


def problem(field: str, found: object, todo: str) -> PydanticCustomError:
    """Make an error for a validator to raise; ``field`` is relative to the validating model."""
    return PydanticCustomError(
        "hybridcomp", "{todo}", {"field": field, "found": found, "todo": todo}
    )


def expecting(todo: str) -> WrapValidator:
    """Report ``todo`` for any wrong value, where pydantic would describe each member of a union."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise problem("", value, todo) from None

    return WrapValidator(check)


def parsed(model: type[Model], found: object, key: str, *, below: bool = False) -> Model:
    """Parse an object in a union; errors name the wrong key in it, after ``key`` if ``below``."""
    try:
        return model.model_validate(found)
    except ValidationError as error:
        wrong = translate(error, model, key)
        where = wrong.key if below else wrong.key.removeprefix(f"{key}.")
        raise problem(where, wrong.found, wrong.todo) from None


def show(found: object) -> Shown:
    """Render ``found`` on one line as the user wrote it in JSON, at most ``WIDTH`` characters."""
    if isinstance(found, Shown):
        return found
    try:
        text = json.dumps(found)
    # also raised for integers of thousands of digits
    except (TypeError, ValueError, RecursionError):
        text = one_line(found, WIDTH) if not isinstance(found, int) else "a number without end"
    return Shown(text if len(text) <= WIDTH else f"{text[:WIDTH]}...")


def translate(error: ValidationError, model: type[BaseModel], root: str) -> ConfigError:
    """Return an error with the first problem in full and the keys of all further problems."""
    problems = [_one(detail, model, root) for detail in error.errors()]
    first = problems[0]
    others = list(dict.fromkeys(key for key, _, _ in problems[1:] if key != first[0]))
    more = f" (also wrong: {', '.join(others)})" if others else ""
    return ConfigError(first[0], show(first[1]), first[2] + more)


def _one(detail: ErrorDetails, model: type[BaseModel], root: str) -> tuple[str, object, str]:
    path = [str(part) for part in detail["loc"]]
    kind, value = detail["type"], detail["input"]
    if kind == "hybridcomp":
        context = detail["ctx"]
        parts = [root, *path, *([context["field"]] if context["field"] else [])]
        return ".".join(parts), context["found"], context["todo"]
    key = ".".join([root, *path])
    if kind == "extra_forbidden":
        return key, value, _unknown_key(path, model, root)
    if kind == "missing":
        return key, NOTHING, f"{path[-1]} is required; write it"
    if kind in _EXPECTED:
        return key, value, _EXPECTED[kind] + _instead(path[-1] if path else "", kind, value)
    return key, value, f"{detail['msg'].replace('Input should be', 'expected')}"


def _instead(name: str, kind: str, value: object) -> str:
    """Suggest a replacement for a value of the wrong type; "" if none is known."""
    if kind == "model_type" and name in _OBJECTS:
        example = dict(_OBJECTS[name])
        first = next(iter(example))
        if type(value) is type(example[first]) and value:
            example[first] = value
        return f"; write {json.dumps(example)}"
    if not isinstance(value, str):
        return ""
    ours = other_names.of_switch(value) if kind == "bool_type" else other_names.of_number(value)
    return f"; write {ours}, without quotes" if ours and kind != "model_type" else ""


def _unknown_key(path: Sequence[str], root: type[BaseModel], block: str) -> str:
    """Return advice on the unknown key at the end of ``path``. ``block``: key of the block."""
    model = root
    for part in path[:-1]:
        model = _model_in(model.model_fields[part].annotation) or model
    name = path[-1]
    known = [field.alias or key for key, field in model.model_fields.items()]
    elsewhere = [
        key
        for key, field in root.model_fields.items()
        if (inner := _model_in(field.annotation)) and name in inner.model_fields
    ]
    top = other_names.of_key(name)
    if name == block:
        return f'the block stands in itself; keep one "{block}"'
    if name in other_names.DEEPSPEED:
        return f'unknown key; {name} is a key of DeepSpeed\'s: put it beside "{block}", not in it'
    ours = other_names.of_setting(name)
    if len(path) == 1 and (top or ours) is not None:
        return f'unknown key; for {name} write "{top or ours}"{"" if top else ", in a dimension"}'
    if len(path) > 1 and ours in known:
        return f'unknown key; for {name} write "{ours}"'
    if len(path) > 1 and (top or (name in root.model_fields and not elsewhere)):
        return f'unknown key; "{top or name}" stands beside "{path[0]}", not in it'
    if elsewhere and len(path) > 1:
        return f"only {', '.join(elsewhere)} can have {name}; remove it here"
    if elsewhere:
        return f"unknown key; it belongs inside {' or '.join(elsewhere)}"
    near = difflib.get_close_matches(name.lower(), known, n=1)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    return f"unknown key; known keys are {', '.join(known)}"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def idle(key: str, found: object, todo: str, on_unsupported: str) -> str:
    """Return a sentence on a key below "compression" that has no effect in this job.

    ``todo``: reason and advice. Raises ConfigError unless ``on_unsupported`` is "native".
    """
    if on_unsupported != "native":
        raise ConfigError(key, show(found), todo)
    return f"{key} does nothing here: {todo}"


def near_key(names: Iterable[object], wanted: str) -> str | None:
    """Return the key of ``names`` that looks like a misspelt ``wanted``."""
    lowered = {name.lower(): name for name in names if isinstance(name, str)}
    near = difflib.get_close_matches(wanted, lowered, n=1, cutoff=0.85)
    return lowered[near[0]] if near else None
