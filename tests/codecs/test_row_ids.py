"""Row numbers encoded by their gaps: every length and width, bytes, damage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs.row_ids import WIDEST, decode_ids, encode_ids
from hybridcomp.errors import CodecError
from tests.nn.tables.made import zipf


def back(ids: Tensor, rows: int) -> Tensor:
    return decode_ids(encode_ids(ids), len(ids), rows)


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 1000])
@pytest.mark.parametrize("rows", [1000, 70_001, 1 << 40])
def test_every_length_comes_back(count: int, rows: int) -> None:
    draws = torch.randint(rows, (3 * count,), generator=torch.Generator().manual_seed(count))
    ids = torch.unique(draws)[:count] if rows > 1000 else torch.arange(count)
    if count:
        ids[-1] = rows - 1
    payload = encode_ids(ids)
    assert torch.equal(back(ids, rows), ids) and payload.numel() % 16 == 0
    assert torch.equal(decode_ids(torch.cat([payload, payload]), len(ids), rows), ids)


@pytest.mark.parametrize("width", range(WIDEST + 1))
def test_every_width(width: int) -> None:
    gap = (1 << width) - 1
    ids = torch.tensor([gap]) if gap >> 38 else torch.tensor([gap, gap + 1, 2 * gap + 2])
    assert torch.equal(back(ids, 1 << 41), ids)
    assert int(encode_ids(ids)[0]) == width


def test_all_rows_take_a_bit_in_thousand() -> None:
    ids = torch.arange(100_000)
    assert torch.equal(back(ids, 100_000), ids) and encode_ids(ids).numel() == 784


def test_the_layout_is_that_of_the_page() -> None:
    payload = encode_ids(torch.tensor([2, 3, 7]))  # gaps 2, 0, 3
    assert payload[:4].tolist() == [2, 0b110010, 0, 0] and payload.numel() == 48


@pytest.mark.parametrize("ids", [[3, 3], [5, 4], [-1, 2], [1, 1 << 40]])
def test_others_are_refused(ids: list[int]) -> None:
    with pytest.raises(CodecError, match="ascending"):
        encode_ids(torch.tensor(ids))


def test_damage_is_told() -> None:
    ids = torch.arange(0, 900, 3)
    payload = encode_ids(ids)
    with pytest.raises(CodecError, match="expected 112 bytes, found 96"):
        decode_ids(payload[:-16], 300, 900)
    with pytest.raises(CodecError, match="below 897"):
        decode_ids(payload, 300, 897)
    wide = payload.clone()
    wide[0] = 41
    with pytest.raises(CodecError, match="damaged widths"):
        decode_ids(wide, 300, 900)
    with pytest.raises(CodecError, match="damaged widths"):
        decode_ids(payload[:0], 300, 900)


@pytest.mark.parametrize(("rows", "tokens"), [(20_000, 2_048), (250_000, 8_192)])
def test_numbers_of_a_batch_take_less_than_a_byte_and_a_third(rows: int, tokens: int) -> None:
    """Ids by Zipf's law of 1.1, requested from one of two owners, including both headers."""
    nbytes = count = 0
    for seed in range(10):
        asked = torch.unique(zipf(rows, tokens, seed))
        places = asked[asked % 2 == 0] // 2
        payload = encode_ids(places)
        assert torch.equal(decode_ids(payload, len(places), rows // 2), places)
        nbytes, count = nbytes + payload.numel() + 8 * (3 + 2), count + len(places)
    assert nbytes < 1.3 * count
