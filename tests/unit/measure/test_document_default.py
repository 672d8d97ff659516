"""The embedded default model on a source file that an independent implementation with dense masks has been run on."""

from __future__ import annotations

import argparse
import hashlib
import inspect
from pathlib import Path

import pytest
import torch

from leanroll.kernels.dispatch import get_backend
from leanroll.measure.acceptance import tail
from leanroll.measure.document import document_acceptance, document_hidden
from leanroll.measure.selection import SparsePlan
from leanroll.models import load_policy
from leanroll.rollout.schedule import BudgetSchedule

SOURCE = Path(inspect.getsourcefile(argparse) or "")
SHA256 = "dc1eba8adfdf615986421f981337458ba1072d3e718a0f76e3224940fd74118b"
NUM_TOKENS, BIN = 4096, 1024
# 5th percentile of alpha per bin of 1,024 query positions: fp32, `mean`, pages of 16, first 1 and last 2, layers 0 and 1 dense.
INDEPENDENT = {32: (0.935, 0.849, 0.767, 0.754), 64: (1.000, 0.941, 0.863, 0.838)}


@pytest.mark.slow
@pytest.mark.skipif(
    hashlib.sha256(SOURCE.read_bytes()).hexdigest() != SHA256,
    reason="the figures are for the argparse.py of CPython 3.11.7, and this Python has another one",
)
def test_tails_are_those_of_an_independent_implementation() -> None:
    policy, backend = load_policy("smollm2-135m", dtype=torch.float32), get_backend()
    text = SOURCE.read_text(encoding="utf-8")
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"][:NUM_TOKENS]
    dense = document_hidden(policy, ids, backend)
    for pages, expected in INDEPENDENT.items():
        schedule = BudgetSchedule("argparse", 16, 1, 2, dense_layers=(0, 1), pages=(pages,), scorer="mean")
        plan = SparsePlan.of(policy.spec, schedule)
        alpha = document_acceptance(policy, ids, backend, plan, temperature=1.0, dense_hidden=dense)
        tails = [tail(alpha[start : start + BIN]) for start in range(0, NUM_TOKENS, BIN)]
        assert tails == pytest.approx(expected, abs=0.01), f"{pages} pages"
