"""Start-up agreement: every rank gets the error, and it names the ranks and keys."""

from __future__ import annotations

import pytest

from hybridcomp.agreement import agree
from hybridcomp.errors import AgreementError
from tests.ranks import run_ranks


def same() -> str:
    agree({"compression.dp": "blockint(bits=4)"})
    agree({"compression.dp": "another round"})
    return "fine"


def differ() -> str:
    import torch.distributed as dist

    try:
        agree({"compression.dp": f"blockint(bits={4 + dist.get_rank() // 2})", "torch": "2"})
    except AgreementError as error:
        return str(error)
    return "no error"


def test_equal_ranks_pass() -> None:
    assert run_ranks(3, same) == ["fine"] * 3


def test_every_rank_learns_who_differs() -> None:
    messages = run_ranks(4, differ)
    for message in messages:
        assert "rank(s) 2, 3 differ from rank 0" in message
        assert "compression.dp: 'blockint(bits=4)' against 'blockint(bits=5)'" in message
        assert "torch:" not in message


def test_error_can_be_raised_anywhere() -> None:
    with pytest.raises(AssertionError, match="AgreementError"):
        run_ranks(2, _raise)


def _raise() -> None:
    raise AgreementError("x")
