"""prove_on_gpu.py: its commands exist, and finished steps are not repeated."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import bench_gpu_training, prove_on_gpu
from benchmarks.gpu_proof import running, steps
from benchmarks.gpu_proof.steps import BRIEF, ON_CPU, TESTS, Lister, Step
from tests.paths import ROOT


@pytest.fixture
def set_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Step]], None]:
    """Replace the command's steps."""
    return lambda found: monkeypatch.setattr(Lister, "steps", lambda self: iter(found))


@pytest.mark.parametrize("cpu", [False, True])
def test_scripts_and_their_options_exist(tmp_path: Path, cpu: bool) -> None:
    found = list(Lister(tmp_path, cpu).steps())
    assert len({step.name for step in found}) == len(found)
    assert {*BRIEF} < {*bench_gpu_training.EVERY}
    speeds = [step for step in found if step.name.startswith(("brief", "speed"))]
    assert speeds and all(step.least > bench_gpu_training.START_S for step in speeds)
    assert ON_CPU.keys() == TESTS.keys()
    for step in found:
        assert not step.budget or f'"{step.budget}"' in (ROOT / step.command[1]).read_text()
        assert cpu == any("cpu" in word for word in (*step.command, *step.env.values())) or (
            step.name in ("doctor", "text", "gpt2", "peers") or step.name.startswith("tests")
        )
        scripts = [ROOT / word for word in step.command[1:2] if word.endswith(".py")]
        for script in scripts:
            text = script.read_text()
            for word in step.command:
                assert not word.startswith("--") or f'"{word}"' in text


def stand_in(folder: Path) -> list[Step]:
    """Return a step that succeeds, one that fails until a file exists, and another."""
    python, there = sys.executable, folder / "there"
    return [
        Step("data", "", 1, (python, "-c", "print('made')")),
        Step("speed", "", 1, (python, "-c", f"open({str(there)!r}); print('fast')")),
        Step("codecs", "", 1, (python, "-c", "print('coded')")),
    ]


def test_it_goes_on_where_it_was(
    tmp_path: Path, set_steps: Callable[[list[Step]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    set_steps(stand_in(tmp_path))
    out = ["--out", str(tmp_path / "out")]
    assert prove_on_gpu.main(out) == 1
    said = capsys.readouterr()
    assert "FileNotFoundError" in said.out and "[3/3] codecs" in said.out
    assert said.err == "failed, and tried again by the same command: speed\n"
    assert "made" in (tmp_path / "out" / "data.log").read_text()
    (tmp_path / "there").touch()
    assert prove_on_gpu.main(out) == 0
    assert "[1/1] speed" in capsys.readouterr().out
    assert prove_on_gpu.main([*out, "--list"]) == 0
    assert capsys.readouterr().out.count("done") == 3
    assert prove_on_gpu.main([*out, "--again", "--only", "da", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_every_test_for_a_gpu_is_in_one_step() -> None:
    """Covers marked tests, and all of tests/nccl."""
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in file.read_text() or file.parent.name == "nccl"
        if "scripts" not in file.parts and "plan" not in file.parts
    }
    assert "tests/nccl/test_zero.py" in marked and "tests/tools/commands/test_doctor.py" in marked
    for file in marked:
        steps = [
            name
            for name, words in TESTS.items()
            if any(file == word or file.startswith(f"{word}/") for word in words)
            if f"--ignore={file}" not in words
        ]
        assert len(steps) == 1, (file, steps)


def limited(folder: Path) -> list[Step]:
    """Return a slow step, one that stops in time, an endless one and a short one."""
    python, tell = sys.executable, "import sys; print('told', *sys.argv[1:])"
    forever = "import time; print('begun', flush=True); time.sleep(600)"
    return [
        Step("first", "", 0.001, (python, "-c", tell)),
        Step("long", "", 500, (python, "-c", tell)),
        Step("speed", "", 500, (python, "-c", f"{tell}; sys.exit(75)"), "--budget", ("--few",), 1),
        Step("hangs", "", 0.001, (python, "-c", forever)),
        Step("late", "", 0.01, (python, "-c", tell)),
    ]


def test_a_call_of_some_minutes_does_what_fits(
    tmp_path: Path,
    set_steps: Callable[[list[Step]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_steps(limited(tmp_path))
    monkeypatch.setattr(steps, "STOPPING_S", 1.0)
    monkeypatch.setattr(steps, "LEAST_S", 2.0)
    monkeypatch.setattr(running, "FAREWELL_S", 0.5)
    out = tmp_path / "out"
    words = ["--out", str(out), "--minutes", "1"]
    assert prove_on_gpu.main(words) == 1
    said = capsys.readouterr()
    # a step that hangs costs a later one nothing
    assert "hangs still runs, and its time is over" in said.out and "begun" in said.out
    assert said.err.splitlines()[0].endswith(": hangs")
    assert said.err.splitlines()[1].endswith(": long, speed")
    assert re.search(r"^told --few --budget [45]\d$", (out / "speed.log").read_text(), re.M)
    assert all("told\n" in (out / f"{name}.log").read_text() for name in ("first", "late"))
    # a step longer than any call starts if it is first, and what failed comes last
    assert prove_on_gpu.main(words) == 1
    said = capsys.readouterr()
    assert re.findall(r"^\[./3\] (\w+)", said.out, re.M) == ["long", "speed", "hangs"]
    set_steps([Step("more", "", 0.001, (sys.executable, "-c", "print('MISSED 0.7')"))])
    assert prove_on_gpu.main(words) == 0
    assert "    MISSED 0.7\n" in capsys.readouterr().out
    assert prove_on_gpu.main(words) == 0 and not capsys.readouterr().out
    # the same name, another command
    set_steps([Step("more", "", 0.001, (sys.executable, "-c", "print('MISSED 0.8')"))])
    assert prove_on_gpu.main(words) == 0
    assert "    MISSED 0.8\n" in capsys.readouterr().out


def test_a_step_waits_for_the_data_that_a_later_call_makes(
    tmp_path: Path, set_steps: Callable[[list[Step]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps that stop in time fit where the one that makes their data does not."""
    data = tmp_path / "text"
    command = (sys.executable, "-c", "print('told')", "--data", str(data))
    set_steps([Step("losses", "", 0.001, command, "--budget")])
    words = ["--out", str(tmp_path / "out"), "--minutes", "9"]
    assert prove_on_gpu.main(words) == 1
    assert capsys.readouterr().err == "for the next call, by the same command: losses\n"
    data.with_name("text_valid.idx").touch()
    assert prove_on_gpu.main(words) == 0
    assert "losses: done" in capsys.readouterr().out


def test_a_step_is_ended_with_the_call(tmp_path: Path) -> None:
    """By SIGTERM, as ``timeout`` sends: a surviving process would keep the GPU's memory."""
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(ROOT / "scripts")!r})
        from benchmarks import prove_on_gpu as prove
        from benchmarks.gpu_proof.steps import Lister, Step
        told = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
        command = (sys.executable, "-c", told)
        both = [Step(name, "", 1, command, beside="x") for name in ("one", "other")]
        first = Step("first", "", 1, (sys.executable, "-c", ""))
        Lister.steps = lambda self: iter([first, *both])
        prove.main(["--out", {str(tmp_path)!r}, "--pack", {str(tmp_path / "p.tar.gz")!r}])
    """
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    logs = [tmp_path / "one.log", tmp_path / "other.log"]
    found: list[str] = []
    while len(found) < 2 and process.poll() is None:
        time.sleep(0.05)
        said = "".join(log.read_text() for log in logs if log.is_file())
        found = re.findall(r"^pid (\d+)$", said, re.M)
    assert len(found) == 2
    with tarfile.open(tmp_path / "p.tar.gz") as packed:  # before a SIGKILL
        assert packed.getnames() == ["first.log", "proof.json"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    with tarfile.open(tmp_path / "p.tar.gz") as packed:
        assert packed.getnames() == ["first.log", "one.log", "other.log", "proof.json"]
    for pid in found:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_steps_side_by_side(
    tmp_path: Path, set_steps: Callable[[list[Step]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each waits for the other's output, so sequential steps would hang."""
    code = "import pathlib, time\npathlib.Path({mine!r}).touch()\n"
    code += "while not pathlib.Path({other!r}).exists(): time.sleep(0.01)"
    a, b = (str(tmp_path / name) for name in "ab")
    one = (sys.executable, "-c", code.format(mine=a, other=b))
    other = (sys.executable, "-c", code.format(mine=b, other=a))
    fails = (sys.executable, "-c", "raise SystemExit(3)")
    set_steps(
        [
            Step("one", "", 1, one, beside="x"),
            Step("other", "", 1, other, beside="x"),
            Step("fails", "", 1, fails, beside="x"),
        ]
    )
    assert prove_on_gpu.main(["--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("[1/3] one, other, fails (~1 of ~1 min left)")
    assert "one: done" in said.out and "fails failed with status 3" in said.out
    assert said.err == "failed, and tried again by the same command: fails\n"


def test_what_a_step_makes_is_not_made_again(
    tmp_path: Path, set_steps: Callable[[list[Step]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "text_valid.idx"
    set_steps([Step("text", "", 1, (sys.executable, "-c", "print('made')"), makes=made)])
    assert prove_on_gpu.main(["--out", str(tmp_path), "--list"]) == 0
    made.touch()
    assert prove_on_gpu.main(["--out", str(tmp_path), "--list"]) == 0
    assert re.findall("text +(done|~1 min)", capsys.readouterr().out) == ["~1 min", "done"]
