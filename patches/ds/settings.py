"""Read settings with the installed DeepSpeed's own parser, and report what it rejects.

A running job uses what its engine has parsed; commands run the parser on a file, if DeepSpeed is
installed. For machines without it ``rules.ds_settings`` has a table.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from pydantic import BaseModel, ValidationError

from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import show
from hybridcomp.config.sources import SOURCE
from hybridcomp.errors import ConfigError
from hybridcomp.escaping import one_line
from hybridcomp.patches.rules.ds_settings import AUTO, ZERO, parsed

#: attribute of ``DeepSpeedConfig`` for each section of the file
SECTIONS = {
    ZERO: "zero_config", "bf16": "bfloat16_config", "fp16": "float16_config",
    "compile": "compile_config", "tensor_parallel": "tensor_parallel_config",
    "hybrid_engine": "hybrid_engine",
}  # fmt: skip
#: top-level keys with an attribute of the same name; batch sizes are computed
KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def of_config(config: Any) -> dict[str, Any]:
    """Return a parsed ``DeepSpeedConfig``'s settings in the file's form."""
    found = dict(config._param_dict)
    for name, attribute in SECTIONS.items():
        section: BaseModel | None = getattr(config, attribute, None)
        if section is not None:
            written = found.get(name)
            unknown = {} if not isinstance(written, Mapping) else written
            found[name] = {**_plain(unknown), **section.model_dump(warnings=False)}
    for name in KEYS:
        found[name] = getattr(config, name, found.get(name))
    return found


def of_file(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Parse ``settings`` with the installed DeepSpeed; return None if it is not installed.

    "auto" is left out, since Hugging Face's Trainer and Accelerate replace it. Batch sizes stay as
    written. Raises ConfigError with DeepSpeed's own message, its version and the key.
    """
    with _quietly():
        try:
            from deepspeed.runtime import config as owner
        except ImportError:
            return None
        block = {BLOCK: settings[BLOCK]} if BLOCK in settings else {}  # nobody fills in its "auto"
        written = {**_plain(settings), **block}
        try:
            return _parsed(owner, written)
        except (ValidationError, ValueError, AssertionError, owner.DeepSpeedConfigError) as error:
            raise _refusal(owner, written, error) from None
        except Exception as error:  # an internal error of the parser, not a message for users
            parsed(settings)
            raise _refusal(owner, written, error) from None


def _plain(found: Mapping[str, Any]) -> dict[str, Any]:
    """Copy settings without "auto", which DeepSpeed's sections drop as well."""
    return {
        name: _plain(value) if isinstance(value, Mapping) else value
        for name, value in found.items()
        if not (isinstance(value, str) and value == AUTO)
    }


def _parsed(owner: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Parse all of ``settings`` as ``DeepSpeedConfig`` does.

    Without torch.distributed ``DeepSpeedConfig`` assumes one rank, so the world size is computed
    from the batch sizes.
    """

    class File(owner.DeepSpeedConfig):  # type: ignore[misc]
        def _configure_train_batch_size(self) -> None:
            whole, own, steps = (getattr(self, name) for name in KEYS)
            self.is_sized = whole is not None or own is not None  # otherwise the script fills it in
            self.world_size = 1
            if None not in (whole, own, steps):
                self.world_size = max(1, whole // (own * steps))
            if self.is_sized:
                super()._configure_train_batch_size()

        def _do_sanity_check(self) -> None:
            if self.is_sized:
                super()._do_sanity_check()

    # replaces batch sizes that DeepSpeed computed for one rank
    written = {name: settings.get(name) for name in KEYS}
    aio = settings.get("aio")
    if isinstance(aio, Mapping):  # use_gds needs a GPU, which the machine of a command may lack
        written["aio"] = aio
        settings = {**settings, "aio": {n: one for n, one in aio.items() if n != "use_gds"}}
    return {**of_config(File(settings)), **written}


def _refusal(owner: Any, settings: dict[str, Any], error: Exception) -> ConfigError:
    """Convert an error of DeepSpeed's parser to a ConfigError that names the key."""
    key, found = _key(owner, settings, error)
    version = metadata.version("deepspeed")
    return ConfigError(
        key, show(found), f'DeepSpeed {version} refuses it: "{_words(error)}"; remove or change it'
    )


def _words(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return one_line(error.errors()[0]["msg"])
    return one_line(str(error) or type(error).__name__, 600)


def _key(owner: Any, settings: dict[str, Any], error: Exception) -> tuple[str, Any]:
    """Return the dotted key that DeepSpeed rejects, and its value.

    DeepSpeed's errors seldom name the key, so each key is parsed alone to find it.
    """
    words = _words(error)
    name = next(
        (setting for setting in settings if _same(owner, {setting: settings[setting]}, words)), None
    )
    if name is None:  # only several keys together are rejected
        return SOURCE, settings
    value = settings[name]
    if isinstance(error, ValidationError):
        detail = error.errors()[0]
        return ".".join([name, *map(str, detail["loc"])]), detail["input"]
    if isinstance(value, Mapping) and not _same(owner, {name: {}}, words):
        for one in value:
            if _same(owner, {name: {one: value[one]}}, words):
                return f"{name}.{one}", value[one]
    return name, value


def _same(owner: Any, settings: dict[str, Any], words: str) -> bool:
    try:
        _parsed(owner, settings)
    except Exception as error:  # the parser may raise anything
        return _words(error) == words
    return False


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep DeepSpeed's log lines out of a command's output."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
