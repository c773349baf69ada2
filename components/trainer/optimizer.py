"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW's settings and those of its schedule.

    The first `warmup_steps` rise linearly; `schedule` runs over `total_steps` and ends at `min_lr_frac` of `lr`.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    schedule: str
    warmup_steps: int
    min_lr_frac: float
    max_grad_norm: float
    total_steps: int


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    done = (step - settings.warmup_steps) / max(1, settings.total_steps - settings.warmup_steps)
    left = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * min(1.0, done)))}[settings.schedule]
    return settings.lr * (settings.min_lr_frac + (1 - settings.min_lr_frac) * max(0.0, left))


def make_optimizer(parameters: Iterable[torch.nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """Weight decay acts on matrices only: biases and norm gains are one-dimensional."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True
    )
