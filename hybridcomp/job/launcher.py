"""Name the command that starts a job with hybridcomp, for this process's launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

MODULE = "hybridcomp.run"
#: arguments before the script for each launcher; only deepspeed spells the option differently
FORMS = {
    "deepspeed": f"deepspeed ... --module {MODULE}",
    "torchrun": f"torchrun ... -m {MODULE}",
    "accelerate": f"accelerate launch ... -m {MODULE}",
    "python": f"python -m {MODULE}",
}


def launcher(environment: Mapping[str, str] = os.environ) -> str:
    """Return the launcher of this process, a key of FORMS, judging by environment variables."""
    # the only variable of accelerate that Trainer does not set under other launchers
    if "ACCELERATE_ENABLE_CPU_AFFINITY" in environment:
        return "accelerate"
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    return "deepspeed" if "CROSS_RANK" in environment else "python"


def start_command(environment: Mapping[str, str] = os.environ) -> str:
    """Return the command, in backquotes, that starts this process's script with hybridcomp."""
    script = (getattr(sys, "argv", None) or [""])[0]
    named = script if script.endswith(".py") else "SCRIPT"
    return f"`{FORMS[launcher(environment)]} {named} ...`"
