"""P(EOS) against the full logits of tiny models, one sequence at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from leanroll.measure.stops import position_means, rollout_stop_probs, stop_probs
from leanroll.models.head import LmHead
from leanroll.train.ranks import Ranks
from leanroll.types import Prompt, Rollout, RolloutGroup, SamplingParams
from tests.tiny import tiny_model, tiny_policy

SAMPLING = SamplingParams(temperature=0.7, stop_token_ids=(2, 40), top_p=0.9)


def groups_of(lengths=((5, (1, 7, 20)), (4, ()), (16, (12, 3)))):
    rng = np.random.default_rng(0)
    made = []
    for index, (prompt, completions) in enumerate(lengths):
        ids = [tuple(rng.integers(3, 200, n).tolist()) for n in (prompt, *completions)]
        rollouts = [Rollout(index, i, c, (-1.0,) * len(c), "length") for i, c in enumerate(ids[1:])]
        made.append(RolloutGroup(Prompt(index, ids[0]), tuple(rollouts)))
    return made


def expected_probs(model, groups, temperature, stops, forbidden=()):
    """From all logits of each sequence: before token t of the completion, the softmax of the position before it."""
    found = []
    for group in groups:
        for r in group.rollouts:
            first = len(group.prompt.token_ids)
            with torch.no_grad():
                logits = model(torch.tensor([[*group.prompt.token_ids, *r.token_ids]]), use_cache=False).logits[0]
            weights = (logits.double() / temperature).exp()
            weights[:, list(forbidden)] = 0
            probs = weights[:, list(stops)].sum(1) / weights.sum(1)
            found.append(np.array([float(probs[first + t - 1]) for t in range(len(r.token_ids))]))
    return found


@pytest.mark.parametrize(
    ("family", "attention", "max_tokens"), [("llama", "sdpa", 8), ("gemma2", "eager", 200), ("qwen3", "sdpa", 40)]
)
def test_p_eos_is_that_of_all_logits(family, attention, max_tokens):
    plain = tiny_model(family)
    plain.set_attn_implementation(attention)
    groups = groups_of()
    got = rollout_stop_probs(tiny_policy(family), groups, SAMPLING, max_tokens)
    expected = expected_probs(plain, groups, 0.7, (2, 40))
    assert [p.shape for p in got] == [(n,) for n in (1, 7, 20, 12, 3)]
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-7)
    assert np.concatenate(got).std() > 1e-4, "it could be a constant"


def test_forbidden_ids_count_nowhere():
    groups, policy, plain = groups_of(), tiny_policy("llama"), tiny_model("llama")
    forbidden = (7, 40, *range(100, 180))
    got = rollout_stop_probs(policy, groups, replace(SAMPLING, forbidden_token_ids=forbidden), 100)
    for ours, theirs in zip(got, expected_probs(plain, groups, 0.7, (2,), forbidden), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-7)


def test_a_token_does_not_change_its_own_value():
    """P(EOS) at t is known before token t is drawn, and the first one from the prompt alone."""
    shared = (9, 30, 31)
    ends = (40, 50)
    rollouts = tuple(Rollout(0, i, (*shared, end), (-1.0,) * 4, "length") for i, end in enumerate(ends))
    short = RolloutGroup(Prompt(1, (5, 6, 7)), (Rollout(1, 0, (77,), (-1.0,), "length"),))
    one, two, alone = rollout_stop_probs(
        tiny_policy("llama"), [RolloutGroup(Prompt(0, (5, 6, 7)), rollouts), short], SAMPLING, 100
    )
    np.testing.assert_allclose(one, two, rtol=1e-6)
    assert alone[0] == pytest.approx(one[0], rel=1e-6)


def test_edges():
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(9, 8, generator=generator), LmHead(torch.randn(20, 8, generator=generator))
    logits = (hidden @ head.weight.T).double()
    whole = stop_probs(hidden, head, SamplingParams(temperature=0.5, stop_token_ids=(3, 19)))
    torch.testing.assert_close(whole, (logits / 0.5).softmax(-1)[:, [3, 19]].sum(-1).float(), rtol=1e-4, atol=1e-7)
    in_chunks = stop_probs(hidden, head, SamplingParams(temperature=0.5, stop_token_ids=(3, 19, 20, 99)), chunk_rows=2)
    torch.testing.assert_close(in_chunks, whole, rtol=1e-5, atol=1e-8, msg="ids beyond the head cannot be drawn")
    greedy = stop_probs(hidden, head, SamplingParams(temperature=0.0, stop_token_ids=(3,)))
    torch.testing.assert_close(greedy, logits.softmax(-1)[:, 3].float(), rtol=1e-4, atol=1e-7)
    assert stop_probs(hidden, head, SamplingParams()).tolist() == [0.0] * 9, "nothing stops"
    assert rollout_stop_probs(tiny_policy("llama"), [], SAMPLING, 100) == []


def test_processes_share_the_scoring():
    """Each scores its groups, in order; one may have none."""
    groups, policy, asked = groups_of(), tiny_policy("llama"), []

    def work(part):
        asked.append([g.prompt.index for g in part])
        return rollout_stop_probs(policy, part, SAMPLING, 100)

    class Rank(Ranks):
        def __init__(self, rank):
            self.rank, self.size = rank, 4

        def gather(self, value, what):
            return [value]

    parts = [Rank(rank).split(groups, work, "P(EOS)") for rank in range(4)]
    assert asked == [[0], [1], [2], []]
    for ours, theirs in zip([p for part in parts for p in part], work(groups), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_position_means():
    values = [np.array([0.1, 0.2, 0.6]), np.array([0.3]), np.array([0.5, 0.0, 0.2, 0.0, 1.0])]
    assert position_means(values, 2) == pytest.approx([(0.1 + 0.2 + 0.3 + 0.5) / 5, 0.8 / 3, 1.0])
    assert position_means(values, 100) == pytest.approx([2.9 / 9])
