"""The rollout engine on tiny models: finishing, admission, sharing, and what does not fit."""

from dataclasses import replace

import pytest
import torch

from leanroll.errors import ConfigError, RolloutError
from leanroll.rollout.engine import RolloutEngine
from leanroll.rollout.sampling import sequence_uniforms
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.types import Prompt, SamplingParams
from tests.tiny import tiny_policy

SPARSE = BudgetSchedule(name="tiny", page_size=8, dense_layers=(0,), bin_pages=4, pages=(4, 5))
GIB = 1024**3


@pytest.fixture(scope="module")
def policy():
    return tiny_policy("llama")


def prompts(*lengths, start=1):
    return [
        Prompt(index=i, token_ids=tuple((start + 7 * i + j) % 50 + 3 for j in range(n))) for i, n in enumerate(lengths)
    ]


def engine(policy, schedule=SPARSE, **options):
    return RolloutEngine(policy, schedule, kernel="reference", kv_memory_gib=0.05, **options)


def gib_for(policy, num_pages, page_size=8):
    spec = policy.spec
    layer = 2 * spec.num_kv_heads * page_size * spec.head_dim * 4
    landmark = spec.num_kv_heads * spec.head_dim * 4
    return (spec.num_layers * layer + (spec.num_layers - 1) * landmark) * num_pages / GIB * 1.0001


def tokens(groups):
    return [[r.token_ids for r in g.rollouts] for g in groups]


def test_shape_of_what_comes_back(policy):
    groups = engine(policy).generate(prompts(5, 20), SamplingParams(max_completion_length=12), 3)
    assert [g.prompt.index for g in groups] == [0, 1]
    for group in groups:
        assert [r.sample_index for r in group.rollouts] == [0, 1, 2]
        for rollout in group.rollouts:
            assert len(rollout.token_ids) == len(rollout.logprobs) == 12
            assert rollout.finish_reason == "length"
            assert all(x < 0 for x in rollout.logprobs)
            assert rollout.weights_version == policy.version


def test_samples_of_a_group_differ_and_seeds_repeat(policy):
    sampling = SamplingParams(max_completion_length=12)
    first = tokens(engine(policy).generate(prompts(5), sampling, 4))
    assert len(set(first[0])) == 4
    assert tokens(engine(policy).generate(prompts(5), sampling, 4)) == first
    assert tokens(engine(policy).generate(prompts(5), sampling, 4, step=1)) != first


def test_draws_are_keyed_by_seed_step_prompt_sample_and_position():
    indifferent = tiny_policy("llama")
    with torch.no_grad():
        indifferent.head.weight.zero_()  # all tokens equally likely: the draw alone decides
    several = [Prompt(index=i, token_ids=(3, 4, 5 + i)) for i in (7, 2)]
    groups = engine(indifferent).generate(several, SamplingParams(max_completion_length=6, seed=11), 2, step=4)
    for group in groups:
        for rollout in group.rollouts:
            uniforms = sequence_uniforms(11, 4, group.prompt.index, rollout.sample_index, 6)
            assert list(rollout.token_ids) == (uniforms * indifferent.spec.vocab_size).astype(int).tolist()


def test_stop_token_is_kept_and_ends_the_sample(policy):
    free = engine(policy).generate(prompts(9), SamplingParams(max_completion_length=30), 1)[0].rollouts[0]
    stop = free.token_ids[10]
    first = free.token_ids.index(stop)
    sampling = SamplingParams(max_completion_length=30, stop_token_ids=(stop,))
    stopped = engine(policy).generate(prompts(9), sampling, 1)[0].rollouts[0]
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    ignoring = SamplingParams(max_completion_length=30, stop_token_ids=(stop,), ignore_stop=True)
    assert engine(policy).generate(prompts(9), ignoring, 1)[0].rollouts[0].token_ids == free.token_ids


def test_stop_token_in_the_last_place_counts_as_stop(policy):
    free = engine(policy).generate(prompts(9), SamplingParams(max_completion_length=6), 1)[0].rollouts[0]
    cut = free.token_ids.index(free.token_ids[5]) + 1
    sampling = SamplingParams(max_completion_length=cut, stop_token_ids=(free.token_ids[5],))
    assert engine(policy).generate(prompts(9), sampling, 1)[0].rollouts[0].finish_reason == "stop"


def test_stop_string_ends_with_the_token_that_completes_it(policy):
    free = engine(policy).generate(prompts(9), SamplingParams(max_completion_length=30), 1)[0].rollouts[0]
    wanted = policy.decode(free.token_ids[8:11]).strip()
    assert wanted, "the tiny tokenizer decodes to visible text"
    sampling = SamplingParams(max_completion_length=30, stop_strings=(wanted,))
    stopped = engine(policy).generate(prompts(9), sampling, 1)[0].rollouts[0]
    assert stopped.finish_reason == "stop"
    assert wanted in stopped.text
    assert wanted not in policy.decode(stopped.token_ids[:-1])
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]


def limited(several, limits):
    return [replace(prompt, max_completion_length=limit) for prompt, limit in zip(several, limits, strict=True)]


@pytest.mark.parametrize("num_pages", [None, 9])
def test_every_prompt_stops_at_its_own_limit(policy, num_pages):
    """Decoded together or in little memory, each sample is the beginning of the longer one, and no decode step is wasted on it."""
    sampling, own = SamplingParams(max_completion_length=24), (1, 24, 7, None)
    free = engine(policy).generate(prompts(33, 20, 33, 8), sampling, 3)
    memory = 0.05 if num_pages is None else gib_for(policy, num_pages)
    tested = RolloutEngine(policy, SPARSE, kernel="reference", kv_memory_gib=memory)
    drawn = []
    groups = tested.generate(
        limited(prompts(33, 20, 33, 8), own), sampling, 3, progress=lambda seen: drawn.append(seen.num_tokens)
    )
    for group, whole, limit in zip(groups, free, own, strict=True):
        assert [r.token_ids for r in group.rollouts] == [r.token_ids[:limit] for r in whole.rollouts]
        assert all(r.finish_reason == "length" for r in group.rollouts)
    assert drawn[-1] == 3 * (1 + 24 + 7 + 24), "nothing is generated and thrown away"
    assert (tested.pool.num_used, tested.pool.num_reserved) == (0, 0)


def test_a_stop_before_the_own_limit_is_a_stop(policy):
    free = engine(policy).generate(prompts(9), SamplingParams(max_completion_length=30), 1)[0].rollouts[0]
    first = free.token_ids.index(free.token_ids[10])
    sampling = SamplingParams(max_completion_length=30, stop_token_ids=(free.token_ids[10],))
    for limit, reason in ((first + 1, "stop"), (first, "length")):
        rollout = engine(policy).generate(limited(prompts(9), [limit]), sampling, 1)[0].rollouts[0]
        assert (rollout.finish_reason, len(rollout.token_ids)) == (reason, limit)


def test_pages_are_reserved_for_the_own_limit(policy):
    """16 + 60 - 1 tokens would need 10 pages; 16 + 8 - 1 take 3."""
    sampling = SamplingParams(max_completion_length=60)
    small = RolloutEngine(policy, SPARSE, kernel="reference", kv_memory_gib=gib_for(policy, 4))
    groups = small.generate(limited(prompts(16, 16), (8, None)), sampling, 1)
    assert len(groups[0].rollouts[0].token_ids) == 8
    assert "needs 10 pages" in groups[1].failures[0].reason
    assert small.pool.num_pages == 3


@pytest.mark.parametrize("limit", [0, -1, 25])
def test_an_own_limit_out_of_range_fails_alone(policy, limit):
    groups = engine(policy).generate(limited(prompts(9, 9), (limit, 2)), SamplingParams(max_completion_length=24), 1)
    assert f"own max_completion_length is {limit}; expected 1 to 24" in groups[0].failures[0].reason
    assert len(groups[1].rollouts) == 1


def test_pool_is_empty_after_success_and_after_an_error(policy, monkeypatch):
    tested = engine(policy)
    tested.generate(prompts(5, 17), SamplingParams(max_completion_length=9), 3)
    assert (tested.pool.num_used, tested.pool.num_reserved) == (0, 0)

    calls = iter(range(5))
    hidden = policy.hidden

    def failing(*args):
        if next(calls) == 4:
            raise RuntimeError("injected")
        return hidden(*args)

    monkeypatch.setattr(policy, "hidden", failing)
    with pytest.raises(RuntimeError, match="injected"):
        tested.generate(prompts(5, 17), SamplingParams(max_completion_length=9), 3)
    assert (tested.pool.num_used, tested.pool.num_reserved) == (0, 0)


@pytest.mark.parametrize("num_pages", [9, 13, 40])
def test_little_memory_changes_nothing_but_time(policy, num_pages):
    # 33 prompt tokens are 5 pages; 33 + 24 - 1 = 56 tokens need 7 pages, 3 of them the sample's own.
    sampling = SamplingParams(max_completion_length=24)
    expected = engine(policy).generate(prompts(33, 20, 33, 8), sampling, 3)
    small = RolloutEngine(policy, SPARSE, kernel="reference", kv_memory_gib=gib_for(policy, num_pages))
    assert tokens(small.generate(prompts(33, 20, 33, 8), sampling, 3)) == tokens(expected)
    assert small.pool.num_pages <= num_pages


def test_what_does_not_fit_fails_alone(policy):
    small = RolloutEngine(policy, SPARSE, kernel="reference", kv_memory_gib=gib_for(policy, 6))
    groups = small.generate(prompts(16, 80), SamplingParams(max_completion_length=16), 2)
    assert len(groups[0].rollouts) == 2
    assert groups[0].failures == ()
    assert groups[1].rollouts == ()
    assert [f.sample_index for f in groups[1].failures] == [0, 1]
    assert "raise kv_memory_gib" in groups[1].failures[0].reason
    with pytest.raises(ConfigError, match="No prompt can be completed"):
        small.generate(prompts(80), SamplingParams(max_completion_length=16), 2)


def test_prompt_longer_than_the_context(policy):
    length = policy.spec.max_position
    with pytest.raises(ConfigError, match="context"):
        engine(policy).generate(prompts(length), SamplingParams(max_completion_length=4), 1)


def test_a_group_is_prefilled_once_and_prompts_share_their_beginning(policy, monkeypatch):
    computed = []
    hidden = policy.hidden

    def counting(input_ids, position_ids, ctx):
        computed.append(input_ids.shape[1])
        return hidden(input_ids, position_ids, ctx)

    shared = tuple(range(3, 3 + 32))
    several = [Prompt(index=i, token_ids=(*shared, 40 + i, 41)) for i in range(3)]
    sampling = SamplingParams(max_completion_length=4)
    apart = [engine(policy).generate([p], sampling, 4)[0] for p in several]
    monkeypatch.setattr(policy, "hidden", counting)
    together = engine(policy).generate(several, sampling, 4)
    assert sum(n for n in computed if n > 1) == 34 + 2 + 2  # 4 pages of 8 tokens are computed once
    assert tokens(together) == tokens(apart)


@pytest.mark.parametrize("length", [15, 16, 17])
def test_equal_prompts_share_all_but_what_predicts_the_first_token(policy, length):
    ids = tuple(range(3, 3 + length))
    twins = [Prompt(index=i, token_ids=ids) for i in range(2)]
    sampling = SamplingParams(max_completion_length=6)
    together = engine(policy).generate(twins, sampling, 2)
    assert tokens(together) == tokens([engine(policy).generate([p], sampling, 2)[0] for p in twins])


@pytest.mark.parametrize("prefill_tokens", [5, 16, 64])
def test_chunked_prefill_is_the_same(policy, prefill_tokens):
    sampling = SamplingParams(max_completion_length=10)
    whole = engine(policy).generate(prompts(40, 23), sampling, 2)
    chunked = engine(policy, prefill_tokens=prefill_tokens).generate(prompts(40, 23), sampling, 2)
    assert tokens(chunked) == tokens(whole)


def test_kv_share_counts_dense_layers(policy):
    rollout = engine(policy).generate(prompts(60), SamplingParams(max_completion_length=2), 1)[0].rollouts[0]
    # One decode step at 61 tokens: 8 pages; layer 0 is dense, the others read 5 of 8 (bin 61 → ceil(61/8)//4 = 2 → 5).
    layers, heads = policy.spec.num_layers, policy.spec.num_kv_heads
    assert rollout.pages_total == 8 * layers * heads
    assert rollout.pages_read == (8 + 5 * (layers - 1)) * heads


def test_kv_share_of_windowed_layers_is_that_of_their_window():
    windowed = tiny_policy("gemma2")  # layers 0 and 2 see 8 tokens
    rollout = engine(windowed).generate(prompts(60), SamplingParams(max_completion_length=2), 1)[0].rollouts[0]
    # 61 tokens are 8 pages, the last 8 tokens lie in 2 of them; the full layers 1 and 3 read 5.
    heads = windowed.spec.num_kv_heads
    assert rollout.pages_total == (2 + 8 + 2 + 8) * heads
    assert rollout.pages_read == (2 + 5 + 2 + 5) * heads


def test_recorded_pages_are_a_valid_selection(policy):
    sampling = SamplingParams(max_completion_length=30, record_pages=True)
    rollout = engine(policy).generate(prompts(41), sampling, 1)[0].rollouts[0]
    layers, heads = policy.spec.num_layers - 1, policy.spec.num_kv_heads
    assert rollout.pages.shape == (29, layers, heads, 5)
    for t in range(29):
        num_pages = -(-(42 + t) // 8)
        for row in rollout.pages[t].reshape(-1, 5):
            assert sorted(set(row)) == row.tolist(), "ascending, no page twice, no padding"
            assert {0, num_pages - 2, num_pages - 1} <= set(row.tolist())


def test_budget_changes_with_the_token_that_opens_a_bin(policy):
    plan = BudgetSchedule(name="step", page_size=8, dense_layers=(0,), bin_pages=8, pages=(4, 6))
    sampling = SamplingParams(max_completion_length=12, record_pages=True)
    rollout = engine(policy, plan).generate(prompts(50), sampling, 1)[0].rollouts[0]
    # Token t is fed as the (51 + t)-th: 57 tokens are 8 pages, the first length of bin 1.
    counts = (rollout.pages >= 0).sum(axis=-1)
    for t in range(11):
        assert (counts[t] == (4 if 51 + t < 57 else 6)).all()


def test_a_dense_engine_records_no_pages(policy):
    sampling = SamplingParams(max_completion_length=4, record_pages=True)
    dense = engine(policy, BudgetSchedule.dense(8))
    assert dense.generate(prompts(9), sampling, 1)[0].rollouts[0].pages.size == 0


def test_top_logprobs_contain_the_greedy_token(policy):
    sampling = SamplingParams(max_completion_length=5, temperature=0.0, num_top_logprobs=4)
    rollout = engine(policy).generate(prompts(11), sampling, 1)[0].rollouts[0]
    assert rollout.top_token_ids.shape == rollout.top_logprobs.shape == (5, 4)
    assert rollout.top_token_ids[:, 0].tolist() == list(rollout.token_ids)


def test_stale_weights_are_refused(policy):
    def update(progress):
        policy.bump_version()

    with pytest.raises(RolloutError, match="stale"):
        engine(policy).generate(prompts(5), SamplingParams(max_completion_length=9), 1, progress=update)


def test_progress_counts_to_the_end(policy):
    seen = []
    engine(policy, max_batch_size=2).generate(
        prompts(5, 6), SamplingParams(max_completion_length=4), 3, progress=seen.append
    )
    assert seen[-1].num_finished == seen[-1].num_samples == 6
    assert seen[-1].num_tokens == 24
    assert max(p.num_running for p in seen) <= 2


def test_bad_options(policy):
    with pytest.raises(ConfigError, match=r"keeps layers \[99\] dense"):
        engine(policy, BudgetSchedule(name="deep", dense_layers=(99,), pages=(8,)))
    with pytest.raises(ConfigError, match="max_batch_size"):
        engine(policy, max_batch_size=0)
    with pytest.raises(ConfigError, match="num_samples"):
        engine(policy).generate(prompts(5), SamplingParams(), 0)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("num_samples", [1, 5])
def test_samples_that_end_with_their_first_token(policy, num_samples):
    for prompt_lengths in ((8,), (8, 9, 30)):
        tested, seen = engine(policy, max_batch_size=2), []
        groups = tested.generate(
            prompts(*prompt_lengths), SamplingParams(max_completion_length=1), num_samples, progress=seen.append
        )
        assert [len(r.token_ids) for g in groups for r in g.rollouts] == [1] * num_samples * len(prompt_lengths)
        assert seen[-1].num_finished == num_samples * len(prompt_lengths)
        assert (tested.pool.num_used, tested.pool.num_reserved) == (0, 0)
    every = tuple(range(policy.spec.vocab_size))
    stopped = engine(policy).generate(prompts(8), SamplingParams(stop_token_ids=every), num_samples)
    assert [r.finish_reason for r in stopped[0].rollouts] == ["stop"] * num_samples


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_p=0.5)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_logits_raise_and_leave_the_pool_empty(kernel, sampling, value):
    broken = tiny_policy("llama")
    tested = RolloutEngine(broken, SPARSE, kernel=kernel, kv_memory_gib=0.05, accelerate_modules=False)
    weight = broken.head.weight[7].clone()
    with torch.no_grad():
        broken.head.weight[7] = value
    with pytest.raises(RolloutError, match="logits"):
        tested.generate(prompts(9, 12), sampling, 2)
    assert (tested.pool.num_used, tested.pool.num_reserved) == (0, 0)
    with torch.no_grad():
        broken.head.weight[7] = weight
    assert len(tested.generate(prompts(9), SamplingParams(max_completion_length=4), 2)[0].rollouts) == 2


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_chunked_prefill_is_the_same_with_a_narrower_cache(policy, kernel):
    def run(prefill_tokens):
        tested = RolloutEngine(
            policy, SPARSE, kernel=kernel, kv_memory_gib=0.05, kv_dtype=torch.bfloat16, prefill_tokens=prefill_tokens
        )
        return tested.generate(prompts(57), SamplingParams(max_completion_length=10), 1)[0].rollouts[0]

    whole, chunked = run(64), run(16)
    assert chunked.token_ids == whole.token_ids
    # Not tighter: fp32 rounding turns a key of the bf16 cache over here and there.
    assert torch.allclose(torch.tensor(chunked.logprobs), torch.tensor(whole.logprobs), atol=5e-3)


def test_ids_outside_the_vocabulary_fail_alone(policy):
    bad = Prompt(index=1, token_ids=(5, policy.spec.vocab_size))
    groups = engine(policy).generate([*prompts(5), bad], SamplingParams(max_completion_length=3), 2)
    assert len(groups[0].rollouts) == 2
    assert "vocabulary" in groups[1].failures[0].reason


def test_stop_string_that_names_a_special_token(policy):
    sampling = SamplingParams(max_completion_length=60)
    free = engine(policy).generate(prompts(9), sampling, 12)[0].rollouts
    token = next(i for r in free for i in r.token_ids[:-1] if i in (0, 1))
    text = policy.decode([token], skip_special_tokens=False)
    stopping = SamplingParams(max_completion_length=60, stop_strings=(text,))
    for before, after in zip(free, engine(policy).generate(prompts(9), stopping, 12)[0].rollouts, strict=True):
        place = before.token_ids.index(token) + 1 if token in before.token_ids else 60
        assert after.token_ids == before.token_ids[:place]


def test_a_sparse_schedule_that_is_dense_everywhere_is_refused(policy):
    """It would sample densely and say that it is sparse."""
    with pytest.raises(ConfigError, match="leaves no layer of the model sparse"):
        engine(policy, BudgetSchedule(name="tiny", page_size=8, pages=(4,), dense_layers=(0, 1, 2, 3)))
