"""Save published PEFT adapters as folders from which engines load them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridcomp.errors import PublishError
from hybridcomp.escaping import one_line
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

    @property
    def version(self) -> int:
        """Return the version of the newest folder; 0 before the first."""
        return self._receiver.version

    def update(self, version: int | None = None) -> Path | None:
        """Write the newest version, or ``version``; return None if there is no new one.

        Returns the folder, which appears complete or not at all. Raises PublishError.
        """
        # safetensors belongs to the engine that loads the folder
        from safetensors.torch import save_file

        if self._receiver.update(version) is None:
            return None
        tensors = {name: tensor.contiguous() for name, tensor in self._receiver.tensors()}
        odd = next((name for name in tensors if ADAPTER not in name), None)
        if odd is not None:
            raise PublishError(
                f"version {self.version}: {one_line(odd)} is no weight of an adapter; publish with "
                "lora: adapters"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"v{self.version:010d}"
        made = Path(tempfile.mkdtemp(dir=self._folder, prefix=".made"))
        text = json.dumps(self._config, default=lambda one: sorted(one) if isinstance(one, set)
                          else str(one))  # fmt: skip
        (made / "adapter_config.json").write_text(text)
        save_file(tensors, made / "adapter_model.safetensors", metadata={"format": "pt"})
        if path.exists():
            shutil.rmtree(path)
        os.replace(made, path)
        for old in sorted(self._folder.glob("v??????????"))[:-KEEP]:
            shutil.rmtree(old)
        return path
