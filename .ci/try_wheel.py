"""What a user does first with the wheel: an empty folder, no compiler, no DeepSpeed or GPT-NeoX."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


def said(*command: str, status: int = 0) -> str:
    """What ``command`` prints. Raises AssertionError where it ends with another status."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == status, f"{command} ended with {done.returncode}:\n{text}"
    assert "Traceback" not in text, f"{command}:\n{text}"
    return text


def main() -> None:
    """The command line, the examples, a codec, and what the package brings."""
    assert find_spec("deepspeed") is None, "DeepSpeed is installed; this would show nothing"
    compilers = [name for name in ("c++", "g++", "clang++", "cc") if shutil.which(name)]
    assert not compilers, f"{compilers} are in PATH; this would show nothing"
    import hybridcomp

    package = Path(hybridcomp.__file__).parent
    assert package.is_relative_to(sys.prefix), f"{package} is not of the wheel"
    for name in ("py.typed", "kernels/cuda/blockint.cu", "kernels/formats/blockint.h",
                 "patches/mcore/ddp.py", "patches/neox/train_neox.py",
                 "configs/neox/20B.yml"):  # fmt: skip
        assert (package / name).is_file(), f"the wheel lacks {name}"
    listed = metadata.files("hybridcomp") or ()
    for file in listed:
        assert file.parts[0].startswith(("hybridcomp", "..")), f"the wheel brings {file}"
    assert any("libgomp" in file.name for file in listed), "the wheel lacks OpenMP's library"

    said("hybridcomp", "--version")
    said("hybridcomp", "schema")
    said("hybridcomp", "seams")
    assert "neox/20B.yml" in said("hybridcomp", "configs")
    said("hybridcomp", "configs", "ds_zero1_recommended", "--to", ".")
    assert "blockint" in said("hybridcomp", "validate", "ds_zero1_recommended.json")
    script = said(sys.executable, "-m", "hybridcomp.patches.neox", "--path")
    assert script.strip().endswith("train_neox.py")

    import torch

    from hybridcomp.codecs import make_codec

    codec, values = make_codec("blockint", bits=8), torch.randn(1000)
    payload = torch.empty(codec.wire_nbytes(1000, values.dtype), dtype=torch.uint8)
    decoded = torch.empty(1000)
    codec.decode(payload[: codec.encode(values, payload)], decoded)
    assert (decoded - values).abs().max() < 0.05
    print("the wheel works without a compiler and without DeepSpeed")


if __name__ == "__main__":
    main()
