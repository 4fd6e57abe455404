"""Say how to start a job with hybridcomp, for the launcher that has started this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

MODULE = "hybridcomp.run"
#: what each launcher takes before the script; deepspeed alone calls its option otherwise
FORMS = {
    "deepspeed": f"deepspeed ... --module {MODULE}",
    "torchrun": f"torchrun ... -m {MODULE}",
    "accelerate": f"accelerate launch ... -m {MODULE}",
    "python": f"python -m {MODULE}",
}


def launcher(environment: Mapping[str, str] = os.environ) -> str:
    """Return the launcher of this process, a key of FORMS, by the variables that it sets."""
    if "ACCELERATE_ENABLE_CPU_AFFINITY" in environment:  # the one that Trainer sets under no other
        return "accelerate"
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    return "deepspeed" if "CROSS_RANK" in environment else "python"


def start_command(environment: Mapping[str, str] = os.environ) -> str:
    """Return the command, in backquotes, that starts this process's script with hybridcomp."""
    script = (getattr(sys, "argv", None) or [""])[0]
    named = script if script.endswith(".py") else "SCRIPT"
    return f"`{FORMS[launcher(environment)]} {named} ...`"
