"""Weights that aim at the tail."""

from __future__ import annotations

import numpy as np
import pytest

from leanroll.errors import ConfigError, UserError
from leanroll.losses.tail import needs_alpha, tail_weights

COUNTS = np.array([False, True, True, True, False, True])
ALPHA = np.array([0.1, 0.9, 0.5, 1.0, 0.2, 0.5])


def test_none_is_the_mean_over_what_counts() -> None:
    assert tail_weights(COUNTS).tolist() == [0, 0.25, 0.25, 0.25, 0, 0.25]
    assert not needs_alpha("none")


def test_cvar_is_the_mean_over_the_worst() -> None:
    assert tail_weights(COUNTS, "cvar", ALPHA, share=0.5).tolist() == [0, 0, 0.5, 0, 0, 0.5]
    # Rounded up to whole tokens, and the earlier of equal ones.
    assert tail_weights(COUNTS, "cvar", ALPHA, share=0.01).tolist() == [0, 0, 1, 0, 0, 0]
    assert tail_weights(COUNTS, "cvar", ALPHA, share=1.0).tolist() == tail_weights(COUNTS).tolist()


def test_one_minus_alpha() -> None:
    weights = tail_weights(COUNTS, "one_minus_alpha", ALPHA)
    np.testing.assert_allclose(weights, np.array([0, 0.1, 0.5, 0, 0, 0.5]) / 1.1)
    assert not tail_weights(COUNTS, "one_minus_alpha", np.ones(6)).any(), "nothing to improve"


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="'worst'; expected one of none, cvar, one_minus_alpha"):
        tail_weights(COUNTS, "worst")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="share is 0"):
        tail_weights(COUNTS, "cvar", ALPHA, share=0.0)
    with pytest.raises(UserError, match="No token counts"):
        tail_weights(np.zeros(3, dtype=bool))
    with pytest.raises(UserError, match="needs an alpha per token"):
        tail_weights(COUNTS, "cvar", ALPHA[:2])
