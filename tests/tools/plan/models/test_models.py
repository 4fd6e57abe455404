"""Models of the planner: known sizes, and closed forms against torch's traces."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt.model import GPT
from gpt.weights import ModelConfig
from torch import Tensor, nn

from hybridcomp.errors import ConfigError, HybridcompError
from hybridcomp.tools.plan.models import neox
from hybridcomp.tools.plan.models.arguments import train_gpt
from hybridcomp.tools.plan.models.decoder import Decoder
from hybridcomp.tools.plan.models.huggingface import decoder
from hybridcomp.tools.plan.models.model import BatchShape, flops_of
from hybridcomp.tools.plan.models.reading import read_model
from hybridcomp.tools.plan.models.traced import TracedModel
from tests.paths import ROOT

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
         "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000}  # fmt: skip
#: parameters published with the models; of the last two, those that transformers builds
PUBLISHED: list[tuple[int, dict[str, Any]]] = [
    (6738415616, LLAMA),
    (8030261248, {**LLAMA, "num_key_value_heads": 8, "intermediate_size": 14336,
                  "vocab_size": 128256}),
    (46702792704, {**LLAMA, "model_type": "mixtral", "num_key_value_heads": 8,
                   "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}),
    (124439808, {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
                 "vocab_size": 50257, "n_positions": 1024}),
    (7615616512, {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
                  "num_attention_heads": 28, "num_key_value_heads": 4,
                  "intermediate_size": 18944, "vocab_size": 152064}),
    (14315784192, {"model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24,
                   "num_attention_heads": 16, "intermediate_size": 5632,
                   "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
                   "vocab_size": 151936, "num_experts": 60, "num_experts_per_tok": 4}),
    (596049920, {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
                 "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                 "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True}),
    (162322944, {"model_type": "gpt_neox", "hidden_size": 768, "num_hidden_layers": 12,
                 "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 50304}),
    (201984, {"model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 800,
              "attention_bias": False}),
    (250944, {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
              "intermediate_size": 256, "vocab_size": 800, "attention_bias": True}),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "config"), PUBLISHED)
def test_published_sizes(parameters: int, config: dict[str, Any], tmp_path: Path) -> None:
    found = decoder(config, "model")
    assert found.parameters == parameters
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path).parameters == parameters
    for shape in (BatchShape(1, 1), BatchShape(2, 32, tensor=2), BatchShape(2, 32, mesh=2)):
        for layer in found.layers(shape):
            assert sum(layer.tensors) == pytest.approx(layer.parameters)
            assert sum(layer.expert_tensors) == pytest.approx(layer.expert_parameters)


@pytest.mark.parametrize(("norm", "width"), [("rmsnorm", 4), ("layernorm", 2)])
def test_closed_forms_are_what_torch_traces(norm: Any, width: int) -> None:
    config = ModelConfig(512, layers=2, width=128, heads=4, norm=norm)
    line = f"--layers 2 --width 128 --heads 4 --vocabulary 512 --norm {norm}"
    closed = train_gpt(line)
    shape = BatchShape(4, 64, width)
    traced = TracedModel("traced", lambda: GPT(config))
    seen, said = traced.layers(shape), closed.layers(shape)
    assert traced.is_chain and traced.parameters == closed.parameters
    # the example's norm is a separate layer, and its loss is outside the module
    assert [layer.parameters for layer in seen[:3]] == [layer.parameters for layer in said[:3]]
    block, form = seen[2], said[2]
    assert sorted(block.tensors)[-2:] == sorted(form.tensors)[-2:]  # both MLP matrices
    assert sum(block.tensors) == sum(form.tensors) == block.parameters
    assert block.flops == form.flops
    assert block.backward_flops == pytest.approx(form.backward_flops, rel=0.01)
    assert block.kept_nbytes == pytest.approx(form.kept_nbytes, rel=0.01)
    assert seen[-1].flops == said[-1].flops


def test_what_degrees_do_to_a_layer() -> None:
    model = Decoder("m", 64, 2, 8, 8, 8, 256, 96)
    whole, cut = model.layers(BatchShape(2, 32))[1], model.layers(BatchShape(2, 32, tensor=4))[1]
    assert cut.flops == whole.flops / 4
    assert whole.forward.tensor == () and cut.forward.tensor == (2 * 32 * 64,) * 2
    sequence = model.layers(BatchShape(2, 32, tensor=4, sequence=True))[1]
    assert sequence.kept_nbytes == pytest.approx(whole.kept_nbytes / 4)
    assert sequence.output == whole.output / 4
    context = model.layers(BatchShape(2, 32, context=2))[1]
    assert context.forward.context == (32 * 3 * 64, 32 * 64)
    assert model.refuses(BatchShape(1, 32, tensor=3)) is not None
    assert model.refuses(BatchShape(1, 32, tensor=4)) is None
    assert flops_of(model.layers(BatchShape(2, 32))) == 2 * flops_of(
        model.layers(BatchShape(1, 32))
    )


def test_mixtures_move_tokens_to_their_experts() -> None:
    mixture = Decoder("m", 64, 2, 8, 8, 8, 256, 96, gated=True, experts=8, per_token=2)
    alone, spread = (
        mixture.layers(BatchShape(1, 16))[1],
        mixture.layers(BatchShape(1, 16, expert=4))[1],
    )
    assert alone.expert_parameters == 8 * 3 * 64 * 256
    assert spread.expert_parameters == alone.expert_parameters / 4
    assert spread.forward.expert == (16 * 2 * 64,) * 2 and not alone.forward.expert
    assert mixture.refuses(BatchShape(1, 16, expert=3)) is not None


def test_files_and_lines_say_the_same() -> None:
    pytest.importorskip("yaml")
    neox = read_model(ROOT / "configs" / "neox" / "20B.yml")
    line = ("--num-layers 44 --hidden-size 6144 --num-attention-heads 64 --padded-vocab-size 50432"
            " --seq-length 2048 --position-embedding-type rope"
            " --untie-embeddings-and-output-weights")  # fmt: skip
    megatron = read_model("pretrain_gpt.py " + line)
    assert neox.parameters == megatron.parameters == pytest.approx(20.55e9, rel=1e-3)
    assert read_model(line.split()).parameters == megatron.parameters
    example = read_model("train_gpt.py --layers 2 --width 64 --vocabulary 100 --tie-embeddings")
    built = GPT(ModelConfig(100, layers=2, width=64, tied=True))
    assert example.parameters == sum(p.numel() for p in built.parameters())


class Towers(nn.Module):
    """Two towers of two layers whose outputs meet: not a chain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.right = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.top = nn.Linear(2 * width, 1)

    def forward(self, values: Tensor) -> Tensor:
        left = right = values
        for layer in self.left:
            left = layer(left).relu()
        for layer in self.right:
            right = layer(right).relu()
        out: Tensor = self.top(torch.cat([left, right], dim=-1))
        return out


def towers(width: int = 8) -> tuple[nn.Module, Any]:
    """A valid result of ``package:callable``: a module, and a function that makes its inputs."""
    return Towers(width), lambda samples, length: (torch.zeros(samples, width),)


def wide_towers() -> tuple[nn.Module, Any]:
    """Towers whose layers take longer than a message."""
    return towers(1024)


def peeking() -> nn.Module:
    """A module that reads its values, which do not exist on meta tensors."""

    class Peeking(nn.Linear):
        def forward(self, values: Tensor) -> Tensor:
            return super().forward(values.float() * float(values.float().sum()))

    return Peeking(4, 4)


def failing() -> nn.Module:
    raise RuntimeError("no such weights\nlook elsewhere")


def needing(width: int) -> nn.Module:
    return nn.Linear(width, width)


def empty() -> nn.Module:
    return nn.Sequential()


def pair() -> Any:
    return nn.Linear(4, 4), (1, 4)


def test_any_module_is_traced_without_storage() -> None:
    model = read_model(f"{__name__}:towers")
    layers = model.layers(BatchShape(3, 1, 4))
    assert not model.is_chain and model.parameters == 4 * 72 + 17
    assert [layer.inputs for layer in layers] == [(), (0,), (), (2,), (1, 3)]
    assert layers[-1].flops == 2 * 3 * 16 and layers[0].output == 3 * 8
    assert "tensor 2" in str(model.refuses(BatchShape(1, 1, tensor=2)))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (f"{__name__}:peeking", "cannot be traced"),
        (f"{__name__}:nothing", "expected package:callable"),
        (f"{__name__}:failing", "builds no model: RuntimeError: no such weights; expected"),
        (f"{__name__}:needing", "builds no model: TypeError: .*missing 1 required"),
        (f"{__name__}:empty", "cannot be traced: TypeError: the module is empty"),
        (f"{__name__}:pair", "expected a module and a callable for its inputs"),
        ("", "found no such file"),
        (
            "--num-layers 2 --hidden-size 64 --num-attention-heads 7 --vocab-size 9",
            "num_attention_heads: found 7; expected a divisor of the hidden width 64",
        ),
        (
            "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --vocab-size 9 --swiglu "
            "--group-query-attention --num-query-groups 3",
            "num_query_groups: found 3; expected a divisor of the 8 heads",
        ),
        ("train_gpt.py --layers 2 --vocabulary 9 --width 100 --heads 3", "divisor of the hidden"),
        ("train_gpt.py --layers -2 --vocabulary 9", "layers: found -2"),
        ("no/such/file.json", "found no such file"),
        ("--hidden 3", "expected Megatron's arguments"),
        ("--num-layers 2", "hidden_size: found None; expected a number above 0"),
        ("train_gpt.py --layers 2", "add --vocabulary N"),
    ],
)
def test_what_cannot_be_read_is_told(source: str, said: str) -> None:
    with pytest.raises(HybridcompError, match=said):
        read_model(source).layers(BatchShape(1, 4, 4))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden_size": 4096.5}, "hidden_size: found 4096.5; expected a whole number"),
        ({"hidden_size": float("nan")}, "hidden_size: found nan; expected a number above 0"),
        ({"hidden_size": "4096"}, "hidden_size: found '4096'; expected a number above 0"),
        ({"num_attention_heads": 15}, "num_attention_heads: found 15; expected a divisor of the"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: found 5; expected a divisor of the 32"),
        ({"num_key_value_heads": "x"}, "num_key_value_heads: found 'x'; expected a number"),
        ({"head_dim": "x"}, "head_dim: found 'x'; expected a number"),
        ({"model_type": "gpt_neox", "num_attention_heads": 15}, "num_attention_heads: found 15"),
        ({"model_type": "mamba"}, "expected one of llama, mistral"),
        ({"model_type": "gpt2", "intermediate_size": [1]}, "intermediate_size: found \\[1\\]"),
    ],
)
def test_sizes_that_are_none_are_told(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decoder({**LLAMA, **changed}, "model")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ({"num-kv-heads": 3}, "num_kv_heads: found 3; expected a divisor of the 4 heads"),
        ({"intermediate_size": "wide"}, "intermediate_size: found 'wide'; expected a number"),
        ({"model-parallel-size": "two"}, "model_parallel_size: found 'two'"),
        ({"num-attention-heads": 5}, "num_attention_heads: found 5; expected a divisor"),
    ],
)
def test_sizes_of_a_yaml_that_are_none_are_told(lines: dict[str, Any], said: str) -> None:
    known = {"hidden-size": 64, "num-layers": 2, "num-attention-heads": 4, "pos-emb": "rotary"}
    assert neox.decoder(known, "file").heads == 4
    with pytest.raises(ConfigError, match=said):
        neox.decoder({**known, **lines}, "file")


#: values of GPT-NeoX's configurations that determine a size, and the published size: of Pythia,
#: GPT-NeoX-20B, LLaMA and Llama 2; for the others, the size of GPT-NeoX's layers
SHIPPED: list[tuple[str, int, dict[str, Any]]] = [
    (name, parameters, {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "pos_emb": "rotary", "no_weight_tying": True, "max_position_embeddings": 2048,
        "model_parallel_size": tensor,
    })
    for name, parameters, layers, hidden, heads, tensor in [
        ("pythia/14M", 14067712, 6, 128, 4, 1), ("pythia/31M", 30494720, 6, 256, 8, 1),
        ("pythia/70M, 19M", 70426624, 6, 512, 8, 1), ("49M", 113625600, 10, 640, 10, 1),
        ("pythia/160M, 125M, 125M-json, bf16_125M, bnb_125M, slurm_125M", 162322944, 12, 768, 12,
         1),
        ("pythia/410M, 350M", 405334016, 24, 1024, 16, 1), ("760M", 834493440, 24, 1536, 16, 1),
        ("pythia/1B, 800M", 1011781632, 16, 2048, 8, 1),
        ("pythia/1-4B, 1-3B, 1-3B-transformer-engine", 1414647808, 24, 2048, 16, 1),
        ("pythia/2-8B, 2-7B", 2775208960, 32, 2560, 32, 1),
        ("pythia/6-9B, finetuning_configs/6-9B", 6857302016, 32, 4096, 32, 2),
        ("6-7B", 6857302016, 32, 4096, 32, 1),
        ("pythia/12B", 11846072320, 36, 5120, 40, 4), ("13B", 13100697600, 40, 5120, 40, 1),
        ("20B", 20554567680, 44, 6144, 64, 2), ("175B", 175197806592, 96, 12288, 96, 1),
    ]
] + [
    (name, parameters, {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "intermediate_size": written, "model_parallel_size": tensor, "num_kv_heads": of_keys,
        "mlp_multiple_of": 256, "make_vocab_size_divisible_by": 1, "pos_emb": "rotary",
        "no_weight_tying": True, "norm": "rmsnorm", "activation": "swiglu",
        "use_bias_in_attn_linear": False, "use_bias_in_mlp": "llama2" in name,
    })
    for name, parameters, layers, hidden, heads, of_keys, written, tensor in [
        ("llama/7B", 6738415616, 32, 4096, 32, 32, 32768, 1),
        ("llama/13B", 13015864320, 40, 5120, 40, 40, 40960, 2),
        ("llama/30B", 32528943616, 60, 6656, 52, 52, 53248, 4),
        ("llama/65B", 65285660672, 80, 8192, 64, 64, 65536, 8),
        ("llama2/7B", 6738415616, 32, 4096, 32, 32, 32768, 1),
        ("llama2/13B", 13015864320, 40, 5120, 40, 40, 41472, 1),
        ("llama2/70B", 68976648192, 80, 8192, 64, 8, 86016, 1),
    ]
]  # fmt: skip


@pytest.mark.parametrize(("name", "parameters", "keys"), SHIPPED, ids=[s[0] for s in SHIPPED])
def test_shipped_files_of_gpt_neox(name: str, parameters: int, keys: dict[str, Any]) -> None:
    assert neox.decoder(keys, name).parameters == pytest.approx(parameters, rel=2e-3)


GATED = {"hidden-size": 4096, "num-layers": 32, "num-attention-heads": 32, "activation": "swiglu",
         "pos-emb": "rotary"}  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ({"attention-config": [[["mamba"], 32]]}, "attention_config: found 'mamba'"),
        ({"attention-config": ["rwkv"] * 32}, "attention_config: found 'rwkv'"),
        ({"attention-config": [[["gmlp"], "all"]]}, "attention_config: found 'gmlp'"),
        ({"attention-config": [[["local"], "all"]]}, "attention_config: found 'local'"),
        ({"moe-num-experts": 8}, "moe_num_experts: found 8"),
        ({"num-unique-layers": 4}, "num_unique_layers: found 4"),
        ({}, "a gated MLP 5461 wide today.*write it: 32766 for 10922, 16384 for 5461"),
        ({"mlp-multiple-of": 256}, "5632 wide today.*write it: 33024 for 11008, 16384 for 5632"),
        ({"intermediate-size": 14336}, "9558 columns and a second one of 4778 rows.*43008"),
        ({"intermediate-size": 64, "expansion-factor": 2}, "takes intermediate_size or this"),
        ({"expansion-factor": "2"}, "expansion_factor: found '2'; expected a number"),
        ({"activation": "gelu", "no-weight-tying": "true"}, "expected true or false"),
        ({"activation": "gelu", "tokenizer-type": "Tiktoken"}, "'Tiktoken'; how many tokens"),
    ],
)
def test_files_of_gpt_neox_that_are_no_plain_decoders(lines: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        neox.decoder({**GATED, **lines}, "file")


@pytest.mark.parametrize("activation", sorted(neox.GATED))
def test_gated_files_of_gpt_neox(activation: str) -> None:
    """The file has three times the width, as its matrices share two thirds of it."""
    found = neox.decoder({**GATED, "activation": activation, "intermediate_size": 43008}, "file")
    assert (found.gated, found.intermediate) == (True, 14336)
    assert neox.decoder({**GATED, "expansion_factor": 10.5}, "file").intermediate == 14336
    plain = neox.decoder({**GATED, "activation": "gelu", "intermediate_size": 14336}, "file")
    assert (plain.gated, plain.intermediate) == (False, 14336)


def test_positions_and_tokens_of_gpt_neox() -> None:
    known = {**GATED, "activation": "gelu", "max-position-embeddings": 2048}
    for kind, positions in (("learned", 2048), ("none", 0), ("alibi", 0), ("sinusoidal", 0)):
        assert neox.decoder({**known, "pos-emb": kind}, "file").positions == positions
    found = neox.decoder({**known, "tokenizer-type": "SPMTokenizer"}, "file")
    assert found.vocabulary == 32000
    assert "file does not say how many tokens there are: 32000 are taken" in found.remark
    assert neox.decoder({**known, "vocab_size": 1000}, "file").remark == ""


@pytest.mark.skipif("GPT_NEOX_HOME" not in os.environ, reason="no checkout of GPT-NeoX")
def test_every_file_of_a_checkout_is_counted_or_refused_by_name() -> None:
    files = sorted(Path(os.environ["GPT_NEOX_HOME"], "configs").glob("**/*.yml"))
    assert len(files) > 40
    sizes = {name: parameters for names, parameters, _ in SHIPPED for name in names.split(", ")}
    for file in files:
        name = str(file.relative_to(file.parents[len(file.parents) - 1])).partition("configs/")[2]
        try:
            found = read_model(file).parameters
        except ConfigError as error:
            assert error.key.startswith(f"{file.name}: "), error
        else:
            assert found == pytest.approx(sizes[name.removesuffix(".yml")], rel=0.02)


def test_arguments_of_megatron_as_it_derives_them() -> None:
    line = "--num-layers 2 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 "
    gated = read_model(f"{line} --swiglu --position-embedding-type none")
    assert isinstance(gated, Decoder)
    assert (gated.intermediate, gated.positions) == (10880, 0)  # a multiple of 64
    learned = read_model(f"{line} --max-position-embeddings 1024")
    assert isinstance(learned, Decoder)
    assert (learned.intermediate, learned.positions) == (16384, 1024)
    for option in (
        "--multi-latent-attention",
        "--mtp-num-layers 1 --moe-layer-freq 1",
        "--moe-layer-freq 2",
        "--num-key-value-heads 2",
    ):
        with pytest.raises(ConfigError, match="plans know blocks of attention"):
            read_model(f"{line} --position-embedding-type rope {option}")
    with pytest.raises(ConfigError, match="close its quotes"):
        read_model(f"{line} '")
    with pytest.raises(ConfigError, match="num_experts: found '4x'"):
        read_model(f"{line} --position-embedding-type rope --num-experts 4x")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mlp_only_layers": 1}, "mlp_only_layers: found 1; expected a list"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: found 9; expected at most the 4"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(changed: dict[str, Any], said: str) -> None:
    config = {
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 4, "intermediate_size": 128, "moe_intermediate_size": 32,
        "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0, 7],
    }  # fmt: skip
    assert decoder(config, "m").dense_blocks == 1
    with pytest.raises(ConfigError, match=said):
        decoder({**config, **changed}, "m")
