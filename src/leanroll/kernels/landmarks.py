"""Quantised sub-landmarks: several small keys per page, in int4 or int8, packed for a vector unit.

A page's S keys are cut into R runs of S / R consecutive tokens. The mean of a run is a sub-landmark, or row, of D numbers,
stored as whole numbers (codes) and one scale: row = code * scale, scale = largest magnitude / 7 (int4) or / 127 (int8).
The scale is bfloat16, not float16: it has the range of float32, so neither overflows nor vanishes, and every instruction set
converts it with a shift. Its coarser rounding costs nothing, since the codes are rounded with the rounded scale.

Layout of one (page, KV head), R a multiple of 4, all bytes, so that storage is uint8 [P, Hk, bytes]:

    codes   [R / 4][tiles][4][8]    four rows ("quad") side by side, 8 bytes of each per tile
    scales  [R] bfloat16, little endian

A tile is 16 dimensions in int4: byte i of a row holds dimension 16t + i in its low nibble and 16t + 8 + i in its high one, both
two's complement. In int8 it is 8 dimensions, one per byte. D is padded with zeros to whole tiles. So 32 bytes, one AVX2 register,
are 4 rows x 8 dimensions (low nibbles) and the same rows x 8 others (high nibbles), and four products per row are left to add up.

Worked example, int4, D = 16, page size 8, R = 4: row 0 is the mean of tokens 0 and 1, say (7, -7, 0, ..., 0, 3.5) with its 3.5 in
dimension 15. Its scale is 1, its codes 7, -7, 0, ..., 4 (3.5 rounds to even). Its 8 bytes come first: byte 0 = 0x07 (dimensions 0
and 8), byte 1 = 0x09 (-7 is 9 mod 16), byte 7 = 0x40 (dimensions 7 and 15). Rows 1, 2 and 3 follow, then the scales, the first
of which is 80 3f: 40 bytes.

Queries can be rounded to whole numbers, too (`whole_queries`, int8 with a float32 scale per head): then the sums of a product are
whole numbers that float32 holds exactly, in whatever order a machine adds them.

The result is exact: runs are summed in order, and every operation is one that IEEE 754 defines, so the C++ kernels write the
very same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

QUAD, RUN_BYTES = 4, 8
"""Rows that lie side by side, and bytes of one of them per tile."""

_SMALLEST_SCALE = 1e-30
"""Rows whose scale is below are stored as zeros: the reciprocal of a smaller one may overflow."""


def tile_dims(bits: int) -> int:
    """Dimensions per tile."""
    return RUN_BYTES * 8 // bits


def packed_bytes(num_rows: int, head_dim: int, bits: int) -> int:
    """Bytes of one (page, KV head)."""
    tiles = -(-head_dim // tile_dims(bits))
    return num_rows * (tiles * RUN_BYTES + torch.bfloat16.itemsize)


def pack(keys: Tensor, num_rows: int, bits: int) -> Tensor:
    """Sub-landmarks of full pages: keys [..., S, D] → uint8 [..., bytes]."""
    *lead, page_size, head_dim = keys.shape
    runs = keys.float().view(*lead, num_rows, page_size // num_rows, head_dim)
    total = runs[..., 0, :]
    for i in range(1, page_size // num_rows):  # one after the other: the order of a library's sum is not ours
        total = total + runs[..., i, :]
    rows = total / (page_size // num_rows)
    largest = 2 ** (bits - 1) - 1
    scales = (rows.abs().amax(dim=-1) / largest).bfloat16()
    codes = _codes(rows, scales.float(), largest).to(torch.int32)

    dims = tile_dims(bits)
    tiles = -(-head_dim // dims)
    codes = pad(codes, (0, tiles * dims - head_dim)).view(*lead, num_rows // QUAD, QUAD, tiles, dims)
    if bits == 4:
        codes = codes[..., :RUN_BYTES] & 15 | (codes[..., RUN_BYTES:] & 15) << 4
    packed = (codes & 255).to(torch.uint8).transpose(-3, -2).flatten(-4)
    return torch.cat([packed, scales.contiguous().view(torch.uint8)], dim=-1)


def _codes(x: Tensor, scale: Tensor, largest: int) -> Tensor:
    """x [..., D] in units of scale [...], whole numbers in float32."""
    inverse = torch.where(scale > _SMALLEST_SCALE, 1.0 / scale, 0.0)
    return (x * inverse[..., None]).round().clamp(-largest, largest)


def whole_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """q [..., D] → codes from -127 to 127 [..., D] and scales [...], both float32: q is about code * scale."""
    scale = q.float().abs().amax(dim=-1) / 127
    return _codes(q.float(), scale, 127), scale


def unpack(packed: Tensor, num_rows: int, head_dim: int, bits: int) -> Tensor:
    """uint8 [..., bytes] → rows float32 [..., R, D]."""
    codes, scales = unpack_codes(packed, num_rows, head_dim, bits)
    return codes * scales[..., None]


def unpack_codes(packed: Tensor, num_rows: int, head_dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """uint8 [..., bytes] → codes [..., R, D] and scales [..., R], both float32."""
    lead, tiles = packed.shape[:-1], -(-head_dim // tile_dims(bits))
    cut = num_rows * tiles * RUN_BYTES
    codes = packed[..., :cut].view(*lead, num_rows // QUAD, tiles, QUAD, RUN_BYTES).transpose(-3, -2).to(torch.int32)
    if bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    half = 2 ** (bits - 1)
    signed = ((codes ^ half) - half).flatten(-2).flatten(-3, -2)[..., :head_dim]
    scales = packed[..., cut:].contiguous().view(torch.bfloat16).float()
    return signed.float(), scales
