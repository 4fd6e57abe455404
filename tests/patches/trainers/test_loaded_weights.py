"""Weight checkpoints written by others: our state is saved along, or a line warns.

accelerate's ``save_fsdp_model(use_dcp=False)`` writes a file for each rank, from 1.15 on.
"""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from tests.ranks import RunRanks

BLOCK: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 3, "error_feedback": True}, "min_bytes": 0,
}  # fmt: skip


def sharded() -> Any:
    """Return an attached model under FSDP2 with its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    fully_shard(model)
    return model, hybridcomp.attach(model, BLOCK), torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: Any, optimizer: Any) -> float:
    loss = model(torch.full((4, 32), 1.0 + torch.distributed.get_rank())).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def with_accelerate(folder: str, state: bool) -> tuple[list[float], list[float], str]:
    """Return losses of an unbroken run and after loading accelerate's files, and the messages."""
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp import StateDictType

    plugin = SimpleNamespace(
        state_dict_type=StateDictType.SHARDED_STATE_DICT, fsdp_version=2,
        cpu_ram_efficient_loading=False,
        state_dict_config=None, optim_state_dict_config=None, sync_module_states=False,
    )  # fmt: skip
    accelerator = SimpleNamespace(
        process_index=torch.distributed.get_rank(), num_processes=2, is_fsdp2=True,
        is_main_process=torch.distributed.get_rank() == 0,
        wait_for_everyone=torch.distributed.barrier,
    )  # fmt: skip
    fsdp_utils.logger = logging.getLogger(__name__)  # accelerate's logger requires an Accelerator
    model, attached, optimizer = sharded()
    for _ in range(3):
        step(model, optimizer)
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder, use_dcp=False)
    if state:
        hybridcomp.save_state(folder)
    whole = [step(model, optimizer) for _ in range(3)]
    attached.detach()
    model, attached, optimizer = sharded()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        fsdp_utils.load_fsdp_model(plugin, accelerator, model, folder, use_dcp=False)
        if state:
            hybridcomp.load_state(folder)
        after = [step(model, optimizer) for _ in range(3)]
    assert isinstance(model, FSDPModule)
    attached.detach()
    return whole, after, said.getvalue()


@pytest.mark.parametrize("state", [True, False])
def test_files_of_accelerate_for_each_rank(
    module_ranks: RunRanks, tmp_path: Path, state: bool
) -> None:
    utilities = pytest.importorskip("accelerate.utils.fsdp_utils", reason="needs accelerate")
    if "use_dcp" not in utilities.save_fsdp_model.__code__.co_varnames:
        pytest.skip("accelerate before 1.15")
    (whole, after, said), (others, later, _) = module_ranks(
        2, with_accelerate, str(tmp_path), state
    )
    assert (tmp_path / "pytorch_model_fsdp_0_rank1.bin").is_file()
    assert (whole == after, others == later) == (state, state)
    assert whole[0] == after[0]  # the weights are the same
    assert ("no state of hybridcomp" in said) is not state
    if not state:
        (line,) = (text for text in said.splitlines() if "no state of hybridcomp" in text)
        assert "residuals of error feedback start at zero" in line
        assert "hybridcomp.save_state(folder) where the job saves" in line


def loaded_by_hand() -> tuple[str, str]:
    """Return the log messages after loading weights into the module inside DDP, for two blocks."""
    found = []
    for block in (BLOCK, {"dp": {"codec": "blockint", "bits": 8}}):
        model = DistributedDataParallel(nn.Linear(32, 32))
        attached = hybridcomp.attach(model, block)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weights = {name: values.clone() for name, values in model.module.state_dict().items()}
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            model.module.load_state_dict(weights)
            step(model, optimizer)
            step(model, optimizer)
        found.append(said.getvalue())
        assert attached is not None
        attached.detach()
    return found[0], found[1]


def test_weights_loaded_by_hand_are_said_once_where_state_is_kept(module_ranks: RunRanks) -> None:
    with_feedback, without = module_ranks(2, loaded_by_hand)[0]
    assert with_feedback.count("weights were loaded into an attached model") == 1
    assert "weights were loaded" not in without


class Cut(nn.Linear):
    """A layer that transformers sharded over ranks, according to its configuration."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(32, 32)
        self.config = SimpleNamespace(distributed_config=SimpleNamespace(**sizes))


def native_axes() -> tuple[str, str]:
    """Return attach's messages about expert parallelism beside FSDP, and about TP alone."""
    model, said = Cut(fsdp_size=2, tp_size=1, ep_size=2, pp_size=1), io.StringIO()
    fully_shard(model)
    with contextlib.redirect_stdout(said):
        attached = hybridcomp.attach(model, BLOCK)
    assert attached is not None
    attached.detach()
    with pytest.raises(hybridcomp.ConfigError) as caught:
        hybridcomp.attach(Cut(fsdp_size=1, tp_size=2, ep_size=1, pp_size=1), BLOCK)
    return said.getvalue(), str(caught.value)


def test_other_axes_of_transformers_are_told(module_ranks: RunRanks) -> None:
    said, error = module_ranks(2, native_axes)[0]
    assert "expert parallelism (ep_size) of transformers' DistributedConfig" in said
    assert "native and uncounted" in said
    assert "a DistributedConfig without FSDP" in error and "set fsdp_size above 1" in error
