"""Mixed precision for a rank that is alone: weights stay in float32, and passes compute with copies in a shorter type.

    before a pass    each float32 weight -> its copy, which takes its place in the model
    backward pass    the gradient of a copy -> added to its weight's, in float32
    after it         the weights are in their places again

Layers get their inputs in that type, as FSDP gives them. FSDP computes the same numbers, but for one rank it also
gathers and scatters: it copies all weights and gradients three times more in each pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class WorkingCopies:
    """Of the parameters of `model`, tied ones once. Made when the model has its weights; memory: one copy of them.

    What is frozen is copied once: nothing changes it.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._places = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_floating_point()
        ]
        self._copies = {weight: self._copy_of(weight) for _, _, weight in self._places}
        self.are_in_place = False

    @torch.no_grad()
    def put(self) -> None:
        """Into the places of the weights, with what these are now."""
        for weight, copy in self._copies.items():
            if weight.requires_grad:
                copy.copy_(weight)
        for module, name, weight in self._places:
            module._parameters[name] = self._copies[weight]
        self.are_in_place = True

    def take_away(self) -> None:
        for module, name, weight in self._places if self.are_in_place else ():
            module._parameters[name] = weight
        self.are_in_place = False

    def _copy_of(self, weight: nn.Parameter) -> nn.Parameter:
        copy = nn.Parameter(weight.detach().to(self._dtype), weight.requires_grad)
        if weight.requires_grad:
            copy.register_post_accumulate_grad_hook(functools.partial(_hand_on, weight))
        return copy


def _hand_on(weight: nn.Parameter, copy: torch.Tensor) -> None:
    grad, copy.grad = copy.grad, None
    assert grad is not None
    if weight.grad is None:
        weight.grad = grad.to(weight.dtype)
    else:
        weight.grad += grad


class ComputesWithCopies:
    """What `use_working_copies` makes of a model. The copies stay in place until the backward pass of a forward pass
    has ended, which may compute parts of it again; without gradients, until the forward pass has. Where there was no
    backward pass, or it failed, `sharding.reshard` takes them away: call it before weights are read or changed.
    """

    copies: WorkingCopies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_copies(super().__call__, *args, **kwargs)  # type: ignore[misc]  # the model's own

    def plain_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._with_copies(super().plain_logits, tokens)  # type: ignore[misc]  # the model's own

    def _with_copies(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        copies = self.copies
        stay = copies.are_in_place  # for a pass whose backward pass is still to come
        if not stay:
            copies.put()
        try:
            out = call(*args, **kwargs)
            stay |= self._wait_for_backward(out)
            return out
        finally:
            if not stay:
                copies.take_away()

    def _wait_for_backward(self, out: Any) -> bool:
        """Whether there is one to wait for."""
        outputs = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
        for output in outputs:
            output.register_hook(self._at_end_of_backward)
        return bool(outputs)

    def _at_end_of_backward(self, grad: torch.Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self.copies.take_away)


def use_working_copies(model: nn.Module, dtype: torch.dtype, *, layers: Iterable[nn.Module]) -> None:
    """Have `model`, which has its weights, compute in `dtype`; its `layers` get their inputs in it.

    Like FSDP, this changes the model's class: a wrapper would change the names of its weights.
    """

    def cast(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _in_type(args, dtype), _in_type(kwargs, dtype)

    model.__class__ = type(f"Copied{type(model).__name__}", (ComputesWithCopies, type(model)), {})
    model.copies = WorkingCopies(model, dtype)  # type: ignore[assignment]
    for layer in layers:
        layer.register_forward_pre_hook(cast, with_kwargs=True)


def _in_type(given: Any, dtype: torch.dtype) -> Any:
    """The same, with its tensors of numbers in this type."""
    if isinstance(given, torch.Tensor):
        return given.to(dtype) if given.is_floating_point() else given
    if isinstance(given, dict):
        return {name: _in_type(value, dtype) for name, value in given.items()}
    if type(given) in (tuple, list):
        return type(given)(_in_type(value, dtype) for value in given)
    return given
