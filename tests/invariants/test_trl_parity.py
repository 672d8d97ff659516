"""I6: the same rollouts give TRL's loss, advantages and gradient, in every variant, however they are cut into micro-batches.

Compared with numbers that TRL 1.16 gave (`tests/golden/make_trl_golden.py`), and with TRL itself where it is installed.
"""

import importlib.util
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from leanroll.losses.correction import correction
from leanroll.losses.policy import advantages, completion_mask, denominators, policy_loss
from leanroll.measure.logprobs import batch_logprobs, score
from leanroll.measure.packing import pack
from leanroll.models import Policy
from leanroll.types import Prompt, Rollout, RolloutGroup
from tests.assertions import assert_close
from tests.golden import make_trl_golden as golden

TRL_EPS = 1e-4


@pytest.fixture(scope="module")
def stored():
    with safe_open(golden.GOLDEN, "pt") as file:
        cases = json.loads(file.metadata()["cases"])
        assert cases == json.loads(json.dumps([vars_of(c) for c in golden.CASES])), "run make_trl_golden.py again"
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def vars_of(case):
    return {name: getattr(case, name) for name in case.__dataclass_fields__}


def rollout_groups(sampler):
    groups, row = [], 0
    for index, (prompt, completions) in enumerate(zip(golden.PROMPTS, golden.COMPLETIONS, strict=True)):
        rollouts = []
        for i, ids in enumerate(completions):
            reason = "stop" if ids[-1] == golden.EOS else "length"
            rollouts.append(Rollout(index, i, ids, tuple(sampler[row, : len(ids)].tolist()), reason))
            row += 1
        groups.append(RolloutGroup(Prompt(index, prompt), tuple(rollouts)))
    return groups


def policy_with(weights):
    return Policy(golden.tiny_model(weights), golden.tokenizer(), name="golden")


def joined(values, batch):
    return torch.cat([values[s] for s in batch.samples])


def ours(case, inputs, max_tokens):
    groups = rollout_groups(inputs["sampler"])
    rollouts = [r for g in groups for r in g.rollouts]
    settings = {"temperature": case.temperature, "max_tokens": 64, "with_entropy": False}
    old = score(policy_with(inputs["old"]), groups, **settings).logprobs
    ref = score(policy_with(inputs["ref"]), groups, **settings).logprobs if case.beta else None
    advantage = torch.from_numpy(advantages(np.array(golden.REWARDS), case.scale_rewards, eps=TRL_EPS).reshape(-1))
    counted = [r.finish_reason == "stop" or not case.mask_truncated_completions for r in rollouts]
    lengths = torch.tensor([len(r.token_ids) * c for r, c in zip(rollouts, counted, strict=True)])
    divisors = denominators(case.loss_type, lengths, max_completion_length=golden.MAX_COMPLETION_LENGTH)
    policy = policy_with(inputs["new"])
    total = torch.zeros(())
    for batch in pack(groups, max_tokens):
        old_logprobs = joined(old, batch)
        mask = completion_mask([r.finish_reason for r in rollouts], batch.sample_ids, case.mask_truncated_completions)
        weights = correction(
            old_logprobs,
            torch.tensor([x for s in batch.samples for x in rollouts[s].logprobs]),
            batch.sample_ids,
            case.importance_sampling_mode or "off",
            cap=case.importance_sampling_cap,
            floor=case.importance_sampling_floor,
            mask=mask,
        ).weights
        loss, _ = policy_loss(
            batch_logprobs(policy, batch, temperature=case.temperature).logprobs,
            old_logprobs,
            advantage,
            divisors,
            batch.sample_ids,
            clip_low=case.epsilon,
            clip_high=case.epsilon_high,
            delta=case.delta,
            beta=case.beta,
            use_bias_correction_kl=case.use_bias_correction_kl,
            weights=weights,
            ref_logprobs=joined(ref, batch) if ref is not None else None,
            mask=mask,
        )
        loss.backward()
        total = total + loss.detach()
    gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    return {"loss": total, "advantages": advantage.float(), "gradient": gradient}


def assert_parity(case, inputs, expected):
    for max_tokens in (64, 12):
        actual = ours(case, inputs, max_tokens)
        for name in ("advantages", "gradient"):
            assert_close(actual[name], expected[name], name=f"{case.name}: {name}")
        # Losses are sums of terms of order one that cancel: their rounding is relative to one, not to what is left.
        losses = [torch.stack([result["loss"], torch.ones(())]) for result in (actual, expected)]
        assert_close(*losses, name=f"{case.name}: loss")


@pytest.mark.parametrize("case", golden.CASES, ids=lambda c: c.name)
def test_stored_trl_numbers(case, stored):
    inputs = {name.removeprefix("input."): value for name, value in stored.items() if name.startswith("input.")}
    assert_parity(case, inputs, {name: stored[f"{case.name}.{name}"] for name in ("loss", "advantages", "gradient")})


def test_the_cases_tell_the_settings_apart(stored):
    """A variant that changed nothing would be compared in vain."""
    same = {("bnpo", "dapo")}  # they differ only when one rollout batch gives several steps
    names = [c.name for c in golden.CASES]
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            equal = torch.allclose(stored[f"{a}.gradient"], stored[f"{b}.gradient"], rtol=1e-3, atol=1e-4)
            assert equal == ((a, b) in same), (a, b)


@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl is not installed (optional: pip install 'trl==1.16.*')"
)
@pytest.mark.parametrize("case", golden.CASES, ids=lambda c: c.name)
def test_live_trl(case, stored):
    inputs = {name.removeprefix("input."): value for name, value in stored.items() if name.startswith("input.")}
    assert_parity(case, inputs, golden.run_trl(case, inputs))
