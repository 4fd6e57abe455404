"""``hybridcomp plan --jobs`` from the command line: decisions, files, errors."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.config import load_config
from hybridcomp.tools.commands import cli
from hybridcomp.tools.plan.jobs import rates
from tests.elastic.jobs import SAMPLES, Case, run
from tests.ranks import run_ranks
from tests.tools.plan.answer.test_command import CLUSTER, CONFIG

ALONE = {"tensor": 1, "stages": 1, "context": 1}
COMMAND = ["torchrun", "--nproc-per-node", "{node_ranks}", "--nnodes", "{nodes}",
           "--master-port", "{port}", "train.py", "{config}", "{micro_batch}"]  # fmt: skip


def job(name: str, **more: Any) -> dict[str, Any]:
    model = "config.json"
    return {"name": name, "model": model, "length": 512, "samples": 16, "samples_left": 1e5,
            "fix": ALONE, "command": COMMAND, **more}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a cluster of 2 x 2 ranks and a model, in the working folder."""
    monkeypatch.chdir(tmp_path)
    fast = {**CLUSTER, "between": {"gbytes_per_second": 20}}
    (tmp_path / "cluster.json").write_text(json.dumps(fast))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 2}))
    return tmp_path


def decide(jobs: list[dict[str, Any]], *words: str, **more: Any) -> int:
    Path("jobs.json").write_text(json.dumps({"jobs": jobs, **more}))
    return cli.main(["plan", "--jobs", "jobs.json", *words])


def ranks_of(path: str = "plans/next.json") -> dict[str, list[int]]:
    return {one["name"]: one["ranks"]["now"] for one in json.loads(Path(path).read_text())["jobs"]}


def test_jobs_get_files_that_start_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = job("c", arrival=100.0)
    assert decide([job("a"), job("b", samples_left=2e5), late]) == 0
    said = capsys.readouterr().out
    given = ranks_of()
    assert given["c"] == [] and sorted(given["a"] + given["b"]) == [0, 1, 2, 3]
    assert "expected until a job ends, in the mean: this " in said
    for name in "ab":
        assert f"\n  plans/{name}/start.sh" in said
        text = Path(f"plans/{name}/start.sh").read_text()
        place = ",".join(str(rank % 2) for rank in given[name])
        lines = text.splitlines()
        assert lines[1] == f"# on node {given[name][0] // 2}"
        assert (f"export CUDA_VISIBLE_DEVICES={place}" in lines) == (len(given[name]) < 2)
        count, port = len(given[name]), 29500 + given[name][0]
        config = folder / "plans" / name / "ds_config.json"
        assert f"torchrun --nproc-per-node {count} --nnodes 1 --master-port {port} " in text
        assert f" train.py {config} " in text and load_config(config) is not None
        settings = json.loads(config.read_text())
        micro, steps = (settings["train_micro_batch_size_per_gpu"],
                        settings["gradient_accumulation_steps"])  # fmt: skip
        assert micro * steps * count == 16 and text.endswith(f" {micro}\n")
    assert not Path("plans/c").exists()


def test_jobs_of_one_node_start_on_their_own_devices_and_ports(folder: Path) -> None:
    """DeepSpeed's launcher would start both on the node's first device, at one port."""
    two = {"most": 1}
    assert decide([job(name, command=[], ranks=two) for name in "ab"]) == 0
    assert sorted(ranks_of().values()) == [[0], [1]]
    for name, ranks in ranks_of().items():
        *_, devices, _, start = Path(f"plans/{name}/start.sh").read_text().splitlines()
        assert devices == f"export CUDA_VISIBLE_DEVICES={ranks[0]}"
        port = 29500 + ranks[0]
        launcher = f"exec torchrun --nnodes 1 --nproc-per-node 1 --master-port {port} -m "
        assert start.startswith(f"{launcher}hybridcomp.run SCRIPT --deepspeed_config /")
    command = ["deepspeed", "--num_gpus", "{node_ranks}", "train.py"]
    assert decide([job("a", command=command, ranks=two)]) == cli.BAD_INPUT


def test_the_next_decision_goes_on_from_the_last(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are not predicted again, jobs that keep their ranks get no files, moves are listed."""
    assert decide([job("a"), job("b")]) == 0
    then = json.loads(Path("plans/next.json").read_text())
    monkeypatch.setattr(rates.Rates, "found", lambda *_: pytest.fail("was predicted already"))
    for start in Path("plans").glob("*/start.sh"):
        start.unlink()
    assert cli.main(["plan", "--jobs", "plans/next.json"]) == 0
    said = capsys.readouterr().out
    assert said.count("keeps its ranks") == 2
    assert "no job starts or changes now; next time give plans/next.json" in said
    assert not [*Path("plans").glob("*/start.sh")] and ranks_of() == {
        one["name"]: one["ranks"]["now"] for one in then["jobs"]
    }
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    short = [{**job("b"), "ranks": {"now": ranks_of()["b"]}}, job("c", samples_left=10)]
    assert decide(short) == 0, "b neither resumes nor has a checkpoint: it keeps its ranks"
    assert ranks_of()["b"] == then["jobs"][1]["ranks"]["now"]
    short[0]["resumes"] = True
    assert decide([short[0]]) == 0
    assert ranks_of()["b"] == [0, 1, 2, 3] and Path("plans/b/start.sh").is_file()


def test_slurm_numbers_nodes_and_waits_for_the_last_of_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decide([job("a")], "--scheduler", "slurm") == 0
    assert "\n  sbatch plans/a/start.sh" in capsys.readouterr().out
    lines = Path("plans/a/start.sh").read_text().splitlines()
    assert lines[:6] == [
        "#!/bin/sh", "#SBATCH --job-name=a", "#SBATCH --dependency=singleton", "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=2",
    ]  # fmt: skip
    assert "--nproc-per-node 2 --nnodes 2 " in lines[-1]


def test_a_job_with_a_checkpoint_goes_on_by_replan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(1, run, [Case("ddp")], str(folder / "saved"), 2)
    command = ["echo", "{node_ranks}", "{ranks}", "{accumulation}", "{checkpoint}"]
    goes_on = job("a", samples=SAMPLES, checkpoint="saved/ddp_none", ranks={"now": [0]},
                  command=command)  # fmt: skip
    assert decide([goes_on]) == 0
    assert ranks_of()["a"] == [0, 1, 2, 3]
    *_, goes_over, then = Path("plans/a/start.sh").read_text().splitlines()
    assert goes_over.startswith("hybridcomp replan saved/ddp_none --ranks 4 --stages 1 ")
    assert cli.main(shlex.split(goes_over)[1:]) == 0
    done = subprocess.run(shlex.split(then)[1:], capture_output=True, text=True, check=True)
    micro = json.loads(Path("plans/a/replanned/replan.json").read_text())["now"]["micro_batch"]
    last = done.stdout.splitlines()[-1]
    assert last == f"2 4 {SAMPLES // 4 // micro} {folder / 'saved/ddp_none/step2'}"
    goes_on["fix"] = {**ALONE, "tensor": 2}
    assert decide([goes_on], "--out", "other") == 2
    assert "a: fix.tensor: found 2; the checkpoint" in capsys.readouterr().err
    assert not Path("other").exists()


def test_a_replay_from_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [job(name, arrival=100.0 * number) for number, name in enumerate("abc")]
    assert decide(jobs, "--replay", pause_seconds=5) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in said[2:]] == [
        "first in, first out", "best fixed size", "greedy", "evolutionary"
    ]  # fmt: skip
    assert not Path("plans").exists(), "a replay writes nothing"


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        ([job("a"), job("a")], "jobs.json: name: found 'a'; expected each one once"),
        ([job("a", model="no.json")], "model: found 'no.json'"),
        ([job("a", samples=6, ranks={"least": 4})], "the samples of a step cannot be divided"),
        ([job("a", samples=6, ranks={"asked": 4})], "a: ranks.asked: found 4; no plan: "),
        ([job("a", ranks={"least": 3, "most": 3})], "a: ranks: found '3 to 3'; jobs get one of 1"),
        ([job("a", ranks={"least": 8})], "a: ranks: found '8 to 4'"),
        ([job("a", ranks={"asked": 3})], "a: ranks.asked: found 3; expected one of 1, 2, 4"),
        ([job("a", ranks={"now": [4]})], "ranks.now: found 4; the cluster has ranks 0 to 3"),
        ([job("a", ranks={"now": [1]}), job("b", ranks={"now": [1]})], "ranks.now: found 1"),
        ([job("a", ranks={"least": 4, "most": 2})], "a: ranks.least: found 4"),
        ([job("../a")], "name: found '../a'; expected up to 64 letters"),
        ([job("a", hope=1)], "jobs.json: jobs[0].hope: found 1; there is no such field"),
        ([job("a", samples_left=0)], "jobs.json: jobs[0].samples_left: found 0"),
        ([job("a", resumes=True, checkpoint="x")], "a: checkpoint: found 'x'; expected only one"),
        ([job("a", base="no.json")], "no.json"),
        ([job("a", fix={"tensr": 1})], "tensr"),
        ([], "jobs.json: jobs: found []"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_nothing_is_written(
    jobs: list[dict[str, Any]], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decide(jobs) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error, error
    assert not Path("plans").exists()


@pytest.mark.parametrize("text", ['{"jobs": [', "[1]", "null", '{"jobs": 3}', "\xff", "{}"])
def test_damaged_files_are_one_line(
    text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("damaged.json").write_bytes(text.encode("latin-1"))
    assert cli.main(["plan", "--jobs", "damaged.json"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "damaged.json" in error, error
    assert not Path("plans").exists()
    Path("plans").mkdir()
    Path("plans/table.json").write_text(text, encoding="latin-1")
    if text != "{}":
        assert decide([job("a")]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "plans/table.json" in error
        assert [*Path("plans").iterdir()] == [Path("plans/table.json")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["config.json"], "MODEL: found 'config.json'; has no effect with --jobs"),
        (["--samples", "4"], "--samples: found 4"),
        (["--fix", "tensor=1"], "--fix: "),
        (["--", "python", "train.py"], "-- COMMAND: "),
    ],
)
def test_what_the_file_says_is_no_option(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decide([job("a")], *words) == 2
    assert said in capsys.readouterr().err and not Path("plans").exists()


def test_nodes_of_several_sizes_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridcomp.tools.plan.jobs.state import Shape

    monkeypatch.setattr(Shape, "of", lambda _: Shape(((0, 1, 2), (3,))))
    assert decide([job("a")]) == 2
    assert "cluster.json: ranks: found [3, 1]; expected as many" in capsys.readouterr().err
