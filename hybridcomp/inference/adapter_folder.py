"""Save published PEFT adapters as folders from which engines load them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridcomp.errors import PublishError
from hybridcomp.escaping import one_line, quoted_path
from hybridcomp.publishing import WeightReceiver

#: number of folders that are kept: the newest, and one that an engine may be reading
KEEP = 2
ADAPTER = ".lora_"


class AdapterFolder:
    """Follow versions of adapters (``publish.lora``: adapters) and save each in its own folder.

    To load the folder, vLLM has ``POST /v1/load_lora_adapter`` (``load_inplace`` true) and
    ``LLM.add_lora``, SGLang ``load_lora_adapter`` and PEFT ``load_adapter``.
    """

    def __init__(self, source: Any, folder: str | Path, config: Mapping[str, Any]) -> None:
        """Hold the source; nothing is read before ``update``.

        Args:
            source: as for ``hybridcomp.WeightReceiver``.
            folder: folder that will contain one folder per version.
            config: the adapter's configuration, ``peft_config["default"].to_dict()``.
        """
        self._receiver, self._folder = WeightReceiver(source), Path(folder)
        self._config = dict(config)
        self._version = 0

    @property
    def version(self) -> int:
        """Return the version of the newest folder; 0 before the first."""
        return self._version

    def update(self, version: int | None = None) -> Path | None:
        """Write the newest version, or ``version``; return None if there is no new one.

        Returns the folder, which appears complete or not at all. Raises PublishError; the next call
        then writes the version that is missing.
        """
        # safetensors belongs to the engine that loads the folder
        from safetensors.torch import save

        self._receiver.update(version)
        newest = self._receiver.version
        if newest == self._version:
            return None
        tensors = {name: tensor.contiguous() for name, tensor in self._receiver.tensors()}
        odd = next((name for name in tensors if ADAPTER not in name), None)
        if odd is not None:
            raise PublishError(
                f"version {newest}: {one_line(odd)} is no weight of an adapter; publish with "
                "lora: adapters"
            )
        text = json.dumps(self._config, default=lambda one: sorted(one) if isinstance(one, set)
                          else str(one))  # fmt: skip
        data = save(tensors, metadata={"format": "pt"})
        # the path tells jobs apart, too: an engine's prefix cache may know an adapter by its path
        path = self._folder / f"v{newest:010d}.{self._receiver.base[:8]}"
        made = self._folder / f".made.{secrets.token_hex(4)}"
        try:
            made.mkdir(parents=True)
            (made / "adapter_config.json").write_text(text)
            (made / "adapter_model.safetensors").write_bytes(data)
            if path.exists():
                shutil.rmtree(path)
            os.replace(made, path)
        except OSError as error:
            shutil.rmtree(made, ignore_errors=True)
            raise PublishError(
                f"version {newest}: {quoted_path(path)} cannot be written ({error.strerror}); make "
                "room or name another folder, and update again"
            ) from None
        self._version = newest
        self._remove_old(path)
        return path

    def _remove_old(self, newest: Path) -> None:
        """Keep ``newest`` and the last written of the others, which an earlier job may have left
        with higher numbers.
        """
        others = [one for one in self._folder.glob("v??????????*") if one != newest]
        for old in sorted(others, key=lambda one: one.stat().st_mtime_ns)[: 1 - KEEP]:
            shutil.rmtree(old, ignore_errors=True)
