"""Lossless differences between two buffers of weights of which few values changed.

At the learning rates of reinforcement an optimizer step changes 3 to 20% of the weights once they
are rounded to bfloat16, and most of these by one unit in the last place. So a difference says
*where* values changed, and by how many units: the bits of a value are an integer, and integers that
follow each other are neighbouring numbers. One byte is enough for nearly all of them (two in
float32); what needs more is listed whole. Everything is exact, down to the signs of zeros and the
payloads of NaNs.

Layout, by increasing fineness so that each part is aligned:

    form, changed, wide, places      4 int64
    differences that are wide        `wide` integers of the values' size
    differences                      `changed` integers of half that size
    where                            `places` bytes: gaps, or a bit for each value

A buffer for which this would be no smaller follows the header as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FULL_FORM, _GAPS_FORM, _MASK_FORM = range(3)
HEADER_BYTES = 32
INTEGER_DTYPES = {2: (torch.int16, torch.int8), 4: (torch.int32, torch.int16)}
"""By size of a value: the integers that its bits are, and those that most differences fit."""
_SKIP_GAP = 255
"""A gap: so many values did not change, and the next one does not count either."""
_BIT_PACK_FACTOR = 0x0102040810204080
"""Multiplying by it brings the lowest bits of eight bytes together in the highest one, in order."""


def encode_sparse_delta(old: Tensor, new: Tensor) -> Tensor:
    """Encode the difference that turns `old` into `new`.

    Args:
        old, new: Flat and contiguous, of one size, device and dtype of 2 or 4 bytes.

    Returns:
        ``[bytes]`` uint8 on their device, never more than `HEADER_BYTES` beyond the buffer's size.

    Raises:
        ValueError: if the buffers are not of one size.
    """
    wide_type, narrow_type = INTEGER_DTYPES[new.itemsize]
    if old.numel() != new.numel():
        raise ValueError(f"{old.numel()} values do not become {new.numel()}.")
    # It wraps, and so does `decode_sparse_delta`.
    differences = new.view(wide_type) - old.view(wide_type)
    is_changed = differences != 0
    places = is_changed.nonzero().flatten()
    differences = differences[places]
    lowest = torch.iinfo(narrow_type).min  # stands for a wide one
    fits = (differences > lowest) & (differences <= torch.iinfo(narrow_type).max)
    wide = differences[~fits]
    narrow = torch.where(fits, differences, lowest).to(narrow_type)
    size = wide.nbytes + narrow.nbytes
    mask_bytes = -(-new.numel() // 8)
    if size + min(mask_bytes, len(places)) >= new.nbytes:
        return torch.cat([_header(_FULL_FORM, 0, 0, new.nbytes, new.device), new.view(torch.uint8)])
    form, where = _MASK_FORM, None
    if len(places) < mask_bytes:  # each gap takes a byte at least
        where = _gaps(places, mask_bytes)
        form = _GAPS_FORM if where is not None else _MASK_FORM
    if where is None:
        where = _pack(is_changed)
    if size + len(where) >= new.nbytes:
        return torch.cat([_header(_FULL_FORM, 0, 0, new.nbytes, new.device), new.view(torch.uint8)])
    header = _header(form, len(places), len(wide), len(where), new.device)
    return torch.cat([header, wide.view(torch.uint8), narrow.view(torch.uint8), where])


def decode_sparse_delta(data: Tensor, old: Tensor) -> Tensor:
    """Decode the buffer that `encode_sparse_delta` was given as `new`.

    Args:
        data: From `encode_sparse_delta`.
        old: As there; stays as it is.

    Raises:
        ValueError: if `data` cannot be a difference to `old`: it was damaged on its way.
    """
    if len(data) < HEADER_BYTES:
        raise ValueError(f"{len(data)} bytes are too few for a header.")
    header = data[:HEADER_BYTES].clone().view(torch.int64)
    form, changed, wide_count, where_bytes = header.tolist()
    wide_type, narrow_type = INTEGER_DTYPES[old.itemsize]
    if data.storage_offset() % HEADER_BYTES:
        data = data.clone()  # integers are read where they are aligned only
    rest = data[HEADER_BYTES:]
    sizes = [wide_count * wide_type.itemsize, changed * narrow_type.itemsize, where_bytes]
    if min(sizes) < 0 or sum(sizes) != len(rest):
        raise ValueError(f"{len(rest)} bytes are not the {sum(sizes)} that the header says.")
    wide, narrow, where = rest.split(sizes)
    if form == _FULL_FORM:
        if len(where) != old.nbytes or changed or wide_count:
            raise ValueError(f"{len(where)} bytes are not the {old.nbytes} of the buffer.")
        whole: Tensor = where.clone().view(old.dtype)
        return whole
    if form == _GAPS_FORM:
        places = _places(where)
    elif form == _MASK_FORM and len(where) == -(-old.numel() // 8):
        places = _unpack(where, old.numel()).nonzero().flatten()
    else:
        raise ValueError(f"Form {form} with {len(where)} bytes is none for {old.numel()} values.")
    differences = narrow.view(narrow_type).to(wide_type)
    is_wide = differences == torch.iinfo(narrow_type).min
    if len(places) != changed or int(is_wide.sum()) != wide_count:
        raise ValueError(f"{len(places)} places are not those of {changed} values.")
    if changed and int(places[-1]) >= old.numel():
        raise ValueError(f"A value beyond the {old.numel()} of the buffer is said to change.")
    differences[is_wide] = wide.view(wide_type)
    new = old.clone()
    new.view(wide_type)[places] += differences
    return new


def _gaps(places: Tensor, most: int) -> Tensor | None:
    """Return the number of unchanged values before each changed one, a byte each; None if that
    takes more than `most` bytes."""
    before = torch.diff(places, prepend=places.new_full((1,), -1)) - 1
    skips = before // _SKIP_GAP
    at = skips.cumsum(0) + torch.arange(len(places), device=places.device)
    length = int(at[-1]) + 1 if len(places) else 0
    if length > most:
        return None
    found = torch.full((length,), _SKIP_GAP, dtype=torch.uint8, device=places.device)
    found[at] = (before % _SKIP_GAP).to(torch.uint8)
    return found


def _places(gaps: Tensor) -> Tensor:
    is_value = gaps != _SKIP_GAP
    return (gaps.long() + is_value).cumsum(0)[is_value] - 1


def _pack(bits: Tensor) -> Tensor:
    """Pack eight booleans into each byte."""
    whole = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8))
    return (whole.view(torch.int64) * _BIT_PACK_FACTOR >> 56).to(torch.uint8)


def _unpack(packed: Tensor, count: int) -> Tensor:
    """Unpack the first `count` booleans."""
    shifts = torch.arange(8, device=packed.device)
    table = torch.arange(256, device=packed.device)[:, None] >> shifts & 1
    rows = table.to(torch.uint8).view(torch.int64).flatten()  # a word for eight of them
    return rows[packed.long()].view(torch.uint8)[:count].bool()


def _header(form: int, changed: int, wide: int, where: int, device: torch.device) -> Tensor:
    return torch.tensor([form, changed, wide, where]).view(torch.uint8).to(device)
