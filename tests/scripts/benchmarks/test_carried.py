"""Results that prove_on_gpu.py carries between machines, and the output of prepare_gpu.py."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import prepare_gpu, prove_on_gpu
from benchmarks.gpu_proof import carried
from tests.paths import ROOT

needs_filters = pytest.mark.skipif(
    not hasattr(tarfile, "data_filter"), reason="this Python's tarfile has no filters"
)


def results(out: Path) -> Path:
    """Write a call's results, including files that another call recreates."""
    for name, content in {
        "proof.json": "{}",
        "85M.jsonl": "{}\n" * 10,
        "tests-zero.log": "x" * carried.LOG_NBYTES + "the end",
        "losses/zero1/loss.jsonl.gz": "curve",
        "data/text_train.bin": "data",
        "waits/traces/zero1.json": "{}",
        "site/package/module.py": "code",
        "proof.part": "half",
    }.items():
        place = out / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
    return out


@needs_filters
def test_results_travel_in_one_small_file(tmp_path: Path) -> None:
    out, file, other = results(tmp_path / "out"), tmp_path / "packed" / "one.tar.gz", tmp_path / "b"
    assert carried.pack(out, file, 10**6) == []
    (other / "losses").mkdir(parents=True)
    (other / "85M.jsonl").write_text("newer")
    carried.unpack(file, other)
    found = sorted(str(p.relative_to(other)) for p in other.rglob("*") if p.is_file())
    assert found == ["85M.jsonl", "losses/zero1/loss.jsonl.gz", "proof.json", "tests-zero.log"]
    assert (other / "85M.jsonl").read_text() == "newer"  # existing files are kept
    log = (other / "tests-zero.log").read_text()
    assert log.startswith("...") and log.endswith("the end")
    assert len(log) == carried.LOG_NBYTES + 4


def test_what_is_too_much_stays_behind_and_is_named(tmp_path: Path) -> None:
    out, file = results(tmp_path / "out"), tmp_path / "one.tar.gz"
    (out / "trace.json").write_bytes(os.urandom(50_000))
    assert carried.pack(out, file, 20_000) == ["trace.json: 50000 bytes stay behind"]
    assert file.stat().st_size < 20_000
    with tarfile.open(file) as archive:
        assert "proof.json" in archive.getnames()


@needs_filters
def test_an_archive_writes_nothing_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        member = tarfile.TarInfo("../outside")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    words = ["--out", str(tmp_path / "out"), "--unpack", str(file), "--list"]
    assert prove_on_gpu.main(words) == 2
    assert capsys.readouterr().err.startswith(f"{file}: expected what --pack wrote (")
    assert not (tmp_path / "outside").exists()
    file.write_bytes(b"no archive")
    assert prove_on_gpu.main(words) == 2
    file.unlink()
    assert prove_on_gpu.main(words) == 2


def wheel(folder: Path) -> Path:
    """Write a wheel with one module."""
    folder.mkdir(parents=True)
    place = folder / "carried_thing-1.0-py3-none-any.whl"
    info = "carried_thing-1.0.dist-info"
    with zipfile.ZipFile(place, "w") as file:
        file.writestr("carried_thing.py", "VALUE = 7\n")
        file.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: carried_thing\nVersion: 1.0\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return place


def test_what_was_prepared_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, out, root = tmp_path / "carry", tmp_path / "out", tmp_path / "root"
    wheel(prepared / "wheels")
    info = "native/carried_package-3.0.dist-info/METADATA"
    for name in ("native/hybridcomp/kernels/_cpu.so", "kernels/hybridcomp-1.cubin", info):
        (prepared / name).parent.mkdir(parents=True)
        (prepared / name).write_bytes(b"bytes")
    (prepared / "data").mkdir()
    (prepared / "data" / "text_train.bin.gz").write_bytes(gzip.compress(b"tokens"))
    (root / "hybridcomp" / "kernels").mkdir(parents=True)
    out.mkdir()
    monkeypatch.delenv("PYTHONPATH", raising=False)
    variables = carried.install(prepared, out, root)
    assert variables == {
        "PYTHONPATH": f"{root}{os.pathsep}{out / 'site'}", "CUPY_CACHE_DIR": str(out / "kernels")
    }  # fmt: skip
    assert (root / "hybridcomp/kernels/_cpu.so").read_bytes() == b"bytes"
    assert (out / "kernels/hybridcomp-1.cubin").read_bytes() == b"bytes"
    assert (out / "data/text_train.bin").read_bytes() == b"tokens"
    (out / "site/carried_package-3.0.dist-info/METADATA").write_text("Version: 3.0\n")
    code = "import carried_thing, importlib.metadata as m; "
    code += "print(carried_thing.VALUE, m.version('carried_package'))"
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True
    )
    assert found.stdout == b"7 3.0\n", found.stderr
    (out / "data/text_train.bin").write_bytes(b"own")  # a second call changes nothing
    assert carried.install(prepared, out, root) == variables
    assert (out / "data/text_train.bin").read_bytes() == b"own"


def test_what_was_not_prepared_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "carry").mkdir()
    words = ["--out", str(tmp_path / "out"), "--prepared", str(tmp_path / "carry"), "--list"]
    assert prove_on_gpu.main(words) == 2
    assert capsys.readouterr().err.endswith("carry: expected what prepare_gpu.py wrote\n")
    broken = tmp_path / "carry" / "wheels" / "broken-1.0-py3-none-any.whl"
    broken.parent.mkdir()
    broken.write_bytes(b"no wheel")
    assert prove_on_gpu.main(words) == 2
    assert "pip cannot install these wheels: ERROR" in capsys.readouterr().err
    assert not (tmp_path / "out" / "site").exists()


def test_a_part_is_made_anew_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(asked: Namespace, out: Path) -> None:
        if asked.architecture == 80:
            raise prepare_gpu.PrepareError("no compiler")
        (out / str(asked.architecture)).write_bytes(b"123")

    monkeypatch.setitem(prepare_gpu.PARTS, "kernels", made)
    words = ["--out", str(tmp_path / "carry"), "--only", "kernels", "--architecture"]
    assert prepare_gpu.main([*words, "75"]) == 0
    assert capsys.readouterr().out == "kernels: 1 files, 0.0 MB\n"
    assert prepare_gpu.main([*words, "80"]) == 1
    assert capsys.readouterr().err == "kernels: no compiler\n"
    assert [path.name for path in (tmp_path / "carry" / "kernels").iterdir()] == ["75"]
    assert prepare_gpu.main([*words, "90"]) == 0
    assert [path.name for path in (tmp_path / "carry" / "kernels").iterdir()] == ["90"]
    assert [path.name for path in (tmp_path / "carry").iterdir()] == ["kernels"]


@pytest.mark.nightly
def test_a_command_that_fails_is_told_by_its_last_lines(tmp_path: Path) -> None:
    words = (sys.executable, "-c", "import sys; print('first'); sys.exit('last')")
    with pytest.raises(prepare_gpu.PrepareError, match="first last$"):
        prepare_gpu._call(*words)
    with pytest.raises(prepare_gpu.PrepareError, match="^/nowhere/python3.12: No such file"):
        prepare_gpu._call("/nowhere/python3.12", "-m", "pip")
    asked = prepare_gpu.parse(["--architecture", "90", "--nvrtc", "1.2.3"])
    code = "from benchmarks.gpu_bench import prebuild; prebuild.compile_here(90, '1.2.3')"
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])}
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    with pytest.raises(prepare_gpu.PrepareError, match="expected NVRTC 1.2.3, CuPy loads"):
        prepare_gpu._call(sys.executable, "-c", code, env=env)
    assert asked.only == list(prepare_gpu.PARTS)
