"""GPT-NeoX's launcher without GPT-NeoX: configurations, messages about mistakes, shims."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.scripts_on_ranks import run_each
from tests.selection import by_day

yaml = pytest.importorskip("yaml")

SCRIPT = ROOT / "patches" / "neox" / "train_neox.py"
CONFIGS = sorted((ROOT / "configs" / "neox").glob("*.yml"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Create a folder that passes for a GPT-NeoX checkout; its scripts print that they ran."""
    home = tmp_path / "gpt-neox"
    (home / "megatron" / "neox_arguments").mkdir(parents=True)
    for name in ("train", "deepy"):
        text = "import sys\nfrom hybridcomp.patches import registry\n"
        text += f"print('{name}', sys.argv, __name__, registry.ARMED.armed)\n"
        (home / f"{name}.py").write_text(text)
    return home


def start(
    *arguments: str, cwd: Path, program: tuple[str, ...] = (str(SCRIPT),), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python's ``program`` on ``arguments`` with only the repository on the path."""
    environment = {k: v for k, v in os.environ.items() if k != "GPT_NEOX_HOME"}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    (found,) = run_each([[*program, *arguments]], cwd, environment)
    return found


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_configuration_is_complete_and_its_block_acts(file: Path) -> None:
    from hybridcomp.config import load_config
    from hybridcomp.patches.neox.configuration import check

    check([file])
    read = yaml.safe_load(file.read_text())
    block = load_config(read["deepspeed_extra_args"])
    assert block is not None and any(block.active(name) for name in ("dp", "tp"))
    assert isinstance(read["optimizer"]["params"]["eps"], float)
    for needed in (
        "data_path",
        "tokenizer_type",
        "train_iters",
        "num_layers",
        "distributed_backend",
    ):
        assert needed in read
    assert f"`neox/{file.name}`" in (ROOT / "configs" / "README.md").read_text()


def test_20b_is_the_layout_of_the_paper() -> None:
    from hybridcomp.config import load_config

    read = yaml.safe_load((ROOT / "configs" / "neox" / "20B.yml").read_text())
    assert (read["pipe_parallel_size"], read["model_parallel_size"]) == (4, 2)
    assert read["zero_optimization"]["stage"] == 1
    block = load_config(read["deepspeed_extra_args"])
    assert block is not None and all(block.active(name) for name in ("dp", "zero", "tp", "pp"))


MISTAKES: list[tuple[str, str]] = [
    (
        '{"num_layers": 2, "compression": {"dp": "bf16"}}',
        'at the top level, which GPT-NeoX does not know; put it under "deepspeed_extra_args": '
        '{"compression": {...}}',
    ),
    (
        '{"optimizer": {"type": "Adam", "params": {"eps": 1e-08}}}',
        "optimizer.params.eps: found 1e-08, which YAML reads as text; write it with a dot: 1.0e-08",
    ),
    (
        '{"optimizer": {"params": {"betas": [0.9, 95e-2]}}}',
        "optimizer.params.betas[1]: found 95e-2",
    ),
    (
        '{"deepspeed_extra_args": {"compression": {"dq": "bf16"}}}',
        "deepspeed_extra_args.compression.dq: found",
    ),
    (
        '{"model_parallel_size": 1, "deepspeed_extra_args": {"compression": {"tp": "bf16"}}}',
        "deepspeed_extra_args.compression.tp: found",
    ),
    (
        '{"model_parallel_size": 2, "te_mha": true, '
        '"deepspeed_extra_args": {"compression": {"tp": "bf16"}}}',
        "they communicate inside Transformer Engine",
    ),
    ('{"num_layers": [}', "no YAML"),
    ("- 1", "expected keys and values, found list"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[m[-30:] for _, m in MISTAKES])
def test_mistake_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    from hybridcomp.patches.neox.configuration import Problem, check

    (tmp_path / "job.yml").write_text(text)
    with pytest.raises(Problem) as caught:
        check([tmp_path / "job.yml"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_block_is_held_against_all_files_together(tmp_path: Path) -> None:
    from hybridcomp.patches.neox.configuration import Problem, check

    (tmp_path / "a.yml").write_text('{"pipe-parallel-size": 2, "model_parallel_size": 2}')
    (tmp_path / "b.yml").write_text(
        '{"precision": "bfloat16", "deepspeed_extra_args": {"compression": {"pp": "bf16"}}}'
    )
    check([tmp_path / "a.yml", tmp_path / "b.yml"])
    with pytest.raises(Problem, match="build the model as a PipelineModule"):
        check([tmp_path / "b.yml"])


def test_find_files_as_deepy_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridcomp.patches.neox.configuration import find_files

    for name in ("a.yml", "b.json"):
        (tmp_path / name).write_text("{}")
    assert find_files(["-d", str(tmp_path), "a", "b.json", "--wandb_team", "c"]) == [
        tmp_path / "a.yml", tmp_path / "b.json",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert find_files([f"--conf_dir={tmp_path}", "b.json"]) == [tmp_path / "b.json"]
    assert find_files(["a.yml"]) == [Path("a.yml")]


def test_missing_checkout_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hybridcomp.patches.neox.train_neox import main

    def ended(*arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        return end.value.code, capsys.readouterr().err

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPT_NEOX_HOME", raising=False)
    code, told = ended("job.yml")
    assert code == 2 and told.count("\n") == 1
    assert f"the current folder is {tmp_path}, which is no GPT-NeoX checkout" in told
    monkeypatch.setenv("GPT_NEOX_HOME", "/nowhere")
    assert "GPT_NEOX_HOME is /nowhere, which is no GPT-NeoX checkout" in ended("job.yml")[1]
    assert (ended()[0], ended("--help")[0]) == (2, 0)


def test_worker_runs_train_py_with_the_patches_armed(checkout: Path, tmp_path: Path) -> None:
    arguments = ("--local_rank=1", "--deepspeed_config", "e30=", "--megatron_config", "e30=")
    found = start(*arguments, cwd=checkout)
    assert found.returncode == 0, found.stderr
    (line,) = [text for text in found.stdout.splitlines() if text.startswith("train ")]
    assert line.endswith("__main__ True")
    assert str(list(arguments))[1:-1] in line


def test_the_module_launches_deepy_with_the_file(checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    module = ("-m", "hybridcomp.patches.neox")
    found = start("--path", cwd=tmp_path, program=module)
    assert (found.returncode, found.stdout) == (0, f"{SCRIPT}\n")
    (tmp_path / "job.yml").write_text("{}")
    home = {"GPT_NEOX_HOME": str(checkout), "DS_ACCELERATOR": "cpu", "HYBRIDCOMP_CONFIG": "x.json"}
    with (checkout / "deepy.py").open("a") as deepy:
        deepy.write("from deepspeed.launcher import runner\nprint(runner.EXPORT_ENVS[-2:])\n")
    found = start("job.yml", cwd=tmp_path, program=module, **home)
    assert found.returncode == 0, found.stderr
    assert found.stdout.endswith("['GPT_NEOX_HOME', 'HYBRIDCOMP_CONFIG']\n"), "to other machines"
    expected = [str(checkout / "deepy.py"), str(SCRIPT), "job.yml"]
    assert f"deepy {expected} __main__ False" in found.stdout
    (tmp_path / "job.yml").write_text('{"compression": {}}')
    found = start("job.yml", cwd=tmp_path, program=(str(SCRIPT),), **home)
    assert found.returncode == 2 and "deepy " not in found.stdout
    assert "train_neox.py: job.yml:" in found.stderr.splitlines()[-1]


def test_modules_beside_the_file_do_not_hide_those_of_the_checkout(checkout: Path) -> None:
    (checkout / "configuration.py").write_text("print('of the checkout')")
    (checkout / "train.py").write_text("import configuration")
    found = start("--megatron_config", "e30=", cwd=checkout)
    assert (found.returncode, found.stdout) == (0, "of the checkout\n"), found.stderr


@pytest.mark.parametrize(
    ("script", "words"),
    by_day(
        [("deepy", []), ("train", ["--megatron_config", "x"])],
        [("train", ["--megatron_config", "x"])],
    ),
    ids=str,
)
def test_a_package_that_the_checkout_lacks_is_one_line(
    checkout: Path, script: str, words: list[str]
) -> None:
    """For launcher and rank, in a file that they import; named as in GPT-NeoX's requirements."""
    (checkout / "requirements").mkdir()
    (checkout / "requirements" / "requirements.txt").write_text("six\npkg_of_neox==1.2\n")
    (checkout / "megatron" / "__init__.py").write_text("import pkg_of_neox.part\n")
    (checkout / f"{script}.py").write_text("import megatron\n")
    done = start(*words or ["a.yml"], cwd=checkout)
    assert done.returncode == 2
    told = "GPT-NeoX needs pkg_of_neox: pip install pkg_of_neox (its requirements/requirements.txt)"
    assert done.stderr.splitlines() == [f"train_neox.py: {told}"]


def test_a_module_of_the_checkout_itself_is_nothing_to_install(checkout: Path) -> None:
    (checkout / "deepy.py").write_text("import megatron.lost\n")
    done = start("a.yml", cwd=checkout)
    assert done.returncode == 1 and "No module named 'megatron.lost'" in done.stderr


def test_packages_with_another_name_are_named(tmp_path: Path) -> None:
    from hybridcomp.patches.neox.train_neox import needs

    told = "GPT-NeoX needs pkg_resources: pip install 'setuptools<81' (none of its requirements/"
    assert needs("pkg_resources", tmp_path).startswith(told)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "flash.txt").write_text("# faster\nflash-attn>=2 ; extra\n")
    assert needs("flash_attn", tmp_path).endswith("flash_attn (its requirements/flash.txt)")


def test_the_extra_brings_what_the_checkout_imports() -> None:
    """``pkg_resources`` left setuptools at 81; the others are imported, or needed to compile."""
    (row,) = re.findall(r"^neox = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert '"setuptools<81"' in row
    named = set(re.findall(r'"([\w-]+)[<>=\[]', row))
    assert named >= {
        "sentencepiece",
        "pybind11",
        "tokenizers",
        "transformers",
        "pyyaml",
        "requests",
    }


@pytest.mark.parametrize(
    ("value", "found"), [("1", True), ("true", True), ("0", False), ("", False), (None, False)]
)
def test_any_word_but_0_asks_for_cpus(
    monkeypatch: pytest.MonkeyPatch, value: str | None, found: bool
) -> None:
    from hybridcomp.patches.neox import train_neox

    monkeypatch.delenv("HYBRIDCOMP_NEOX_CPU", raising=False)
    if value is not None:
        monkeypatch.setenv("HYBRIDCOMP_NEOX_CPU", value)
    assert train_neox.on_cpu() is found
