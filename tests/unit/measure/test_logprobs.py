"""Scoring rollouts: against transformers' own forward, with supports, split over micro-batches."""

import numpy as np
import pytest
import torch

from leanroll.measure.logprobs import batch_logprobs, score, split_by_sample
from leanroll.measure.packing import pack
from leanroll.types import Prompt, Rollout, RolloutGroup
from tests.assertions import assert_close
from tests.tiny import tiny_model, tiny_policy


def groups_of(lengths=((5, (1, 7, 20)), (16, (12, 3))), support=None):
    rng = np.random.default_rng(0)
    groups = []
    for index, (prompt, completions) in enumerate(lengths):
        rollouts = []
        for i, n in enumerate(completions):
            ids = tuple(rng.integers(3, 200, n).tolist())
            rollouts.append(Rollout(index, i, ids, (-1.0,) * n, "stop", support=support(ids) if support else None))
        groups.append(RolloutGroup(Prompt(index, tuple(rng.integers(3, 200, prompt).tolist())), tuple(rollouts)))
    return groups


def plain_logits(model, groups):
    """Logits [n, V] of every completion token, one sequence at a time through the unhooked model."""
    for group in groups:
        for r in group.rollouts:
            ids = torch.tensor([[*group.prompt.token_ids, *r.token_ids]])
            yield model(ids, use_cache=False).logits[0, len(group.prompt.token_ids) - 1 : -1], torch.tensor(r.token_ids)


# Not gemma2 with sdpa: there transformers leaves the softcap out.
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("qwen3", "sdpa"),
        ("gemma2", "eager"),
        ("gemma3", "sdpa"),
        ("gemma3", "eager"),
    ],
)
def test_packed_scores_are_the_models_own(family, attention):
    groups = groups_of()
    plain = tiny_model(family)
    plain.set_attn_implementation(attention)
    policy = tiny_policy(family)
    for max_tokens in (40, 200):
        scores = score(policy, groups, temperature=0.8, max_tokens=max_tokens)
        with torch.no_grad():
            for (logits, ids), actual, entropy in zip(
                plain_logits(plain, groups), scores.logprobs, scores.entropies, strict=True
            ):
                expected = (logits / 0.8).log_softmax(-1)
                assert_close(actual, expected.gather(1, ids[:, None])[:, 0], name=f"{family} log-probs")
                assert_close(entropy, -(expected.exp() * expected).sum(-1), name=f"{family} entropy")


def test_supports_are_read_from_the_rollouts():
    keep = lambda ids: tuple(None if t == 1 else np.array([ids[t], 3, 5]) for t in range(len(ids)))  # noqa: E731
    groups, policy = groups_of(support=keep), tiny_policy("llama")
    plain = tiny_model("llama")
    scores = score(policy, groups, temperature=1.0, max_tokens=40)
    full = score(policy, groups, temperature=1.0, max_tokens=40, truncated=False)
    with torch.no_grad():
        for (logits, ids), actual, untruncated in zip(
            plain_logits(plain, groups), scores.logprobs, full.logprobs, strict=True
        ):
            assert_close(untruncated, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])
            for t, token in enumerate(ids.tolist()):
                if t != 1:
                    outside = torch.ones(logits.shape[1], dtype=torch.bool)
                    outside[torch.tensor([token, 3, 5])] = False
                    logits[t, outside] = -torch.inf
            assert_close(actual, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])


def test_split_by_sample_follows_the_batch():
    policy, groups = tiny_policy("llama"), groups_of()
    for batch in pack(groups, 40):
        scores = batch_logprobs(policy, batch, temperature=1.0)
        parts = split_by_sample(scores.logprobs, batch)
        assert list(parts) == list(batch.samples)
        for sample, part in parts.items():
            assert torch.equal(part, scores.logprobs[batch.sample_ids == sample])


def test_gradients_only_on_request():
    policy, groups = tiny_policy("llama"), groups_of()
    scores = score(policy, groups, temperature=1.0, max_tokens=100)
    assert not any(x.requires_grad for x in scores.logprobs)
    assert (
        score(policy, groups, temperature=1.0, max_tokens=100, with_entropy=False, grad=True).logprobs[0].requires_grad
    )
