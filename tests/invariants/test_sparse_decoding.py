"""I1, I2 and I3: what the engine decodes is what the parallel passes compute, whatever the batch.

I1  budget >= length: sparse = dense.
I2  step-by-step sparse decoding = parallel sparse re-scoring of the same tokens.
I3  batch size, order and prefix sharing change neither the log-probs nor, in fp32, the tokens.
"""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanroll.kernels.scorers import scorer_names
from leanroll.measure.logprobs import score
from leanroll.measure.selection import SparsePlan
from leanroll.rollout.engine import RolloutEngine
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.types import Prompt, SamplingParams
from tests.assertions import assert_close
from tests.tiny import tiny_policy

BACKENDS = ("reference", "cpu")
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")


def schedule(page_size=8, scorer="mean", pages=(4, 5, 6), dense_layers=(0,), first=1, last=2):
    return BudgetSchedule(
        name="test",
        page_size=page_size,
        scorer=scorer,
        bin_pages=3,
        pages=pages,
        dense_layers=dense_layers,
        first_pages=first,
        last_pages=last,
    )


def prompts(lengths, vocab=200):
    rng = np.random.default_rng(0)
    return [Prompt(index=i, token_ids=tuple(rng.integers(3, vocab, n).tolist())) for i, n in enumerate(lengths)]


def generate(policy, plan, lengths, *, samples=2, new=24, backend="reference", record=False, **options):
    sampling = SamplingParams(max_completion_length=new, record_pages=record)
    engine = RolloutEngine(policy, plan, kv_memory_gib=0.1, kernel=backend, **options)
    return engine.generate(prompts(lengths), sampling, samples)


def flat(groups, field):
    return [x for g in groups for r in g.rollouts for x in getattr(r, field)]


def assert_logprobs_close(groups, scores, dtype):
    actual = torch.tensor(flat(groups, "logprobs"))
    assert_close(actual, torch.cat(scores.logprobs).float(), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_i1_a_budget_that_covers_the_length_is_dense(family, backend):
    policy = tiny_policy(family)
    dense = generate(policy, BudgetSchedule.dense(8), (5, 30), backend=backend)
    covered = generate(policy, schedule(pages=(64,)), (5, 30), backend=backend)
    assert flat(covered, "token_ids") == flat(dense, "token_ids")
    assert_close(torch.tensor(flat(covered, "logprobs")), torch.tensor(flat(dense, "logprobs")), torch.float32)
    sparse = generate(policy, schedule(), (5, 30), backend=backend)
    assert flat(sparse, "logprobs") != flat(dense, "logprobs"), "the sparse schedule of these tests does bite"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_decoding_is_dense_rescoring(family, backend):
    policy = tiny_policy(family, adapter=True)
    groups = generate(policy, BudgetSchedule.dense(8), (5, 33), backend=backend)
    assert_logprobs_close(groups, score(policy, groups, temperature=1.0, max_tokens=512), torch.float32)


@pytest.mark.parametrize(
    ("family", "scorer"),
    [
        *((family, scorer) for family in FAMILIES for scorer in ("mean", "softmax")),
        *(("llama", s) for s in scorer_names()[2:]),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_i2_own_selection_in_fp32(family, backend, scorer):
    policy = tiny_policy(family, adapter=True)
    plan = schedule(scorer=scorer)
    groups = generate(policy, plan, (5, 33, 64), backend=backend)
    assert any(r.pages_read < r.pages_total for g in groups for r in g.rollouts)
    scores = score(policy, groups, temperature=1.0, max_tokens=512, plan=SparsePlan.of(policy.spec, plan))
    assert_logprobs_close(groups, scores, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_i2_recorded_pages_in_fp32(backend):
    policy = tiny_policy("llama")
    plan = schedule(scorer="softmax")
    groups = generate(policy, plan, (5, 33, 64), backend=backend, record=True)
    recorded = SparsePlan.of(policy.spec, plan, recorded=True)
    assert_logprobs_close(groups, score(policy, groups, temperature=1.0, max_tokens=512, plan=recorded), torch.float32)


def test_i2_recorded_pages_of_a_narrower_cache():
    policy, plan = tiny_policy("llama"), schedule()
    groups = generate(policy, plan, (5, 60), record=True, kv_dtype=torch.bfloat16)
    rounded = SparsePlan.of(policy.spec, plan, kv_dtype=torch.bfloat16, recorded=True)
    scores = score(policy, groups, temperature=1.0, max_tokens=4096, plan=rounded)
    actual = torch.tensor(flat(groups, "logprobs"))
    # Not bit for bit: an activation that differs by its last bit can fall to the other side when it is rounded to the cache.
    assert (actual - torch.cat(scores.logprobs)).abs().median() < 1e-5
    first = torch.tensor([r.logprobs[0] for g in groups for r in g.rollouts])
    again = torch.stack([s[0] for s in scores.logprobs])
    assert_close(again, first, torch.float16, "the prompts, whose keys prefill rounds")


@pytest.mark.parametrize("backend", BACKENDS)
def test_i2_recorded_pages_in_bf16(backend):
    """Decoding and re-scoring round at different places, layer after layer; they may differ by what bf16 itself costs, no more."""
    policy = tiny_policy("llama", dtype=torch.bfloat16)
    exact = tiny_policy("llama")
    exact.model.load_state_dict({name: x.float() for name, x in policy.model.state_dict().items()})
    plan = schedule(scorer="softmax")
    groups = generate(policy, plan, (5, 33, 64), backend=backend, record=True, new=48)
    recorded = SparsePlan.of(policy.spec, plan, recorded=True)
    decoded = torch.tensor(flat(groups, "logprobs"))
    parallel, truth = (
        torch.cat(score(p, groups, temperature=1.0, max_tokens=512, plan=recorded).logprobs) for p in (policy, exact)
    )
    rounding = (parallel - truth).square().mean().sqrt()
    assert (decoded - parallel).square().mean().sqrt() <= 1.5 * rounding
    # Other pages would show: bf16 noise is far below what the selection changes.
    dense = torch.cat(score(policy, groups, temperature=1.0, max_tokens=512).logprobs)
    assert (decoded - dense).square().mean().sqrt() > 5 * rounding


@settings(max_examples=12, deadline=None)
@given(
    group=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    page_size=st.sampled_from([8, 16]),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    reserved=st.sampled_from([(0, 1), (1, 1), (1, 2), (2, 3)]),
    backend=st.sampled_from(BACKENDS),
    scorer=st.sampled_from(scorer_names()),
)
def test_i2_over_shapes(group, head_dim, page_size, lengths, reserved, backend, scorer):
    policy = tiny_policy(
        "llama",
        head_dim=head_dim,
        num_attention_heads=2 * group,
        num_key_value_heads=2,
        num_hidden_layers=2,
        hidden_size=96,
    )
    first, last = reserved
    low = first + last
    plan = schedule(page_size, scorer, pages=(low, low + 1, low + 3), first=first, last=last)
    groups = generate(policy, plan, lengths, backend=backend, new=20, samples=1)
    scores = score(policy, groups, temperature=1.0, max_tokens=512, plan=SparsePlan.of(policy.spec, plan))
    assert_logprobs_close(groups, scores, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_i3_batch_size_and_order_do_not_matter(backend):
    policy = tiny_policy("qwen3", adapter=True)
    plan = schedule()
    lengths = (40, 7, 22, 40)
    expected = generate(policy, plan, lengths, samples=4, backend=backend, max_batch_size=16)
    for batch in (1, 4):
        actual = generate(policy, plan, lengths, samples=4, backend=backend, max_batch_size=batch)
        assert flat(actual, "token_ids") == flat(expected, "token_ids")
        assert_close(torch.tensor(flat(actual, "logprobs")), torch.tensor(flat(expected, "logprobs")), torch.float32)

    engine = RolloutEngine(policy, plan, kv_memory_gib=0.1, kernel=backend, max_batch_size=3)
    backwards = engine.generate(prompts(lengths)[::-1], SamplingParams(max_completion_length=24), 4)[::-1]
    assert flat(backwards, "token_ids") == flat(expected, "token_ids")


def test_i3_prefix_sharing_does_not_matter():
    policy = tiny_policy("llama")
    plan = schedule()
    shared = prompts([37])[0].token_ids
    several = [Prompt(index=i, token_ids=(*shared, 100 + i, 7)) for i in range(3)]
    sampling = SamplingParams(max_completion_length=20)
    engine = RolloutEngine(policy, plan, kv_memory_gib=0.1, kernel="reference")
    together = engine.generate(several, sampling, 2)
    apart = [engine.generate([p], sampling, 2)[0] for p in several]
    assert flat(together, "token_ids") == flat(apart, "token_ids")
    assert_close(torch.tensor(flat(together, "logprobs")), torch.tensor(flat(apart, "logprobs")), torch.float32)


def test_truncated_logprobs_are_reproduced_on_the_recorded_support():
    policy = tiny_policy("llama")
    sampling = SamplingParams(max_completion_length=20, temperature=0.8, top_k=20, top_p=0.9)
    engine = RolloutEngine(policy, BudgetSchedule.dense(8), kv_memory_gib=0.1, kernel="reference")
    groups = engine.generate(prompts((9, 30)), sampling, 2)
    assert_logprobs_close(groups, score(policy, groups, temperature=0.8, max_tokens=512), torch.float32)
    bare = [
        dataclasses.replace(g, rollouts=tuple(dataclasses.replace(r, support=None) for r in g.rollouts)) for g in groups
    ]
    untruncated = score(policy, bare, temperature=0.8, max_tokens=512)
    assert (torch.cat(untruncated.logprobs) < torch.tensor(flat(groups, "logprobs"))).any()
