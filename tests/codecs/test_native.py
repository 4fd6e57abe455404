"""A codec with new kernels: follow the page on adding one, in a copy of the package.

The copy lacks the C++ of other codecs, so only the registration and the new codec are compiled. No
existing file is edited.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.paths import ROOT

PAGE = ROOT / "docs" / "contributing" / "codec.md"
NEW = (
    "hybridcomp/kernels/formats/trim.h",
    "hybridcomp/kernels/cpu/bind_trim.cpp",
    "hybridcomp/codecs/trim.py",
)
#: C++ files of the back end that belong to no codec
SHARED = ("bind.h", "cpu.cpp", "cpu.h", "shares.h")

BUILD = """
from setuptools import Distribution, Extension
from hybridcomp.kernels.build import BuildExt
one = Extension("hybridcomp.kernels._cpu", [], language="c++")
command = BuildExt(Distribution({"ext_modules": [one]}))
command.inplace = True
command.ensure_finalized()
command.run()
"""

USE = """
import json, torch
from hybridcomp.codecs import CODECS, make_codec
from hybridcomp.codecs.testing import check
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda import CudaKernels
for keep in (2, 3):
    check(make_codec("trim", keep=keep))
codec, values = make_codec("trim", keep=3), torch.tensor([1.0, -2.5, 3e38, 0.1])
payload = torch.empty(codec.wire_nbytes(4, values.dtype), dtype=torch.uint8)
codec.encode(values, payload)
block = CompressionConfig.parse({"dp": {"codec": "trim", "error_bound": 0.05}})
try:
    make_codec("expcode").encode(values, torch.empty(4096, dtype=torch.uint8))
except CodecError as error:
    absent = str(error)
try:
    CudaKernels(None).functions("trim")
except CodecError as error:
    gpu = str(error)
print(json.dumps({
    "payload": payload.tolist(), "names": list(CODECS), "absent": absent, "gpu": gpu,
    "block": block.flat()["compression.dp.forward"],
}))
"""


def files_of_page() -> dict[str, str]:
    """Return the page's files by path."""
    text, found = PAGE.read_text(), {}
    for name in NEW:
        after = text[text.index(f"**`{name.removeprefix('hybridcomp/')}`**") :]
        fence = re.search(r"^    ```\w+\n(.*?)^    ```", after, re.DOTALL | re.MULTILINE)
        assert fence is not None, name
        found[name] = textwrap.dedent(fence[1])
    return found


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the package with the new codec and without unneeded C++."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler")
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("copy")
    others = shutil.ignore_patterns("*.so", "__pycache__", "cpu_*", "bind_*")
    shutil.copytree(ROOT / "hybridcomp", folder / "hybridcomp", ignore=others)
    left = {path.name for path in (folder / "hybridcomp/kernels/cpu").iterdir()}
    assert left == set(SHARED), "the shared files name no codec, so theirs can be left out"
    for name, text in files_of_page().items():
        assert not (folder / name).exists()
        (folder / name).write_text(text)
    return folder


def run(folder: Path, program: str) -> str:
    """Run Python on the copy; return its output."""
    known = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=known, capture_output=True, text=True,
        check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_three_new_files_are_a_codec(copy: Path) -> None:
    """It satisfies the codecs' contract, writes its format's bytes, and is known to the block."""
    run(copy, BUILD)
    found = json.loads(run(copy, USE).splitlines()[-1])
    # the upper three bytes of 1.0 = 3f800000, -2.5 = c0200000, 3e38 = 7f61b1e6, 0.1 = 3dcccccd
    words = (0x3F8000, 0xC02000, 0x7F61B1, 0x3DCCCC)
    expected = b"".join(word.to_bytes(3, "little") for word in words) + bytes(4)
    assert bytes(found["payload"]) == expected
    assert found["names"].index("trim") < found["names"].index("radix"), "of fixed size: before"
    assert found["block"].startswith("trim within 0.05")
    assert re.search("had none of expcode; build them again", found["absent"])
    assert found["gpu"].startswith("trim has no kernels for GPUs; choose another codec")


def test_nobody_else_names_a_codec(copy: Path) -> None:
    """The copy differs from the package only in new files and files that were not copied."""
    for path in (copy / "hybridcomp").rglob("*"):
        origin = ROOT / path.relative_to(copy)
        if path.suffix in (".py", ".cpp", ".h", ".cu") and str(path.relative_to(copy)) not in NEW:
            assert path.read_bytes() == origin.read_bytes(), path
