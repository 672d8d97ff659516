"""Measuring the machine: constants that make sense, and overheads that close the gap they are measured from."""

from dataclasses import replace

import pytest

from leanroll.calibrate.devices import Device
from leanroll.calibrate.model_shape import ModelShape
from leanroll.calibrate.probe import measure_cpu, measure_overheads, shape_of
from leanroll.calibrate.speed import decode_seconds
from leanroll.errors import ConfigError
from leanroll.rollout.schedule import BudgetSchedule
from tests.tiny import tiny_policy

SHAPE = ModelShape(
    "small",
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=50,
)


def test_measured_rates_are_rates() -> None:
    device = measure_cpu(SHAPE, repeats=1, name="here")
    assert device.name == "here"
    # From a slow shared core to a large server.
    assert 1e8 < device.bytes_per_second < 1e13
    assert 1e7 < device.attention_flops < 1e14
    assert 1e7 < device.matmul_flops < 1e15
    assert 1e7 < device.weight_bytes_per_second < 1e13
    assert 0.0 <= device.scattered_overlap <= 1.0
    assert 0.0 <= device.candidate_seconds < 1e-3
    assert (device.layer_seconds, device.layer_row_seconds) == (0.0, 0.0)


def test_overheads_come_from_short_sequences() -> None:
    policy = tiny_policy("qwen3")
    device = measure_overheads(policy, Device("fast", 1e15, 1e18), many=3, num_steps=8)
    assert 0.0 < device.layer_seconds + device.layer_row_seconds < 1.0
    # A device so slow that its parts take longer than the whole step leaves nothing over.
    assert measure_overheads(policy, Device("slow", 1.0, 1e18), many=3, num_steps=8).layer_seconds == 0.0


def test_shape_of_a_policy_has_its_dtype() -> None:
    policy = tiny_policy("gemma2", adapter=True)
    shape = shape_of(policy)
    assert (shape.name, shape.dtype_bytes) == (policy.name, 4)
    assert shape.windows == policy.spec.windows
    assert shape.kv_bytes_per_token == policy.spec.kv_bytes_per_token(policy.dtype)


def test_unknown_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 bytes per number"):
        measure_cpu(replace(SHAPE, dtype_bytes=1))


def test_random_prefill_steps_like_the_engine() -> None:
    # The benchmark's trick must leave the policy as it was, and time exactly the steps it was asked for.
    policy = tiny_policy("llama")
    before = policy.hidden
    schedule = BudgetSchedule("sparse", page_size=8, pages=(4,), scorer="softmax")
    seconds = decode_seconds(policy, schedule, batch=3, context=100, num_steps=5)
    assert len(seconds) == 5
    assert min(seconds) > 0.0
    assert policy.hidden == before
