"""Examples in the documents: blocks parse, commands exist and print what is shown."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from pathlib import Path

import pytest

import hybridcomp
from hybridcomp.config import BLOCK, CompressionConfig, load_config
from hybridcomp.job import environment
from hybridcomp.patches.rules import ds_check as check
from hybridcomp.tools.commands import cli
from hybridcomp.tools.plan.jobs import request
from hybridcomp.tools.plan.machines import cluster_file
from tests.docs.pages import DOCS, Fence, commands, fences, prose_of, texts_in_named_commits
from tests.patches.trainers.launched import launch
from tests.paths import ROOT

JSON = list(fences("json"))


def test_there_are_examples() -> None:
    assert len(JSON) > 15 and len(list(commands())) > 50


@pytest.mark.parametrize("fence", JSON, ids=lambda fence: fence.place)
def test_blocks_parse(fence: Fence) -> None:
    """They are plain JSON, as other readers of the files require."""
    found = json.loads(fence.body)
    if "kind" in found:  # a hand-written cluster
        assert cluster_file.parse(found).ranks
    elif "jobs" in found:  # jobs that share a cluster
        assert request.parse(found, fence.place, world_size=16).jobs
    elif BLOCK in found:
        block = load_config(found)
        assert block is not None
        check.check(block, found)  # the block has to act beside the rest of the file
    else:
        CompressionConfig.parse(found)


def test_no_sample_has_comments() -> None:
    """Samples are copied, and HfTrainerDeepSpeedConfig accepts no comments."""
    assert not list(fences("jsonc", "json5", "hjson"))


@pytest.mark.parametrize("fence", list(fences("yaml")), ids=lambda fence: fence.place)
def test_yaml_parses(fence: Fence) -> None:
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(fence.body)
    if "deepspeed_extra_args" in found:
        CompressionConfig.parse(found["deepspeed_extra_args"][BLOCK])


@pytest.mark.parametrize("fence", list(fences("python")), ids=lambda fence: fence.place)
def test_python_parses_and_names_what_is_there(fence: Fence) -> None:
    """What stands behind ``hybridcomp.`` is there after ``import hybridcomp`` alone."""
    if re.match(r"\w+\(.*->", fence.body, re.DOTALL):  # a signature of the interface
        return
    for node in ast.walk(ast.parse(fence.body)):
        match node:
            case ast.Attribute(value=ast.Name(id="hybridcomp"), attr=name):
                assert name in hybridcomp.__all__


def test_blocks_in_words_parse() -> None:
    """Covers complete `{"preset": ...}` and `"dp": {...}` in sentences."""
    tried = 0
    for page in (ROOT / "docs").rglob("*.md"):
        for text in re.findall(r"`(\{\"(?:preset|dp|zero)\".*?\})`", prose_of(page)):
            CompressionConfig.parse(json.loads(text))
            tried += 1
        for text in re.findall(r"`(\{\"(?:codec|error_bound)\".*?\}+)`", prose_of(page)):
            CompressionConfig.parse({"zero": json.loads(text)})
            tried += 1
    assert tried >= 4


def hybridcomp_commands() -> list[list[str]]:
    """Return the arguments of every `hybridcomp X` in commands and sentences."""
    lines = [line for _, line in commands() if line.startswith("hybridcomp ")]
    pages = (ROOT / "docs").rglob("*.md")
    for page in (*pages, ROOT / "README.md"):
        lines += re.findall(r"`(hybridcomp [a-z].*?)`", prose_of(page))
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Commands and options before `--` exist on the command line."""
    wanted: dict[str, set[str]] = {}
    for command, *rest in hybridcomp_commands():
        own = rest[: rest.index("--")] if "--" in rest else rest
        wanted.setdefault(command, set()).update(word for word in own if word.startswith("--"))
    assert {"validate", "doctor", "compare", "pays", "schema", "seams"} <= wanted.keys()
    for command, options in wanted.items():
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--help"])
        assert ended.value.code == 0, command
        text = capsys.readouterr().out
        for option in options:
            assert option in text, f"hybridcomp {command} {option}"


#: options that an upstream's parser adds to a script
ADDED = {"--deepspeed_config", "--deepspeed"}
#: scripts whose options are all an upstream's
FOREIGN = {"train_torchtitan.py"}


OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def started() -> list[tuple[Fence, Path, list[str]]]:
    """Return every script of this repository that a command starts, with its arguments."""
    found = []
    for fence, line in commands():
        words = shlex.split(line, comments=True) if "scripts/" in line else []
        for place, word in enumerate(words):
            path = ROOT / word
            if word.startswith("scripts/") and path.is_file() and path.suffix in (".py", ""):
                found.append((fence, path, words[place + 1 :]))
                break
    return found


def own_options(script: Path) -> set[str]:
    """Return the options in a script's text, and of the adjacent modules it imports."""
    seen: set[Path] = set()
    waiting, options = [script], set(ADDED)
    while waiting:
        path = waiting.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        text = path.read_text(encoding="utf-8")
        options |= set(OPTION.findall(text))
        for name in re.findall(r"^ *(?:from|import) ([\w.]+)", text, re.MULTILINE):
            below = Path(*name.split(".")).with_suffix(".py")
            waiting += [ROOT / "scripts" / below, ROOT / "scripts" / "examples" / below]
    return options


def test_scripts_know_the_options_that_pages_give_them() -> None:
    tried = 0
    for fence, script, arguments in started():
        given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
        if script.name not in FOREIGN and "--" not in arguments:
            foreign = given - own_options(script)
            if foreign:  # the page may name a commit that still has the measurement's script
                then = texts_in_named_commits(fence.page, str(script.relative_to(ROOT)))
                known = any(text is None or foreign & set(OPTION.findall(text)) for text in then)
                assert known, f"{fence.place}: {script.name} {foreign}"
            tried += len(given)
    assert tried > 60


def ranks_of(line: str) -> int | None:
    """Return a launcher's ranks on one machine; None: no launcher, or several machines."""
    found = re.search(r"--(?:num_gpus|nproc[-_]per[-_]node)[ =](\d+)", line)
    alone = found is not None and not re.search(r"--nnodes|--hostfile|srun", line)
    return int(found[1]) if found is not None and alone else None


def test_commands_of_the_training_example_fit_their_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Includes four and eight ranks: arguments, layout and, if it exists, the file."""
    pytest.importorskip("deepspeed")
    import train_gpt
    from gpt import layouts

    found = set()
    for _, line in commands():
        ranks = ranks_of(line)
        if ranks is None or "scripts/examples/train_gpt.py" not in line:
            continue
        words = shlex.split(line.partition("train_gpt.py")[2], comments=True)
        if any("{" in word for word in words) or "..." in words:
            continue
        arguments = train_gpt.parse(words)
        file = ROOT / str(arguments.deepspeed_config)
        settings = json.loads(file.read_text()) if file.is_file() else {}
        layouts.check(arguments, settings)
        copies = arguments.tp * arguments.pp * arguments.cp * arguments.tp2d**2
        assert ranks % copies == 0, line
        if not file.is_file():  # the reader's, or in a fence of the page
            assert not str(file).startswith(str(ROOT / "configs")), line
        found.add(ranks)
    assert found >= {2, 4, 8}


def test_blocks_and_files_of_commands_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    """Covers arguments of ``--block`` and ``--budget``, and files that a command names."""
    files, tried = set(), 0
    for _, line in commands():
        words = shlex.split(line, comments=True) if re.search(r"\{\"|\.json", line) else []
        for option, word in zip(words, words[1:], strict=False):
            if word.startswith('{"'):
                tried += 1
                found = json.loads(word)
                if option == "--block":
                    CompressionConfig.parse(found)
        files |= {word.rpartition("=")[2] for word in words if word.endswith(".json")}
    for name in sorted(name for name in files if (ROOT / name).is_file()):
        tried += 1
        assert cli.main(["validate", str(ROOT / name)]) == 0, (name, capsys.readouterr())
    assert tried > 10


def test_pages_agree_that_the_preset_feeds_nothing_back() -> None:
    """Wherever a page says that rounding errors are added later, it names the key for that."""
    block = CompressionConfig.parse({"preset": "recommended"})
    assert not block.error_feedback("dp")
    pages = [page for page in (ROOT / "docs").glob("*.md") if "recommended" in page.read_text()]
    assert len(pages) > 10
    for page in pages:
        for line in page.read_text(encoding="utf-8").splitlines():
            if "added to the next reduction" in line:
                assert "error_feedback" in line, f"{page.name}: {line}"


def test_what_pays_prints_is_what_the_page_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    page = ROOT / "docs" / "pays.md"
    own = [fence for fence in fences("") if fence.page == page]
    tried = 0
    for command, output in zip(own, own[1:], strict=False):
        if command.body.startswith("hybridcomp pays"):
            assert cli.main(shlex.split(command.body)[1:]) == 0
            printed = " ".join(capsys.readouterr().out.split())
            shown = " ".join(output.body.removesuffix("...\n").split())
            assert shown in printed, command.body
            tried += 1
    assert tried == 4


def test_what_pays_says_of_four_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the page's file, and the figures of ZeRO 1 in the sentence below it."""
    page = ROOT / "docs" / "four_nodes.md"
    settings = next(fence for fence in fences("json") if fence.page == page)
    (tmp_path / "ds_config.json").write_text(settings.body)
    monkeypatch.chdir(tmp_path)
    own = [fence.body for fence in fences("") if fence.page == page]
    command = shlex.split(next(body for body in own if body.startswith("hybridcomp pays")))[1:]
    assert cli.main(command) == 0
    assert capsys.readouterr().out in own
    assert cli.main([*command, "--stage", "1"]) == 0
    figures = re.findall(r"[\d.]+ MB|[\d.]+ times as fast", capsys.readouterr().out)
    prose = " ".join(prose_of(page).split())
    assert all(figure in prose for figure in figures[-3:]), figures


def test_launcher_lines_name_the_module() -> None:
    """Every launcher line with a block or with hybridcomp's files arms the patches."""
    for fence, line in commands():
        if "baseline" in line or line.startswith("-"):
            continue
        if re.match(r"(deepspeed(?! =)|torchrun|srun torchrun|accelerate launch) ", line):
            kept = "hybridcomp.run" in line or "compare --launch" in fence.body
            kept |= (
                re.search(r"(-m|--module) hybridcomp.tools.measure", line) is not None
            )  # trains nothing compressed
            kept |= "scripts/examples/" in line and "--block" in line  # attached by the script
            kept |= "scripts/examples/rollouts_" in line  # publishes, and compresses nothing
            kept |= "scripts/benchmarks/" in line  # measures layers that encode by themselves
            assert kept, f"{fence.place}: {line}"


ENGINES = sorted(page for page in DOCS.glob("engines/*.md"))
#: pages whose first commands tests/patches/trainers runs
TRAINERS = ("huggingface", "lightning", "torchtitan", "trl")
RUN = [page for page in ENGINES if page.stem not in TRAINERS]


def first_commands(page: Path) -> Fence:
    """Return a page's first example."""
    return next(fence for fence in fences("", "json", "python", "yaml", "diff", "bash", "sh")
                if fence.page == page)  # fmt: skip


@pytest.mark.parametrize("page", ENGINES, ids=lambda page: page.stem)
def test_a_page_of_an_engine_begins_with_a_command_for_two_cpu_ranks(page: Path) -> None:
    found = first_commands(page)
    assert found.kind == "", f"{page.name} begins with {found.place}"
    starting = [line for fence, line in commands() if fence == found and "prepare" not in line]
    cpus = r"DS_ACCELERATOR=cpu .*(2 -m hybridcomp|--num_gpus 2)|nproc-per-node 2 .*--block"
    alone = r"HYBRIDCOMP_NEOX_CPU=1|HYBRIDCOMP_CONFIG=scripts/examples/.* --nproc-per-node 2"
    assert starting and all(re.search(f"{cpus}|{alone}", line) for line in starting), starting


@pytest.mark.nightly
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_first_commands_of_an_engine_train(page: Path, tmp_path: Path) -> None:
    text = first_commands(page).body
    if page.stem == "neox":
        home = os.environ.get("GPT_NEOX_HOME") or pytest.skip("needs GPT_NEOX_HOME")
        text = text.replace("/path/to/gpt-neox", home)
    elif page.stem == "megatron":
        pytest.importorskip("megatron.core")
    if page.stem != "fsdp2_ddp":
        pytest.importorskip("deepspeed")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    said = launch(tmp_path, text, TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    assert re.search(r"\[hybridcomp\] step 10: \w+(\.\w+)? blockint", said), said[-4000:]


VARIABLE = re.compile(r"\bHYBRIDCOMP_[A-Z_]*[A-Z]\b")


def test_no_hint_asks_an_index_for_hybridcomp() -> None:
    """Extras are installed in a clone, as ``errors.install_hint`` says."""
    paths = [path for name in ("*.py", "*.md", "*.yml", "*.yaml") for path in ROOT.rglob(name)]
    asking = re.compile(r"pip install (-U )?['\"]?hybridcomp")
    own = (path for path in paths if not {".git", "site-packages"} & set(path.parts))
    assert [str(path) for path in own if asking.search(path.read_text(errors="replace"))] == []


def test_environment_variables_are_known() -> None:
    known = {*environment.VARIABLES, *environment.CHECKOUT}
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        assert set(VARIABLE.findall(page.read_text(encoding="utf-8"))) <= known, page
    table = re.findall(
        r"^\| `(HYBRIDCOMP_\w+)` \|",
        (ROOT / "docs" / "commands.md").read_text("utf-8"),
        re.MULTILINE,
    )
    assert tuple(table) == environment.VARIABLES


#: tests that misspell a key
MISSPELT = ("test_environment.py", "test_run.py")


def test_no_variable_is_read_that_the_table_lacks() -> None:
    known = {*environment.VARIABLES, *environment.CHECKOUT}
    for folder in ("hybridcomp", "patches", "scripts", "tests", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in (".py", "") and path.name not in MISSPELT:
                text = path.read_text(encoding="utf-8", errors="replace")
                assert set(VARIABLE.findall(text)) <= known, path
