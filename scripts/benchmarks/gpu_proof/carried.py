"""Carry results between machines, and prepared files to a machine without a network.

A GPU machine may be lent bare for minutes and return only a few small files. ``pack`` writes a
call's results into one file, from which the next call restores its folder (``unpack``).
prepare_gpu.py writes the folder ``prepared`` on a machine with a network but no GPU.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

#: folders of OUT that another call recreates or that only this machine can use
LEFT_OUT = {"data", "site", "kernels", "extensions", "traces"}
#: maximum bytes of a log to pack, from its end
LOG_NBYTES = 200_000


def pack(out: Path, file: Path, most: int) -> list[str]:
    """Write the results in ``out`` to ``file``, a .tar.gz of at most ``most`` bytes.

    Packs only the end of each log; if the archive is still too large, drops the largest files and
    returns a line for each. Writes ``file`` atomically.
    """
    contents = {path: _content(path) for path in _files(out) if path != file}
    left: list[str] = []
    while len(packed := _packed(out, contents)) > most and contents:
        largest = max(contents, key=lambda path: len(gzip.compress(contents[path])))
        left.append(f"{largest.relative_to(out)}: {len(contents.pop(largest))} bytes stay behind")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.part")
    partial.write_bytes(packed)
    partial.replace(file)
    return left


def unpack(file: Path, out: Path) -> None:
    """Extract an archive of ``pack`` into ``out``; keeps existing files.

    Raises ValueError for any other file. Writes nothing outside ``out``.
    """
    if not hasattr(tarfile, "data_filter"):
        raise ValueError(f"{file}: only 3.11.4 and newer Pythons check an archive's paths")
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(file, "r:gz") as archive:
            for member in archive:
                member = tarfile.data_filter(member, str(out))
                if member.isfile() and not (out / member.name).exists():
                    archive.extract(member, out, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{file}: expected what --pack wrote ({error})") from error


def _files(out: Path) -> Iterator[Path]:
    for path in sorted(out.rglob("*")):
        place = path.relative_to(out)
        if path.is_file() and LEFT_OUT.isdisjoint(place.parts) and path.suffix != ".part":
            yield path


def _content(path: Path) -> bytes:
    """Return the file's bytes; of a log only its end."""
    content = path.read_bytes()
    if path.suffix == ".log" and len(content) > LOG_NBYTES:
        return b"...\n" + content[-LOG_NBYTES:]
    return content


def _packed(out: Path, contents: dict[Path, bytes]) -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w:gz") as archive:
        for path, content in contents.items():
            member = tarfile.TarInfo(str(path.relative_to(out)))
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return found.getvalue()


def install(prepared: Path, out: Path, root: Path) -> dict[str, str]:
    """Install the files of prepare_gpu.py; return environment variables for the steps.

    Installs wheels into ``out/site``, copies kernels and data into ``out`` and the native libraries
    into the checkout ``root``, whose metadata goes beside the wheels. Keeps existing files. Raises
    ValueError if prepare_gpu.py did not write the folder or pip fails.
    """
    if not any((prepared / name).is_dir() for name in ("wheels", "native", "kernels", "data")):
        raise ValueError(f"{prepared}: expected what prepare_gpu.py wrote")
    wheels = sorted((prepared / "wheels").glob("*.whl"))
    site = out / "site"
    if wheels and not site.is_dir():
        _pip(wheels, site)
    for metadata in (prepared / "native").glob("*.dist-info"):
        shutil.copytree(metadata, site / metadata.name, dirs_exist_ok=True)
    paths = [str(root), *([str(site)] if site.is_dir() else []), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    for library in sorted((prepared / "native").rglob("*.so")):
        place = root / library.relative_to(prepared / "native")
        if place.parent.is_dir() and not place.exists():
            shutil.copy2(library, place)
    if (prepared / "kernels").is_dir():
        _copy(prepared / "kernels", out / "kernels")
        variables["CUPY_CACHE_DIR"] = str(out / "kernels")
    if (prepared / "data").is_dir():
        _copy(prepared / "data", out / "data")
    return variables


def _pip(wheels: list[Path], site: Path) -> None:
    partial = site.with_name(f"{site.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps",
        "--no-compile", "--disable-pip-version-check", "--target", str(partial),
        *map(str, wheels),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise ValueError(f"{wheels[0].parent}: pip cannot install these wheels: {said}")
    partial.rename(site)


def _copy(source: Path, target: Path) -> None:
    """Copy missing files; decompresses ``.gz`` data."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(p for p in source.iterdir() if p.is_file()):
        packed = path.suffix == ".gz"
        place = target / (path.stem if packed else path.name)
        if place.exists():
            continue
        partial = place.with_name(f"{place.name}.part")
        with gzip.open(path) if packed else path.open("rb") as read, partial.open("wb") as write:
            shutil.copyfileobj(read, write)
        partial.replace(place)
