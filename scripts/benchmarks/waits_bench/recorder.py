"""Record a rank's steps with torch's profiler, into a compressed Chrome trace."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hybridcomp.collectives.wire.profiler_ranges import PREFIX


class Recorder:
    """A profile that starts at once; ``close`` writes it.

    On a GPU it records kernels, copies, driver calls and streams' waits for events.
    """

    def __init__(self, path: str) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        self._path, self._steps = Path(path), 0
        kinds, more = [ProfilerActivity.CPU], {}
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
            more["experimental_config"] = _ExperimentalConfig(enable_cuda_sync_events=True)
        self._profile = profile(activities=kinds, **more)  # type: ignore[arg-type]
        self._profile.start()

    def step(self) -> AbstractContextManager[Any]:
        """Return a context that marks its body as the next step."""
        from torch.profiler import record_function

        self._steps += 1
        return record_function(f"{PREFIX}step {self._steps}")

    def close(self) -> None:
        """Stop and write the trace."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
