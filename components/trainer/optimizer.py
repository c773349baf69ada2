"""AdamW, its learning-rate schedule, and the handling of a gradient before it becomes a step."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..config.learning import OptimizerConfig
from .offload import Offload

logger = logging.getLogger(__name__)


def learning_rate(settings: OptimizerConfig, step: int, *, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0, with a schedule over `total_steps`.

    The first `warmup_steps` (or `warmup_frac` of them all) rise linearly; the one after the last would be at
    `min_lr_frac` of `lr`.
    """
    warmup = settings.warm_up(total_steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    if settings.schedule == "constant":
        return settings.lr
    done = (step - warmup) / max(1, total_steps - warmup)
    left = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * min(1.0, done)))}[settings.schedule]
    return settings.lr * (settings.min_lr_frac + (1 - settings.min_lr_frac) * max(0.0, left))


def embedding_ids(model: nn.Module) -> set[int]:
    """`id` of every parameter of an embedding, those of a tied output head among them."""
    return {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}


def make_optimizer(
    parameters: Iterable[nn.Parameter], settings: OptimizerConfig, *, embeddings: Collection[int] = ()
) -> torch.optim.AdamW:
    """AdamW in two groups, with weight decay and without, over the parameters that are trained.

    `settings.decay`: `all`; `matrices`: excludes one-dimensional parameters, that is biases and norm gains;
    `hidden_matrices`: also excludes the `embeddings` (ids, see `embedding_ids`).
    """

    def decays(parameter: nn.Parameter) -> bool:
        if settings.decay == "all":
            return True
        return parameter.ndim >= 2 and not (settings.decay == "hidden_matrices" and id(parameter) in embeddings)

    parameters = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if decays(p)], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if not decays(p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True
    )


class LossScale:
    """By how much the loss is multiplied before its backward pass, so that float16 holds its small gradients.

    The smallest number of float16 is 6e-8, and the gradient of one token of many is often below. A gradient that is not
    finite halves the scale, down to 1; after `GROWS_AFTER` steps without one it doubles (Micikevicius et al., arXiv
    1710.03740, section 3.2). Powers of two change no digit. Not `enabled`: it stays 1.
    """

    GROWS_AFTER = 200
    FIRST, MOST = 2.0**15, 2.0**24

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._value = self.FIRST if enabled else 1.0
        self._good_steps = 0

    def __mul__(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self._value if self._enabled else loss

    def divide(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients of the scaled loss to those of the loss."""
        if self._enabled:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / self._value)

    def adapt(self, *, is_finite: bool) -> bool:
        """After each step; whether a smaller scale may be all that a gradient lacked that is not finite."""
        could_overflow = self._value > 1.0
        if not self._enabled:
            return False
        self._good_steps = self._good_steps + 1 if is_finite else 0
        if not is_finite:
            self._value = max(1.0, self._value / 2)
        elif self._good_steps == self.GROWS_AFTER:
            self._value, self._good_steps = min(self.MOST, self._value * 2), 0
        return could_overflow and not is_finite

    def metrics(self) -> dict[str, float]:
        return {"train/loss_scale": self._value} if self._enabled else {}

    def state_dict(self) -> dict[str, float]:
        return {"value": self._value, "good_steps": float(self._good_steps)} if self._enabled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """A run computes in one type from its first part to its last: the scale of another is not there."""
        if self._enabled:
            self._value, self._good_steps = state["value"], int(state["good_steps"])


class Stepper:
    """Turns the accumulated gradients into one step: clipped, at the schedule's rate, or skipped.

    A gradient that is not finite moves nothing, neither weights nor AdamW's moments. `max_skipped_steps` of them in a
    row are skipped and counted; the next one raises FloatingPointError. Those that may have overflowed because of the
    `LossScale` are counted and do not count towards that limit.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        settings: OptimizerConfig,
        *,
        total_steps: int,
        lr_key: str = "optimizer.lr",
        norm_name: str = "gradient norm",
        loss_scale: LossScale | None = None,
        moments: Offload | None = None,
    ) -> None:
        """`lr_key`: the setting of its learning rate; `norm_name`: the norm's name in messages. `loss_scale`: by which
        the gradients were multiplied. `moments`: the optimizer's state, away but for the step itself.
        """
        self._optimizer = optimizer
        self._loss_scale = loss_scale or LossScale(enabled=False)
        self._moments = moments
        self._settings, self._total_steps = settings, total_steps
        self._lr_key, self._norm_name = lr_key, norm_name
        self._skipped = self._in_a_row = 0

    def step(self, policy_version: int) -> dict[str, float]:
        """Step number `policy_version`, counted from 0 (a collective); clears the gradients."""
        settings = self._settings
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._loss_scale.divide(parameters)
        norm = self._clip(parameters)
        lr = learning_rate(settings, policy_version, total_steps=self._total_steps)
        overflowed = self._loss_scale.adapt(is_finite=math.isfinite(norm))
        if math.isfinite(norm):
            self._in_a_row = 0
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            with nullcontext() if self._moments is None else self._moments.brought_back():
                self._optimizer.step()
        else:
            self._skip(norm, policy_version, counts=not overflowed)
        self._optimizer.zero_grad(set_to_none=True)
        metrics = {"train/grad_norm": norm, "train/lr": lr, "train/skipped_steps": float(self._skipped)}
        return metrics | self._loss_scale.metrics()

    def _clip(self, parameters: list[nn.Parameter]) -> float:
        """As `clip_grad_norm_`, which multiplies every gradient, also by 1. Returns the norm."""
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        own = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if not own + 1e-6 <= self._settings.max_grad_norm:
            nn.utils.clip_grads_with_norm_(parameters, self._settings.max_grad_norm, norm)
        return own

    def _skip(self, norm: float, policy_version: int, *, counts: bool) -> None:
        self._skipped += 1
        self._in_a_row += counts
        said = f"{self._norm_name} is {norm} at policy version {policy_version}"
        if self._in_a_row > self._settings.max_skipped_steps:
            raise FloatingPointError(
                f"{said}, {self._in_a_row} in a row (optimizer.max_skipped_steps is "
                f"{self._settings.max_skipped_steps}); lower {self._lr_key} or check rewards"
            )
        logger.warning("%s: step skipped, %d so far", said, self._skipped)
