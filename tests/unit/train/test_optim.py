"""AdamW with fp32 masters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leanroll.errors import ConfigError, ResumeError
from leanroll.train.optim import MasterAdamW


def quadratic_steps(p: nn.Parameter, steps: int, lr: float) -> MasterAdamW:
    optimizer = MasterAdamW([("p", p)], lr=lr)
    for _ in range(steps):
        (p.float() - 2.0).square().sum().backward()
        optimizer.accumulate()
        optimizer.step(lr_factor=1.0, max_grad_norm=0.0, grad_norm=optimizer.grad_norm())
    return optimizer


def test_bf16_weights_follow_fp32_training() -> None:
    """An update of 1e-4 is far below bf16's resolution at 1.0; only a master keeps it."""
    exact = nn.Parameter(torch.ones(3, 2))
    rounded = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    quadratic_steps(exact, 50, 1e-4)
    optimizer = quadratic_steps(rounded, 50, 1e-4)
    assert torch.allclose(optimizer.masters["p"], exact, atol=1e-4)
    assert torch.equal(rounded, optimizer.masters["p"].bfloat16())


def test_gradients_add_up_in_fp32() -> None:
    p = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("p", p)], lr=1.0)
    for value in (256.0, 0.5, 0.5):  # bf16 would lose both halves
        (p * value).sum().backward()
        optimizer.accumulate()
    assert torch.equal(optimizer.masters["p"].grad, torch.full((4,), 257.0))
    assert optimizer.grad_norm() == pytest.approx(514.0)


def test_clipping_scales_the_whole_gradient() -> None:
    """AdamW forgets the scale of its first gradient, so look at the moment it stores."""
    p = nn.Parameter(torch.zeros(4))
    optimizer = MasterAdamW([("p", p)], lr=1.0, betas=(0.0, 0.0))
    p.grad = torch.full((4,), 3.0)
    optimizer.step(lr_factor=0.0, max_grad_norm=1.5, grad_norm=optimizer.grad_norm())
    assert torch.allclose(optimizer.adamw.state[p]["exp_avg"], torch.full((4,), 0.75))
    assert p.grad is None
    assert torch.equal(p.detach(), torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_continues_exactly(dtype: torch.dtype) -> None:
    straight = nn.Parameter(torch.ones(3, 2, dtype=dtype))
    quadratic_steps(straight, 3, 1e-2)
    first = nn.Parameter(torch.ones(3, 2, dtype=dtype))
    state = quadratic_steps(first, 2, 1e-2).state_dict()
    second = nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    optimizer = MasterAdamW([("p", second)], lr=1e-2)
    optimizer.load_state_dict(state)
    (second.float() - 2.0).square().sum().backward()
    optimizer.accumulate()
    optimizer.step(lr_factor=1.0, max_grad_norm=0.0, grad_norm=optimizer.grad_norm())
    assert torch.equal(second, straight)


def test_refuses_a_foreign_state_and_nothing_to_train() -> None:
    state = quadratic_steps(nn.Parameter(torch.ones(3, 2)), 1, 1e-2).state_dict()
    with pytest.raises(ResumeError, match="1 differ, such as p"):
        MasterAdamW([("p", nn.Parameter(torch.ones(2, 2)))], lr=1e-2).load_state_dict(state)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        MasterAdamW([("p", nn.Parameter(torch.ones(2), requires_grad=False))], lr=1e-2)
