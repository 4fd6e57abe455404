"""``docs/contributing/codec.md``: three new files are a codec, and the pages have it.

``tests/codecs/test_native.py`` builds the same files and holds the codec against its contract.
"""

from __future__ import annotations

import pytest

from tests.contributing.walk import MOST, Copy, files, steps

FOLDER = "hybridcomp/"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """The copy with the new files, and pages that were made again."""
    pytest.importorskip("deepspeed")
    parts = ("docs", "scripts", "README.md")
    made = Copy(tmp_path_factory.mktemp("repository"), *parts)
    for step in steps("codec.md"):
        if step.file.startswith(("kernels/", "codecs/")):
            path = made.home / FOLDER / step.file
            assert not path.exists()
            path.write_text(step.text)
    made.run("python scripts/make_docs.py")
    return made


def test_it_takes_few_files(copy: Copy) -> None:
    named = files("codec.md")
    new = {name for name in named if (copy.home / name).exists() and "trim" in name}
    assert new == {
        "hybridcomp/kernels/formats/trim.h",
        "hybridcomp/kernels/cpu/bind_trim.cpp",
        "hybridcomp/codecs/trim.py",
    }
    touched = {name for name in copy.changed() if not name.startswith("docs/")}
    assert touched == {"hybridcomp/codecs/trim.py"}, "of what is read here; headers are new"
    assert len(named) <= MOST


def test_the_pages_have_it(copy: Copy) -> None:
    docs = copy.home / "docs"
    assert copy.changed() >= {"docs/block.md", "docs/wire_formats.md"}
    block = (docs / "block.md").read_text()
    assert "trim: bytes of a value that are sent, 2 (default) or 3." in block
    formats = (docs / "wire_formats.md").read_text()
    assert "## trim\n\n```text\ntrim: the upper `keep` bytes (2 or 3) of every value" in formats
    assert formats.index("## stepcode") < formats.index("## trim") < formats.index("## zfp")
