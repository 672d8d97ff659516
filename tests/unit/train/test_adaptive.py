"""The controller of N, on curves whose right answer is known."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from leanroll.config import AdaptConfig, DistillConfig, validate
from leanroll.errors import ConfigError
from leanroll.train.adaptive import Decision, NumTokensController, ProbeKl


def controller(start: int = 16, **options: Any) -> NumTokensController:
    given = {"max_num_tokens": 64, "min_num_tokens": 8, "factor": 2.0, "window": 2, "calm_steps": 10} | options
    return NumTokensController(AdaptConfig(**given), start)


def learned(**options: Any) -> NumTokensController:
    """Whose head is at a tenth of its start."""
    made = controller(**options)
    for kl in (1.0, 1.0, 0.1, 0.1):
        made.observe(kl)
    return made


MORE_LEFT, NOTHING_LEFT = ProbeKl(0.1, 0.5), ProbeKl(0.1, 0.05)


def test_extends_where_the_head_is_learned_and_the_tail_is_not() -> None:
    made = learned()
    decision = made.decide(4, MORE_LEFT, 0)
    assert decision == Decision(1, 32, decision.reason, 0.1)
    assert "head's KL is at 0.10 of its start, and beyond N it is 0.500, more than 0.100" in decision.reason
    assert made.num_tokens == 32
    assert decision.metrics() == {"adapt/move": 1, "adapt/head_share": 0.1}


@pytest.mark.parametrize(
    ("probe", "options", "reason"),
    [
        (ProbeKl(0.1, 0.1), {}, "the KL beyond N is 0.100, no more than 0.100"),
        (ProbeKl(0.1, 0.19), {"tail_factor": 2.0}, "no more than 0.200"),
        (ProbeKl(0.1, None), {}, "no probe completion goes beyond N = 16"),
        (ProbeKl(0.1, 0.0), {"tail_factor": 0.0}, "the KL beyond N is 0.000"),
        (MORE_LEFT, {"extend_below": 0.09}, "at 0.10 of its start, above adapt.extend_below = 0.09"),
    ],
)
def test_stays_and_says_why(probe: ProbeKl, options: dict[str, Any], reason: str) -> None:
    made = learned(**options)
    decision = made.decide(4, probe, 0)
    assert (decision.move, decision.num_tokens, made.num_tokens) == (0, 16, 16)
    assert reason in decision.reason


def test_needs_two_windows_that_share_no_step() -> None:
    made = controller(window=3, extend_below=1.0)
    for count in range(1, 7):
        made.observe(0.1)
        decision = made.decide(count, MORE_LEFT, 0)
        assert decision.move == (1 if count == 6 else 0)
    made = controller(window=3, extend_below=0.5)
    for kl in (0.9, 1.0, 1.1, 5.0, 0.3, 0.3, 0.6):
        made.observe(kl)
    assert made.decide(7, MORE_LEFT, 0).head_share == pytest.approx(0.4), "the first three and the last three"


def test_an_alarm_shrinks_whatever_the_curves_say() -> None:
    for made in (learned(), controller()):
        decision = made.decide(4, MORE_LEFT, 2)
        assert (decision.move, decision.num_tokens) == (-1, 8)
        assert decision.reason == "alarms of the guard: 2"


def test_limits() -> None:
    made = learned(start=40)
    assert made.decide(4, MORE_LEFT, 0).num_tokens == 64, "not 80"
    end = made.decide(5, MORE_LEFT, 0)
    assert (end.move, end.num_tokens) == (0, 64)
    assert "N is at adapt.max_num_tokens already" in end.reason
    made = learned(start=9)
    assert made.decide(4, MORE_LEFT, 1).num_tokens == 8, "not 4"
    end = made.decide(5, MORE_LEFT, 1)
    assert (end.move, end.num_tokens) == (0, 8)
    assert "N is at adapt.min_num_tokens already" in end.reason


def test_a_small_factor_still_moves() -> None:
    made = learned(start=10, factor=1.01, calm_steps=0)
    assert made.decide(4, MORE_LEFT, 0).num_tokens == 11
    assert made.decide(5, MORE_LEFT, 1).num_tokens == 10


def test_no_extension_soon_after_a_shrink() -> None:
    """Also where the shrink came to nothing, because N is the smallest already."""
    for start in (32, 8):
        made = learned(start=start, calm_steps=10)
        made.decide(20, MORE_LEFT, 1)
        low = made.num_tokens
        for step in (25, 29):
            stayed = made.decide(step, MORE_LEFT, 0)
            assert (stayed.move, made.num_tokens) == (0, low)
            assert f"shrank {step - 20} steps ago, less than adapt.calm_steps = 10" in stayed.reason
        assert made.decide(30, MORE_LEFT, 0).move == 1
    made = learned(start=32, calm_steps=0)
    made.decide(20, MORE_LEFT, 1)
    assert made.decide(21, MORE_LEFT, 0).move == 1


def simulate(seed: int, *, need: int, collapse_at: int | None = None, steps: int = 200) -> list[int]:
    """N over steps. A head that is learned within 20 steps, a tail with KL up to position `need`, noise on all; from `collapse_at`
    on, N above 24 collapses."""
    made = controller(start=8, window=5, calm_steps=30, factor=1.5, tail_factor=1.0)
    rng = np.random.default_rng(seed)
    found = []
    for step in range(1, steps + 1):
        found.append(made.num_tokens)
        head = (0.1 + 0.9 * np.exp(-step / 6)) * rng.lognormal(0.0, 0.2)
        made.observe(float(head))
        if step % 10 == 0:
            left = max(0.0, (need - made.num_tokens) / need)
            tail = 0.02 + 0.6 * left * rng.lognormal(0.0, 0.2)
            alarms = int(collapse_at is not None and step >= collapse_at and made.num_tokens > 24)
            made.decide(step, ProbeKl(0.1, float(tail)), alarms)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_stops_where_nothing_is_left_to_learn(seed: int) -> None:
    curve = simulate(seed, need=40)
    assert curve[:10] == [8] * 10, "before the head is learned"
    assert curve == sorted(curve), "no alarm, no way back"
    assert 27 <= curve[-1] <= 41, "near where the tail's KL falls to the head's"
    assert simulate(seed, need=4)[-1] == 8
    assert simulate(seed, need=10_000)[-1] == 64


def test_answers_a_collapse_and_tries_again_later() -> None:
    curve = np.array(simulate(0, need=10_000, collapse_at=120))
    assert curve[119] > 24
    after = curve[120:]
    assert after.min() <= 24
    downs, ups = (np.flatnonzero(np.diff(curve) * sign > 0) + 1 for sign in (-1, 1))
    assert all(not ((ups > down) & (ups < down + 30)).any() for down in downs)
    assert (ups > downs[0]).any(), "tried again"


def test_replay_of_the_metrics_is_the_state() -> None:
    """Through JSON, as metrics.jsonl holds them, from any step on."""
    rng = np.random.default_rng(3)
    config = AdaptConfig(max_num_tokens=64, min_num_tokens=8, window=3, calm_steps=8, extend_below=0.9)
    made, records, states = NumTokensController(config, 12), [], []
    for step in range(1, 61):
        record: dict[str, Any] = {"step": step, "distill/num_tokens": made.num_tokens}
        if step != 17:  # an update without tokens
            record["adapt/head_kl"] = float(rng.lognormal(-step / 30, 0.3))
            made.observe(record["adapt/head_kl"])
        if step % 4 == 0:
            alarms = int(rng.random() < 0.2)
            probe = ProbeKl(float(rng.lognormal()), None if step == 8 else float(rng.lognormal(0.5)))
            record |= {"probe/alarms": alarms} | probe.metrics() | made.decide(step, probe, alarms).metrics()
        records.append(json.loads(json.dumps(record)))
        states.append(made.num_tokens)
    assert len(set(states)) > 3, "it moved"
    for cut in range(0, 61, 7):
        again = NumTokensController(config, 12)
        again.replay(records[:cut])
        assert again.num_tokens == (states[cut - 1] if cut else 12)
        again.replay(records[cut:])
        assert again.num_tokens == states[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guard": {}}, "but guard.every is 0; N moves at the guard's probes alone"),
        ({"guard": {"every": 2, "on_alarm": "roll_back"}, "train": {"save_every": 1}}, "would forget the alarm"),
        ({"distill": {"num_tokens": 4}}, "distill.num_tokens is 4, where N starts; expected 8 to 64"),
        ({"distill": {"num_tokens": 65}}, "expected 8 to 64"),
        ({"distill": {"num_tokens": 16, "final_num_tokens": 32}}, "distill.final_num_tokens is set"),
        ({"distill": {"full_rollouts": True}}, "distill.full_rollouts is true"),
        ({"distill": {"per_prompt_tokens": True}}, "distill.per_prompt_tokens is true"),
        ({"distill": {"num_tokens": 16, "objective": "no_teacher"}}, "the KL from the teacher, which is not asked"),
        ({"rollout": {"max_completion_length": 63}}, "more than rollout.max_completion_length = 63"),
        ({"train": {"micro_batch_tokens": 40}}, "a completion can have adapt.max_num_tokens = 64 tokens"),
        ({"adapt": {"max_num_tokens": 7}}, "adapt.min_num_tokens is 8, more than adapt.max_num_tokens = 7"),
        ({"adapt": {"factor": 2.0}}, "adapt.factor is set but has no effect"),
        ({"adapt": {"max_num_tokens": 64, "factor": 1.0}}, "greater than 1"),
    ],
)
def test_recipes_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    data: dict[str, Any] = {
        "teacher": {"system_prompt": "x"}, "distill": {"num_tokens": 16}, "guard": {"every": 2},
        "adapt": {"max_num_tokens": 64},
    }  # fmt: skip
    validate(DistillConfig, data)
    with pytest.raises(ConfigError, match=message):
        validate(DistillConfig, data | changes)
