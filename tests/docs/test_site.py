"""The site: the chooser's blocks are valid, and a browser reports no error on any page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from doc_pages import chooser
from hybridcomp.tools.commands import cli
from tests.paths import ROOT

#: maximum height of results pages at a width of 1,440 pixels
HIGHEST = 6000
#: runs in a page of the same origin, shows every page in a frame and writes its findings as JSON
HARNESS = (Path(__file__).with_name("site_harness.js")).read_text(encoding="utf-8")


def made() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Return every choice that leads to a block: its words, the file's name and contents."""
    text = (ROOT / "docs" / "site" / "blocks.js").read_text(encoding="utf-8")
    found = json.loads(text.partition("hybridcompBlocks = ")[2].rstrip().removesuffix(";"))
    for words, (name, contents) in found["blocks"].items():
        yield words, name, contents


def test_every_choice_has_an_answer() -> None:
    answered = {words for words, _, _ in made()}
    for engine, (page, stages, command) in chooser.ENGINES.items():
        assert (ROOT / "docs" / page).with_suffix(".md").is_file()
        assert "hybridcomp.run" in command or "hybridcomp.patches.neox" in command
        for link, kind in chooser.LINKS.items():
            for stage in stages:
                assert (f"{engine}|{link}|{stage}" in answered) == (kind is not None)


@pytest.mark.parametrize(
    ("words", "name", "contents"), list(made()), ids=lambda found: str(found)[:60]
)
def test_validate_accepts_every_block_of_the_chooser(
    words: str, name: str, contents: dict[str, Any], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / name).write_text(json.dumps(contents))
    assert cli.main(["validate", str(tmp_path / name)]) == 0, capsys.readouterr().err
    assert "blockint(bits=4)" in capsys.readouterr().out, words


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs is not installed")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, str(ROOT / "scripts" / "make_docs.py"), "--build", str(folder)]
    subprocess.run(build, check=True)
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        """Serve a file; the harness can also request a pause."""
        if not self.path.startswith("/pause"):
            return super().do_GET()
        time.sleep(0.05)
        self.send_response(204)
        return self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_chromium_finds_nothing_wrong(
    site: Path, address: str, width: int, scheme: str, tmp_path: Path
) -> None:
    """No dead link, error, clipped content or illegible text, and a block after three clicks."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium")
    pages = [
        str(page.relative_to(site))
        for page in sorted(site.rglob("*.html"))
        if page.name != "404.html"
    ]
    wishes = {"pages": pages, "width": width, "scheme": scheme}
    (site / "harness.html").write_text(
        f"<!doctype html><body><script>const wishes = {json.dumps(wishes)};\n{HARNESS}</script>"
    )
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--window-size={width + 40},1000", f"--user-data-dir={tmp_path}/profile",
         f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
         "--virtual-time-budget=600000", "--dump-dom", f"{address}/harness.html"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (site / "harness.html").unlink()
    said = re.search(r"<output>(.*?)</output>", done.stdout, re.DOTALL)
    assert said, done.stdout[-2000:]
    found = json.loads(said[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert found["scheme"] == scheme and sorted(found["heights"]) == sorted(pages)
    assert not found["wrong"], "\n".join(found["wrong"])
    assert not re.findall(r"CONSOLE.*\b(?:error|Uncaught|Failed)\b.*", done.stderr)
    if width == 1440:
        high = {page: height for page, height in found["heights"].items()
                if page.startswith("results/") and height > HIGHEST}  # fmt: skip
        assert not high
        assert found["heights"]["index.html"] <= 900, "the front page is one screen"
    (tmp_path / "ds_config.json").write_text(found["chosen"])
    assert found["clicks"] == 3 and json.loads(found["chosen"])["zero_optimization"] == {"stage": 2}
    assert cli.main(["validate", str(tmp_path / "ds_config.json")]) == 0
    assert {"ledger.html", "comparing.html"} <= set(found["search"]["wandb"])
    assert "faq.html" in found["search"]["slower"][:3]
    assert "engines/fsdp2_ddp.html" in found["search"]["lora"]
    assert "engines/fsdp2_ddp.html" in found["search"]["eval"]
