"""The weights that a model will compute with next, loaded and packed by vLLM while it computes with those it has.

On a CPU vLLM packs each matrix for its kernels when it is loaded, which takes six times as long as copying it. Here
that happens on a shadow of the model: modules of the same classes, with the same attributes and tensors of their own.
The pause exchanges tensors and kernels. On a GPU, where graphs hold on to addresses, it copies the tensors within the
device. Either costs one more copy of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    _get_original_loader,
    _layerwise_process,
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, restore_layer_on_meta, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs, sanitize_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.platforms import current_platform

OWN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Attributes of a module that its shadow does not share."""


def graphs_may_hold_tensors() -> bool:
    return not current_platform.is_cpu()


def can_be_shadowed(model: torch.nn.Module) -> bool:
    """Whether all that vLLM makes of the weights lies in the modules themselves.

    The kernel of a mixture's experts holds on to the layer it was made for.
    """
    return all(map(_can_be_shadowed, model.modules()))


def _can_be_shadowed(module: Any) -> bool:
    if is_deferred_attention_layer(module):
        return type(module).process_weights_after_loading is Attention.process_weights_after_loading
    method = getattr(module, "quant_method", None)
    return (
        not isinstance(module, RoutedExperts)
        and (method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))
        and not get_layer_tensors(module).keys() & SKIP_LOAD_TENSORS
    )


class ShadowModel:
    """`model` takes the weights: `model.load_weights(...)`, then `finish`. `swap` makes the real one compute with them.

    Until `drop` it holds the tensors that the real one had before, or has copied.
    """

    def __init__(self, model: Any) -> None:
        self._pairs: list[tuple[Any, Any]] = []
        self._exchanged: list[tuple[Any, Any, list[str], list[str]]] = []
        self.copies = graphs_may_hold_tensors()
        self.model = self._shadow_of(model, {})
        for module, shadow in self._pairs:
            known, info = get_layerwise_info(module), get_layerwise_info(shadow)
            parameters, buffers = (
                {name: _as_at_first(tensor, to_meta_tensor(tensor), module) for name, tensor in tensors.items()}
                for tensors in known.restore_metadata
            )
            info.restore_metadata, info.restore_device = (parameters, buffers), known.restore_device
            restore_layer_on_meta(shadow, info)
            for tensors in (shadow._parameters, shadow._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and not tensor.is_meta:  # a bias, which vLLM loads in place
                        tensors[name] = restore_layer_refs(_as_at_first(tensor, tensor.data.clone(), module), shadow)
            initialize_online_processing(shadow)

    def finish(self) -> None:
        """Everything was loaded. What vLLM does not count as complete (a vocabulary is padded) is processed now."""
        for module, shadow in self._pairs:
            info = get_layerwise_info(shadow)
            loaded = list(get_layer_tensors(shadow))
            if info.can_load():
                loaded = list(dict.fromkeys(name for name, _ in info.loaded_weights))
                if not loaded:
                    continue  # nothing is published for it: it keeps what it has
                _layerwise_process(shadow, info)
            made = [key for key, value in vars(shadow).items() if key not in OWN and vars(module).get(key) is not value]
            self._exchanged.append((module, shadow, loaded, made))

    def loaded(self) -> Iterator[tuple[Any, str, torch.Tensor]]:
        """(module of the real model, name, the shadow's tensor) of all that was loaded."""
        for module, shadow, tensors, _ in self._exchanged:
            for name in tensors:
                yield module, name, getattr(shadow, name).data

    @property
    def made(self) -> list[str]:
        """Names of what the load made beside tensors, such as packed kernels."""
        return sorted({key for *_, attributes in self._exchanged for key in attributes})

    def swap(self) -> None:
        """In the pause: exchange the tensors and kernels of the two, or copy the tensors where graphs hold them."""
        if self.copies:
            return self._copy()
        for module, shadow, tensors, attributes in self._exchanged:
            for name in tensors:
                one, other = getattr(module, name), getattr(shadow, name)
                one.data, other.data = other.data, one.data
            for key in attributes:
                old = vars(module).get(key)
                vars(module)[key] = vars(shadow)[key]
                vars(shadow)[key] = old

    def _copy(self) -> None:
        """Returns when the device has done it, and all that was asked of it before."""
        of_both = [
            (getattr(module, name).data, getattr(shadow, name).data)
            for module, shadow, tensors, _ in self._exchanged
            for name in tensors
        ]
        for own, loaded in of_both:
            assert own.shape == loaded.shape, f"a load made {tuple(loaded.shape)} of what was {tuple(own.shape)}"
            own.copy_(loaded)
        if own_device := next((own.device for own, _ in of_both if own.is_cuda), None):
            torch.cuda.synchronize(own_device)

    def drop(self) -> None:
        """Let go of all tensors at once: modules and their loaders refer to each other."""
        for _, shadow in self._pairs:
            LAYERWISE_INFO.pop(shadow, None)
            vars(shadow).clear()
        self._pairs, self._exchanged = [], []

    def _shadow_of(self, module: Any, made: dict[int, Any]) -> Any:
        """A module that is in several places (a tied head) has one shadow."""
        if id(module) not in made:
            made[id(module)] = shadow = object.__new__(type(module))
            vars(shadow).update(vars(module))
            for key in OWN:
                vars(shadow)[key] = vars(module)[key].copy()
            for name, child in module._modules.items():
                shadow._modules[name] = None if child is None else self._shadow_of(child, made)
            self._pairs.append((module, shadow))
        return made[id(module)]


def _as_at_first(tensor: Any, copy: Any, module: Any) -> Any:
    """`copy` with the class and attributes of `tensor`, and with a loader that belongs to no module yet."""
    copy.__class__, copy.__dict__ = tensor.__class__, tensor.__dict__.copy()
    if hasattr(tensor, "weight_loader"):  # which a load in place has wrapped
        copy.weight_loader = _get_original_loader(tensor)
    return sanitize_layer_refs(copy, module)
