#!/usr/bin/env python3
"""torchtitan's own program, ``python -m torchtitan.train``, which runs on CPUs too.

Where there are GPUs ``-m torchtitan.train`` may stand in the place of this file; the command is
that of ``torchtitan_small.py``.
"""

from __future__ import annotations

from on_cpu import torchtitan_devices

torchtitan_devices()

from torchtitan.train import main  # noqa: E402

if __name__ == "__main__":
    main()
