"""A gradient is clipped as torch clips it, and left alone where there is nothing to clip."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leeway.config.learning import OptimizerConfig
from leeway.trainer.optimizer import Stepper

SHAPES = [(64, 32), (32,), (1,)]


def stepped(norm: float, limit: float) -> tuple[list[torch.Tensor], float]:
    """(what a step of rate 1 takes off weights of 0, the norm that it says) for a gradient of this norm."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    grads = [torch.randn(shape) for shape in SHAPES]
    scale = norm / nn.utils.get_total_norm(grads)
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad * scale
    settings = OptimizerConfig(lr=1.0, schedule="constant", max_grad_norm=limit)
    said = Stepper(torch.optim.SGD(parameters, lr=1.0), settings, total_steps=1).step(0)
    return [-p.detach() for p in parameters], said["train/grad_norm"]


@pytest.mark.parametrize("norm", [0.0, 0.3, 0.999999, 0.9999995, 1.0, 1.0000001, 5.0])
def test_a_step_is_the_one_that_torchs_clipping_gives(norm: float) -> None:
    """To the last bit, on both sides of the limit and next to it."""
    taken, said = stepped(norm, limit=1.0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter, grad in zip(parameters, stepped(norm, limit=1e9)[0], strict=True):
        parameter.grad = grad
    assert said == nn.utils.clip_grad_norm_(parameters, 1.0).item() == pytest.approx(norm)
    assert all(own.equal(p.grad) for own, p in zip(taken, parameters, strict=True))


def test_what_is_within_the_limit_is_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large model that would be a pass over all gradients."""
    clipped: list[float] = []
    clip = nn.utils.clip_grads_with_norm_
    monkeypatch.setattr(nn.utils, "clip_grads_with_norm_", lambda *args: clipped.append(args[1]) or clip(*args))
    stepped(0.5, limit=1.0)
    assert clipped == []
    stepped(1.5, limit=1.0)
    assert clipped == [1.0]
