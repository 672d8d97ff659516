"""The one way in which tests compare tensors.

Two bounds per dtype, both relative to the expected tensor: the root mean square of the error over the root mean square
of the values, and the largest error over the largest value. Loosening them needs a written reason in the test.

| dtype | relative RMS | maximum | why |
|---|---|---|---|
| float64 | 1e-11 | 1e-10 | order of summation |
| float32 | 1e-5 | 5e-5 | order of summation over some thousand terms, polynomial exp |
| bfloat16, float16 | 6e-3 | 2e-2 | result rounded to 8 bits once (RMS 1.7e-3), inputs of the last product once more |
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-11, 1e-10),
    torch.float32: (1e-5, 5e-5),
    torch.bfloat16: (6e-3, 2e-2),
    torch.float16: (6e-3, 2e-2),
}

_FLOOR = 1e-7  # scale of a tensor of zeros: anything smaller counts as zero


def assert_close(
    actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None, name: str = "tensor", scale: float = 0.0
) -> None:
    """Assert equality up to the documented tolerance of a dtype.

    Args:
        actual, expected: same shape. Infinities must stand at the same places with the same sign; NaN is never close.
        dtype: the dtype whose rounding is to be expected, by default that of `actual`.
        name: what is compared, for the message.
        scale: size of the terms that the values are sums of. Sums cancel, and their error is relative to the terms: a value
            that happens to be near zero is not wrong for it. The bounds are relative to at least this.
    """
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if actual.numel() == 0:
        return
    rms_bound, max_bound = TOLERANCES[dtype or actual.dtype]
    a, e = actual.detach().to("cpu", torch.float64), expected.detach().to("cpu", torch.float64)
    assert not a.isnan().any(), f"{name}: {int(a.isnan().sum())} of {a.numel()} values are NaN"
    assert not e.isnan().any(), f"{name}: the expected tensor has {int(e.isnan().sum())} NaN"
    infinite = a.isinf() | e.isinf()
    assert torch.equal(a[infinite], e[infinite]), f"{name}: infinities differ"
    a, e = a[~infinite], e[~infinite]
    if a.numel() == 0:
        return
    error, floor = a - e, max(scale, _FLOOR)
    rms = float(error.square().mean().sqrt() / e.square().mean().sqrt().clamp_min(floor))
    largest = float(error.abs().max() / e.abs().max().clamp_min(floor))
    close = rms <= rms_bound and largest <= max_bound
    assert close, (
        f"{name}: relative RMS error {rms:.2e} (bound {rms_bound:.0e}), maximum {largest:.2e} (bound {max_bound:.0e}), "
        f"{dtype or actual.dtype}, shape {tuple(actual.shape)}"
    )
