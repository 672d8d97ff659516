"""Every instruction set of this machine gets its turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from leanroll.kernels.cpu import available_isas, use_isa


@pytest.fixture(params=("amx_bf16", "avx512_bf16", "avx2", "portable"), scope="module")
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in available_isas():
        pytest.skip(f"this machine has no {request.param}")
    use_isa(request.param)
    yield request.param
    use_isa(available_isas()[0])
