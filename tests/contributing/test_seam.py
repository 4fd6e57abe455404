"""Follow ``docs/contributing/seam.md`` literally in a copy of the package."""

from __future__ import annotations

import re

import pytest

from tests.contributing.walk import Copy, distribution, put, steps

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the output of the page's commands, by command."""
    copy = Copy(tmp_path_factory.mktemp("repository"))
    distribution(copy.home, "toytrain", "1.3")
    (copy.home / "toytrain").mkdir()
    (copy.home / "toytrain" / "__init__.py").touch()
    found = {}
    for step in steps("seam.md"):
        if step.language == "python":
            name = step.text.splitlines()[0].removeprefix("# ")
            (copy.home / name).write_text(step.text)
        elif step.language == "diff":
            put(step.text, copy.home / "patches" / "registry.py")
        else:
            assert step.language == "sh"
            found[step.text.strip()] = copy.run(step.text)
    return found


def test_the_seam_is_in_the_support_matrix(printed: dict[str, str]) -> None:
    matrix = printed["python -m hybridcomp.tools.commands.cli seams"]
    row = ["dp", "Gradients that toytrain averages over its ranks", "toytrain >= 1.0, < 2.0"]
    assert row in [re.split(r"  +", line.strip()) for line in matrix.splitlines()]


def test_the_seam_acts(printed: dict[str, str]) -> None:
    (said,) = (text for command, text in printed.items() if "try_seam.py" in command)
    errors = [float(value) for value in re.findall(r"largest error ([\d.e-]+)", said)]
    assert len(errors) == 2 and errors[0] == errors[1] and 0 < errors[0] < 0.02
    assert re.search(r"\[hybridcomp\] step 1: dp blockint\(bits=8\) 3\.\d+x", said)
