"""Read a model from a file, from a command line, or by the name of a callable that builds it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hybridcomp.config.sources import unreadable
from hybridcomp.errors import ConfigError
from hybridcomp.escaping import one_line, parsed_json
from hybridcomp.tools.plan.models import arguments, huggingface, neox
from hybridcomp.tools.plan.models.model import Model
from hybridcomp.tools.plan.models.traced import named


def read_model(source: str | Path | Sequence[str]) -> Model:
    """Read the model that ``source`` describes.

    A folder or file of Hugging Face (``config.json``), a GPT-NeoX YAML file, Megatron's or
    ``train_gpt.py``'s arguments (a list, or one line of a shell), or ``package:callable``. Raises
    ConfigError or HybridcompError in one sentence.
    """
    if not isinstance(source, str | Path):
        return arguments.of_line(source)
    if isinstance(source, str) and "--" in source:
        return arguments.of_line(source)
    if isinstance(source, str) and re.fullmatch(r"[\w.]+:[\w.]+", source):
        return named(source)
    path = Path(source)
    if path.is_dir() and str(source):
        path /= "config.json"
    if not str(source) or not path.is_file():
        raise ConfigError(
            "model", str(source),
            "expected config.json, a GPT-NeoX .yml, Megatron arguments or package:callable, and "
            "found no such file",
        )  # fmt: skip
    if path.suffix in (".yml", ".yaml"):
        return neox.read(path)
    try:
        found = parsed_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise unreadable(str(path), error, "JSON") from None
    if not isinstance(found, dict):
        raise ConfigError(str(path), type(found).__name__, "expected a config.json")
    label = found.get("_name_or_path") or path.parent.name or path.name
    return huggingface.decoder(found, one_line(label))
