"""Generate "Which block?" on the front page: file and command by engine, link and stage."""

from __future__ import annotations

from typing import Any

from doc_pages.json_rows import dumps

#: link of a node -> its kind; None where native messages are as fast as compressed ones
LINKS = {
    "up to 1 Gb/s": "slow",
    "1 to 25 Gb/s": "Ethernet",
    "faster, between nodes": "Ethernet",
    "one machine": None,
}
#: engine -> its page, its stages, its launch command
ENGINES = {
    "DeepSpeed": (
        "engines/deepspeed.html", ("ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3"),
        "deepspeed --module hybridcomp.run train.py --deepspeed_config ds_config.json",
    ),
    "FSDP2": (
        "engines/fsdp2_ddp.html", ("FSDP2", "HSDP"),
        "HYBRIDCOMP_CONFIG=block.json torchrun --nproc-per-node 8 -m hybridcomp.run train.py",
    ),
    "DDP": (
        "engines/fsdp2_ddp.html", ("DDP",),
        "HYBRIDCOMP_CONFIG=block.json torchrun --nproc-per-node 8 -m hybridcomp.run train.py",
    ),
    "Megatron": (
        "engines/megatron.html", ("distributed optimizer", "replicated optimizer"),
        "HYBRIDCOMP_CONFIG=block.json torchrun --nproc-per-node 8 "
        "-m hybridcomp.run pretrain_gpt.py",
    ),
    "GPT-NeoX": (
        "engines/neox.html", ("ZeRO 0", "ZeRO 1"),
        "GPT_NEOX_HOME=gpt-neox python -m hybridcomp.patches.neox config.yml",
    ),
    "Hugging Face": (
        "engines/huggingface.html", ("ZeRO 1", "ZeRO 2", "ZeRO 3"),
        "deepspeed --module hybridcomp.run train.py --deepspeed ds_config.json",
    ),
}  # fmt: skip
#: stages whose parameter gathers can be lossless deltas
EXACT = ("ZeRO 1", "ZeRO 2", "distributed optimizer")


def block(link: str, stage: str) -> dict[str, Any] | None:
    """Return the block for a link and a stage; None if native messages are as fast."""
    kind = LINKS[link]
    if kind is None:
        return None
    exact = kind == "slow" and stage in EXACT
    return {"preset": "recommended", **({"zero": "stepcode"} if exact else {})}


def file(engine: str, link: str, stage: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and contents of the file with the block."""
    if (found := block(link, stage)) is None:
        return None
    if engine in ("DeepSpeed", "Hugging Face"):
        number = int(stage.removeprefix("ZeRO "))
        return "ds_config.json", {
            "train_micro_batch_size_per_gpu": 8,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": number},
            "compression": found,
        }
    if engine == "GPT-NeoX":
        zero = {"stage": int(stage.removeprefix("ZeRO "))}
        return "config.yml", {
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "deepspeed_extra_args": {"compression": found},
        }  # fmt: skip
    return "block.json", found


def chosen() -> dict[str, Any]:
    """Return engines, links and the result of each choice, as the page's script reads them."""
    blocks = {
        "|".join((engine, link, stage)): made
        for engine, (_, stages, _) in ENGINES.items()
        for link in LINKS
        for stage in stages
        if (made := file(engine, link, stage))
    }
    engines = {
        name: {"page": page, "stages": stages, "command": command}
        for name, (page, stages, command) in ENGINES.items()
    }
    return {"engines": engines, "links": list(LINKS), "blocks": blocks}


def script() -> str:
    """Return docs/site/blocks.js, a script since pages opened as files cannot load JSON."""
    text = dumps(chosen(), depth=2).strip()
    return f"// made by scripts/make_docs.py\nvar hybridcompBlocks = {text};\n"
