"""Packing: the worked example, and that every token of every completion is predicted exactly once from the right prefix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanroll.errors import ConfigError
from leanroll.measure.packing import pack, pack_tokens
from leanroll.types import Prompt, Rollout, RolloutGroup


def test_worked_example_of_the_docstring():
    (batch,) = pack_tokens([(1, 2, 3)], [[(7, 8), (4, 5, 6)]], max_tokens=10)
    assert batch.input_ids.tolist() == [[1, 2, 3, 7, 4, 5]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 3, 4]]
    assert batch.rows.tolist() == [2, 3, 2, 4, 5]
    assert batch.targets.tolist() == [7, 8, 4, 5, 6]
    assert batch.sample_ids.tolist() == [0, 0, 1, 1, 1]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2]
    assert (batch.num_inputs, batch.num_targets, batch.samples) == (6, 5, (0, 1))


tokens = st.lists(st.integers(0, 99), min_size=1, max_size=12)
groups = st.lists(st.tuples(tokens, st.lists(tokens, max_size=4)), min_size=1, max_size=5)


@given(groups, st.integers(24, 60))
def test_every_token_is_predicted_once_from_its_own_prefix(drawn, max_tokens):
    prompts, completions = [p for p, _ in drawn], [c for _, c in drawn]
    owners = [(p, c) for p, group in drawn for c in group]
    seen = []
    for batch in pack_tokens(prompts, completions, max_tokens):
        assert batch.num_inputs <= max_tokens
        ids = batch.input_ids[0].tolist()
        covered = []
        prefix_of_row = {}
        for group in batch.groups:
            prompt = ids[group.start : group.stop]
            covered += range(group.start, group.stop)
            for segment in group.completions:
                covered += range(segment.start, segment.stop)
                own = ids[segment.start : segment.stop]
                assert batch.position_ids[0, segment.start : segment.stop].tolist() == [
                    len(prompt) + i for i in range(len(own))
                ]
                for position in range(len(own) + 1):
                    row = group.stop - 1 if position == 0 else segment.start + position - 1
                    prefix_of_row[segment.sample, position] = (row, prompt + own[:position])
        assert covered == list(range(batch.num_inputs)), "segments are contiguous and in row order"
        for row, target, sample, position in zip(
            batch.rows.tolist(),
            batch.targets.tolist(),
            batch.sample_ids.tolist(),
            batch.positions.tolist(),
            strict=True,
        ):
            prompt, completion = owners[sample]
            assert prefix_of_row[sample, position] == (row, prompt + completion[:position])
            assert target == completion[position]
            seen.append((sample, position))
    assert sorted(seen) == [(s, t) for s, (_, c) in enumerate(owners) for t in range(len(c))]


def test_a_group_that_does_not_fit_repeats_its_prompt():
    batches = pack_tokens([(1, 2, 3)], [[(4, 5, 6), (7, 8, 9), (10, 11, 12)]], max_tokens=7)
    assert [b.samples for b in batches] == [(0, 1), (2,)]
    assert [b.input_ids[0].tolist() for b in batches] == [[1, 2, 3, 4, 5, 7, 8], [1, 2, 3, 10, 11]]


def test_rollouts_travel_with_their_batch():
    rollouts = tuple(Rollout(0, i, (5, 6), (-1.0, -1.0), "stop") for i in range(2))
    (batch,) = pack([RolloutGroup(Prompt(0, (1, 2)), rollouts)], max_tokens=8)
    assert batch.rollouts == {0: rollouts[0], 1: rollouts[1]}
    assert batch.to("cpu").rollouts == batch.rollouts


@pytest.mark.parametrize(
    ("prompt", "completion", "says"),
    [
        ((1, 2, 3), (4, 5, 6, 7), "Sample 0 .* needs 6 tokens .* holds 5"),
        ((), (4, 5), "empty prompt"),
        ((1, 2), (), "has no tokens"),
    ],
)
def test_what_cannot_be_packed_says_so(prompt, completion, says):
    with pytest.raises(ConfigError, match=says):
        pack_tokens([prompt], [[completion]], max_tokens=5)
