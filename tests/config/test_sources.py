"""Sources of a block, and errors about files without one."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest

from hybridcomp.config import load_config
from hybridcomp.errors import ConfigError
from hybridcomp.tools.plan.answer.base import base_of
from hybridcomp.tools.plan.models.reading import read_model
from tests.config.common import parse


def test_load_config_sources(tmp_path: Path) -> None:
    ds_json = {"train_batch_size": 8, "compression": {"dp": "bf16"}}
    expected = parse({"dp": "bf16"}).digest()
    text = json.dumps(ds_json)
    path = tmp_path / "ds.json"
    path.write_text(text)
    commented = tmp_path / "ds.hjson"
    commented.write_text(
        '{ # a comment\n train_batch_size: 8\n "compression": {"dp": "bf16"} // another\n}'
    )
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for source in (ds_json, path, str(path), commented, encoded):
        config = load_config(source)
        assert config is not None
        assert config.digest() == expected


def test_no_block_and_disabled_block() -> None:
    assert load_config({"train_batch_size": 8}) is None
    assert load_config({"compression": {"enabled": False, "preset": "recommended"}}) is None
    with pytest.raises(ConfigError, match=r"compression\.dp\.codec"):
        load_config({"compression": {"enabled": False, "dp": "rdx"}})


@pytest.mark.parametrize(
    ("text", "key", "fragment"),
    [
        (
            '{"compression": {"dp": {"codec": "bf16", "codec": "fp16"}}}',
            "compression.dp.codec",
            "2",
        ),
        ('{"a": 1, "a": 2, "a": 3}', "a", "3 times"),
        ("{", "ds.json", "valid JSON"),
        ("[1, 2]", "ds.json", "JSON object"),
        ('{"compresion": {"dp": "bf16"}}', "compresion", "did you mean 'compression'"),
        ('{"Compression": {"dp": "bf16"}}', "Compression", "did you mean 'compression'"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, key: str, fragment: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.key.endswith(key)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sources_that_are_none(tmp_path: Path) -> None:
    for source in (tmp_path / "missing.json", "no/such/file.json", "%%%", "A" * 5000):
        with pytest.raises(ConfigError):
            load_config(source)
    binary = tmp_path / "ds.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(binary)
    with pytest.raises(ConfigError, match=r'write \{"preset": "recommended"\}'):
        load_config("recommended")


def test_advice_about_yaml_is_no_found_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "neox.yml"
    path.write_text("num_layers: 4\n")
    monkeypatch.setitem(sys.modules, "yaml", None)  # as if pyyaml were not installed
    for read in (load_config, read_model, lambda file: base_of(file, "neox")):
        with pytest.raises(ConfigError) as caught:
            read(path)
        said = str(caught.value)
        assert "neox.yml: found a YAML file; pyyaml, which reads it, is not installed" in said
        assert said.endswith("pip install pyyaml")
    monkeypatch.undo()
    path.write_text("a: [1\n")
    for read in (load_config, read_model, lambda file: base_of(file, "neox")):
        with pytest.raises(ConfigError, match="expected valid YAML"):
            read(path)
    path.write_text("compression: &block\n  dp: *block\n")
    with pytest.raises(ConfigError, match="settings that contain themselves"):
        load_config(path)
