"""The cost model: counts by hand, limits, agreement with the engine's bookkeeping, and errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from leanroll.calibrate.cost import PARTS, ScorerCost, StepCost, step_cost, trajectory
from leanroll.calibrate.devices import Device, device_names, named_device
from leanroll.calibrate.model_shape import ModelShape, shape_names
from leanroll.errors import ConfigError
from leanroll.kernels.scorers import bytes_per_page, get_scorer, scorer_names
from leanroll.rollout.engine import RolloutEngine
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.types import Prompt, SamplingParams
from tests.tiny import tiny_policy

SMALL = ModelShape(
    "small", num_layers=4, hidden_size=10, intermediate_size=20, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=100
)
DEVICE = Device("unit", bytes_per_second=1e9, matmul_flops=1e12)
QWEN = ("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b")


def fixed(pages: int, **fields) -> BudgetSchedule:
    return BudgetSchedule("fixed", pages=(pages,), **fields)


def parts(cost: StepCost) -> dict[str, tuple[float, float]]:
    return {name: (float(getattr(cost, name).flops), float(getattr(cost, name).bytes)) for name in PARTS}


def test_parts_by_hand() -> None:
    # L 100 and 40: 7 and 3 pages. Budget 5: the first is sparse and reads 5 pages, of which the last holds 4 tokens.
    cost = step_cost(SMALL, fixed(5, dense_layers=(0,)), [100, 40])
    layer = 10 * (4 * 8 + 2 * 2 * 8 + 4 * 8 + 3 * 20)
    chosen = 4 * 16 + 4 + 40
    candidates = 7 - 1 - 2
    assert parts(cost) == {
        "weights": (2 * 2 * 4 * layer, 2 * 4 * layer),
        "logits": (2 * 2 * 1000, 2 * 1000),
        "dense_attention": (4 * 4 * 8 * 140, 2 * 2 * 8 * 2 * 140),
        "sparse_attention": (3 * 4 * 4 * 8 * chosen, 3 * 2 * 2 * 8 * 2 * chosen),
        # one landmark of 8 numbers per KV head, one averaged query for it
        "scoring": (3 * 2 * candidates * 2 * 8, 3 * 2 * candidates * 8 * 2),
    }
    assert cost.candidates == 3 * 2 * candidates
    assert cost.kv_bytes == sum(parts(cost)[name][1] for name in ("dense_attention", "sparse_attention", "scoring"))
    assert cost.bytes == sum(number for _, number in parts(cost).values())
    assert cost.flops == sum(number for number, _ in parts(cost).values())


def test_default_model_as_in_the_docstring() -> None:
    cost = step_cost(ModelShape.named("smollm2-135m"), fixed(64, scorer="softmax"), [8000] * 8)
    megabytes = [round(number / 1e6) for _, number in parts(cost).values()]
    assert megabytes == [212, 57, 98, 176, 43]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 79, 80, 81, 96, 97])
def test_a_budget_that_holds_everything_reads_what_dense_reads(length: int) -> None:
    dense, sparse = (step_cost(SMALL, schedule, [length]) for schedule in (BudgetSchedule.dense(), fixed(10**6)))
    assert sparse.kv_bytes == dense.kv_bytes
    assert sparse.flops == dense.flops
    assert sparse.candidates == 0


def test_tokens_read_never_exceed_the_budget_nor_the_length() -> None:
    lengths = np.arange(1, 400)
    cost = step_cost(SMALL, fixed(6, dense_layers=()), lengths[:, None])
    tokens = cost.sparse_attention.bytes / SMALL.kv_bytes_per_token
    assert (tokens <= np.minimum(lengths, 6 * 16)).all()
    assert (tokens[lengths <= 6 * 16] == lengths[lengths <= 6 * 16]).all()
    assert (tokens[lengths > 6 * 16] > 5 * 16).all()  # five full pages and at least the current token


def test_mixed_lengths_add_up_and_counts_repeat() -> None:
    schedule = BudgetSchedule("bins", bin_pages=2, pages=(3, 4, 5))
    single = [step_cost(SMALL, schedule, [n]) for n in (10, 50, 200)]
    mixed = step_cost(SMALL, schedule, [10, 50, 200, 200])
    counted = step_cost(SMALL, schedule, [10, 50, 200], counts=[1, 1, 2])
    for name in ("dense_attention", "sparse_attention", "scoring"):
        a, b, c = (float(getattr(cost, name).bytes) for cost in single)
        assert float(getattr(mixed, name).bytes) == a + b + 2 * c
    assert parts(counted) == parts(mixed)
    assert counted.batch == mixed.batch == 4


def test_a_shared_prompt_is_read_once_where_everything_is_read() -> None:
    def cost(samples: int, schedule: BudgetSchedule) -> StepCost:
        return step_cost(SMALL, schedule, [200] * 4, prompt_length=160, samples_per_prompt=samples)

    alone, shared = cost(1, BudgetSchedule.dense()), cost(4, BudgetSchedule.dense())
    assert shared.kv_bytes == SMALL.kv_bytes_per_token * (160 + 4 * 40)
    assert shared.flops == alone.flops
    alone, shared = cost(1, fixed(4)), cost(4, fixed(4))
    assert parts(shared)["sparse_attention"] == parts(alone)["sparse_attention"]  # every sample has its own selection
    # 13 pages, 10 candidates, 9 of them in the prompt.
    assert shared.scoring.bytes / alone.scoring.bytes == pytest.approx((1 + 9 / 4) / 10)
    assert shared.candidates == alone.candidates


def test_windowed_layers_read_their_window() -> None:
    shape = replace(SMALL, windows=(0, 32, 0, 32))
    cost = step_cost(shape, fixed(4, dense_layers=(0,)), [100, 20])
    per_layer = shape.kv_bytes_per_token / 4
    assert cost.dense_attention.bytes == per_layer * (120 + 2 * (32 + 20))
    assert cost.sparse_attention.bytes == per_layer * (3 * 16 + 4 + 20)


@pytest.mark.parametrize("name", [n for n in scorer_names() if n != "oracle-mass"])
def test_scorers_cost_what_they_store(name: str) -> None:
    for head_dim in (64, 80, 128):
        shape = replace(SMALL, head_dim=head_dim)
        stored = bytes_per_page(get_scorer(name), shape.num_kv_heads, head_dim, 16, torch.bfloat16)
        assert ScorerCost.named(name, shape, 16).bytes_per_page * shape.num_kv_heads == stored


def test_scorer_flops() -> None:
    assert ScorerCost.named("mean", SMALL, 16).flops_per_page == 2 * 8
    assert ScorerCost.named("softmax", SMALL, 16).flops_per_page == 2 * 2 * 8
    assert ScorerCost.named("sub4-int4", SMALL, 16).flops_per_page == 4 * 2 * 2 * 8
    assert ScorerCost.named("oracle-mass", SMALL, 16) == ScorerCost(16 * 8 * 2, 16 * 2 * 2 * 8)


def test_the_engine_reads_the_pages_that_the_model_counts() -> None:
    policy = tiny_policy("qwen3")
    schedule = BudgetSchedule("bins", page_size=8, bin_pages=4, pages=(4, 5, 6), dense_layers=(0,))
    engine = RolloutEngine(policy, schedule, kernel="reference", kv_memory_gib=0.01)
    prompt, number = tuple(range(3, 43)), 30
    sampling = SamplingParams(max_completion_length=number, ignore_stop=True)
    (group,) = engine.generate([Prompt(0, prompt)], sampling, 1)
    shape = ModelShape.from_config(policy.model.config.to_dict(), name="tiny", dtype_bytes=4)
    result = trajectory(shape, schedule, DEVICE, prompt_length=len(prompt), completion_lengths=[number])
    assert result.num_tokens == number - 1
    rollout = group.rollouts[0]
    all_layers = (1 + 3 * result.page_share) / 4
    assert rollout.pages_read / rollout.pages_total == pytest.approx(all_layers)


def test_parts_take_the_longer_of_arithmetic_and_memory() -> None:
    cost = step_cost(SMALL, fixed(5), [100] * 3)
    slow_memory = replace(DEVICE, matmul_flops=1e20)
    assert cost.step_seconds(slow_memory) == pytest.approx(float(cost.bytes) / 1e9)
    slow_arithmetic = replace(DEVICE, bytes_per_second=1e20)
    assert cost.step_seconds(slow_arithmetic) == pytest.approx(float(cost.flops) / 1e12)


def test_device_constants_each_act_on_their_part() -> None:
    cost = step_cost(SMALL, fixed(5), [100] * 3)
    before = cost.seconds(DEVICE)

    def changed(device: Device) -> dict[str, float]:
        after = cost.seconds(device)
        return {name: float(after[name] - before[name]) for name in after if after[name] != before[name]}

    assert changed(replace(DEVICE, weight_bytes_per_second=0.5e9)) == pytest.approx(
        {name: float(before[name]) for name in ("weights", "logits")}
    )
    assert changed(replace(DEVICE, candidate_seconds=1e-6)) == pytest.approx({"scoring": 1e-6 * float(cost.candidates)})
    assert changed(DEVICE.with_overheads(1e-3, 1e-4)) == pytest.approx({"overhead": 4 * (1e-3 + 3e-4)})
    sums = changed(replace(DEVICE, scattered_overlap=0.0))
    assert sums == pytest.approx(
        {
            # What is read in order hides its arithmetic all the same.
            "sparse_attention": float(cost.sparse_attention.flops * (1.0 - cost.chosen_share)) / 1e12,
            "scoring": float(cost.scoring.flops) / 1e12,
        }
    )
    assert set(changed(replace(DEVICE, attention_flops=1e6))) == {"dense_attention", "sparse_attention", "scoring"}
    assert set(changed(replace(DEVICE, scoring_flops=1e6))) == {"scoring"}
    assert cost.step_seconds(DEVICE.slowed(memory=0.5)) == pytest.approx(2 * float(cost.step_seconds(DEVICE)))


def test_trajectory_is_the_sum_of_its_steps() -> None:
    schedule = BudgetSchedule("bins", bin_pages=2, pages=(3, 4, 5))
    ends, prompt, device = [5, 90, 90, 2, 1], 20, DEVICE.with_overheads(1e-6, 1e-7)
    result = trajectory(SMALL, schedule, device, prompt_length=prompt, completion_lengths=ends)
    for expected, chosen in ((result.dense_seconds, BudgetSchedule.dense()), (result.sparse_seconds, schedule)):
        total = 0.0
        for step in range(1, 90):
            lengths = [prompt + step for end in ends if end > step]
            total += float(step_cost(SMALL, chosen, lengths).step_seconds(device))
        assert total == pytest.approx(expected)
    assert result.num_tokens == sum(end - 1 for end in ends)
    assert result.speedup == result.dense_seconds / result.sparse_seconds > 1


def test_a_dense_schedule_gains_nothing() -> None:
    result = trajectory(SMALL, BudgetSchedule.dense(), DEVICE, prompt_length=10, completion_lengths=[500] * 2)
    assert (result.speedup, result.kv_share, result.page_share) == (1.0, 1.0, 1.0)


def test_published_budget_shares() -> None:
    # Mean share of the KV read over a 32k trajectory at 0.86: 0.19 (1.7B) to 0.31 (14B) in the paper.
    shares = [
        trajectory(
            ModelShape.named(name),
            BudgetSchedule.load(f"{name}-0.86"),
            named_device("h200"),
            prompt_length=0,
            completion_lengths=[32768],
        ).page_share
        for name in QWEN
    ]
    assert shares[0] == pytest.approx(0.19, abs=0.01)
    assert shares[-1] == pytest.approx(0.31, abs=0.01)
    assert shares[0] == min(shares)
    assert shares[-1] == max(shares)


def test_speedup_falls_with_model_size_and_rises_with_the_batch() -> None:
    def speedup(name: str, batch: int) -> float:
        return trajectory(
            ModelShape.named(name),
            BudgetSchedule.load(f"{name}-0.86"),
            named_device("h200"),
            prompt_length=150,
            completion_lengths=[16000] * batch,
        ).speedup

    by_size = [speedup(name, 16) for name in QWEN]
    assert by_size == sorted(by_size, reverse=True)
    by_batch = [speedup("qwen3-4b", batch) for batch in (1, 4, 16, 64)]
    assert by_batch == sorted(by_batch)


def test_named_shapes_have_the_published_sizes() -> None:
    billions = {name: round(ModelShape.named(name).num_parameters / 1e9, 2) for name in shape_names()}
    assert billions == {
        "smollm2-135m": 0.13,
        "qwen3-1.7b": 1.72,
        "qwen3-4b": 4.02,
        "qwen3-8b": 8.19,
        "qwen3-14b": 14.77,
    }
    assert ModelShape.named("smollm2-135m").kv_bytes_per_token == 23040


def test_shape_of_a_real_model_counts_its_weights() -> None:
    for family in ("llama", "qwen3", "gemma2", "gemma3"):
        policy = tiny_policy(family)
        shape = ModelShape.from_config(policy.model.config.to_dict())
        matrices = [p.numel() for n, p in policy.decoder.named_parameters() if p.dim() == 2 and "embed" not in n]
        assert sum(matrices) == shape.num_layers * shape.layer_parameters, family
        assert (shape.windows or (0,) * shape.num_layers) == policy.spec.windows, family
        assert shape.dtype_bytes in (2, 4)


CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 50,
}


def test_from_config_defaults_and_nesting() -> None:
    shape = ModelShape.from_config({"text_config": {**CONFIG, "dtype": "float32"}, "hidden_size": 1})
    assert (shape.num_kv_heads, shape.head_dim, shape.dtype_bytes, shape.mlp_matrices) == (4, 8, 4, 3)
    assert ModelShape.from_config({**CONFIG, "model_type": "gpt_neox"}).mlp_matrices == 2
    windowed = {**CONFIG, "sliding_window": 16}
    assert ModelShape.from_config(windowed).windows == (16, 16)
    assert ModelShape.from_config({**windowed, "use_sliding_window": False}).windows == ()
    assert ModelShape.from_config({**windowed, "layer_types": ["full_attention", "sliding_attention"]}).windows == (
        0,
        16,
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts": 8}, "8 experts"),
        ({"intermediate_size": None, "vocab_size": None}, "lacks intermediate_size, vocab_size"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_key_value_heads": 3}, "4 query heads on 3 KV heads"),
        ({"sliding_window": 16, "layer_types": ["sliding_attention"]}, "expected 2 entries"),
    ],
)
def test_configurations_that_make_no_sense(changes: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ModelShape.from_config({**CONFIG, **changes})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ModelShape.named("qwen9"), "qwen3-14b"),
        (lambda: named_device("tpu"), "h200"),
        (lambda: Device("x", 0.0, 1e12), "bytes_per_second is 0.0"),
        (lambda: Device("x", 1e9, float("inf")), "matmul_flops is inf"),
        (lambda: Device("x", 1e9, float("nan")), "matmul_flops is nan"),
        (lambda: DEVICE.with_overheads(-1.0), "layer_seconds is -1.0"),
        (lambda: replace(DEVICE, scattered_overlap=1.5), "share from 0 to 1"),
        (lambda: ScorerCost.named("sub0-int4", SMALL, 16), "'sub0-int4' is unknown"),
        (lambda: step_cost(SMALL, fixed(5), []), "positive integers"),
        (lambda: step_cost(SMALL, fixed(5), [0]), "positive integers"),
        (lambda: step_cost(SMALL, fixed(5), [1.5]), "positive integers"),
        (lambda: step_cost(SMALL, fixed(5), 100), "an array"),
        (lambda: step_cost(SMALL, fixed(5), [100], prompt_length=101), "prompt no longer"),
        (lambda: step_cost(SMALL, fixed(5), [100], samples_per_prompt=0), "at least one sample"),
        (lambda: step_cost(SMALL, fixed(5, dense_layers=(4,)), [100]), r"dense layers \[4\]"),
        (lambda: step_cost(SMALL, fixed(5, scorer="best"), [100]), "'best' is unknown"),
        (lambda: trajectory(SMALL, fixed(5), DEVICE, prompt_length=1, completion_lengths=[1]), "2 tokens or more"),
        (lambda: trajectory(SMALL, fixed(5), DEVICE, prompt_length=1, completion_lengths=[]), "positive lengths"),
    ],
)
def test_errors_say_what_was_expected(call, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call()


def test_devices_by_name() -> None:
    assert [named_device(name).name for name in device_names()] == list(device_names())
