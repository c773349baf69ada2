"""Faults inside a real engine, for tests: it runs in vLLM's worker process in the place of our own extension."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from leeway.engines import vllm_plan, vllm_shadow, vllm_worker
from leeway.engines.vllm_readback import _is_packed, _shape


def weight_of(layer: Any) -> torch.Tensor:
    """[N, K], wherever the kernel keeps it; vectors as they are."""
    if _is_packed(layer):
        return layer.cpu_linear(torch.eye(_shape(layer)[1]), layer.weight, None).t().contiguous()
    return layer.weight.data


def set_weight(layer: Any, weight: torch.Tensor) -> None:
    if not _is_packed(layer):
        layer.weight.data.copy_(weight)
        return
    kept = layer.weight
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    layer.weight = kept


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class Saboteur(vllm_worker.WorkerExtension):
    def _layer(self: Any, module: str) -> Any:
        return vllm_worker.weights_of(self).model.get_submodule(module)

    def process_id(self: Any) -> int:
        return os.getpid()

    def flip(self: Any, module: str, index: int, bit: int) -> float:
        """Flip one bit of one weight that is served now; returns what it was."""
        weight = weight_of(layer := self._layer(module)).clone()
        flat = weight.view(-1)
        before = flat[index].item()
        flat.view(torch.int32)[index] ^= -(2**31) if bit == 31 else 1 << bit
        set_weight(layer, weight)
        return before

    def heard_of_loads(self: Any) -> list[str]:
        """What vLLM's loader has said since this was first called."""
        loader = logging.getLogger(vllm_worker.initialize_layerwise_reload.__module__)
        kept = next((handler for handler in loader.handlers if isinstance(handler, Kept)), None)
        if kept is None:
            loader.addHandler(kept := Kept())
        return kept.said

    def with_graphs(self: Any, has_graphs: bool, functions_too: bool = True) -> None:
        """As on a GPU: a load may not replace a tensor, only what is in it.

        `functions_too`: nor a layer's function. A CPU's for plain weights is a new one after each load, but the same.
        """
        vllm_shadow.graphs_may_hold_tensors = lambda: has_graphs
        vllm_worker.weights_of(self)._has_watched = False
        if not hasattr(Saboteur, "made"):
            Saboteur.made = vllm_shadow.ShadowModel.made
        vllm_shadow.ShadowModel.made = Saboteur.made if functions_too else property(lambda _: [])  # type: ignore[misc]

    def rows_of_products(self: Any) -> list[int]:
        """That oneDNN was asked for since this was first called."""
        kernels = torch.ops._C
        if not hasattr(Saboteur, "rows"):
            Saboteur.rows, product = list[int](), kernels.onednn_mm

            def noted(output: torch.Tensor, x: torch.Tensor, *others: Any) -> None:
                Saboteur.rows.append(len(x))
                product(output, x, *others)

            kernels.onednn_mm = noted
        return Saboteur.rows

    def address(self: Any, module: str) -> int:
        return self._layer(module).weight.data_ptr()

    def num_in_place(self: Any) -> int:
        """How many loads were not made ahead since this was first called."""
        weights = vllm_worker.weights_of(self)
        if not hasattr(weights, "in_place"):
            weights.in_place, load = 0, weights._load_in_place

            def counted() -> None:
                weights.in_place += 1
                load()

            weights._load_in_place = counted
        return weights.in_place

    def num_by_plan(self: Any) -> int:
        """How many loads were the copies of a plan since this was first called."""
        if not hasattr(Saboteur, "by_plan"):
            Saboteur.by_plan, copy = 0, vllm_plan.PreparedLoad.copy

            def counted(load: Any) -> None:
                Saboteur.by_plan += 1
                copy(load)

            vllm_plan.PreparedLoad.copy = counted  # type: ignore[method-assign]
        return Saboteur.by_plan

    def without_kernels(self: Any, without: bool) -> None:
        """From the next load on, as on a CPU that has no packed kernel for the type: vLLM computes with plain weights.

        Its loader then finds that a kernel cannot be made, and takes the function that it falls back to.
        """
        if without:
            self.create_onednn_mm = ops.create_onednn_mm

            def refuse(*_: Any) -> None:
                raise RuntimeError("could not create a primitive descriptor")

            ops.create_onednn_mm = refuse
        else:
            ops.create_onednn_mm = self.create_onednn_mm

    def plain(self: Any, module: str) -> bool:
        return not _is_packed(self._layer(module))

    def arm(self: Any, fault: str, module: str, index: int = 0, bit: int = 0, rank: int = 0) -> None:
        """Let the next weight sync of one rank go wrong, once: "flip" or "half" after its load, "swap" during it."""
        if self.rank != rank:
            return
        if fault == "swap":
            return self._arm_swap(module)
        old = weight_of(self._layer(module)).clone()

        def break_it() -> None:
            if fault == "flip":
                self.flip(module, index, bit)
            else:
                layer = self._layer(module)
                weight = weight_of(layer).clone()
                weight[: len(weight) // 2] = old[: len(weight) // 2]
                set_weight(layer, weight)

        self._after_the_load(break_it)

    def arm_expert(self: Any, module: str, expert: int, index: int) -> None:
        """Let the next load end with the last bit of one packed weight of an expert flipped, once."""

        def break_it() -> None:
            self._layer(module).w2_weight.data[expert].view(-1).view(torch.int32)[index] ^= 1

        self._after_the_load(break_it)

    def flip_adapter(self: Any, module: str, which: str, slice_index: int, index: int, bit: int) -> None:
        """Flip one bit in the slot of the adapter that came last."""
        layer, slots = self._layer(module), self.model_runner.lora_manager._adapter_manager.lora_index_to_id
        slot = slots.index(max(held for held in slots if held is not None))
        stacked = {"a": layer.lora_a_stacked, "b": layer.lora_b_stacked}[which]
        stacked[slice_index][slot].view(-1).view(torch.int32)[index] ^= 1 << bit

    def arm_adapter(self: Any, module: str, which: str, slice_index: int, index: int) -> None:
        """Let the next load of an adapter end with one bit of its slot flipped, once."""
        weights = vllm_worker.weights_of(self)

        def load_ahead() -> bool:
            done = type(weights).load_ahead(weights)
            if done:
                self.disarm()
                self.flip_adapter(module, which, slice_index, index, 0)
            return done

        weights.load_ahead = load_ahead

    def _after_the_load(self: Any, break_it: Callable[[], None]) -> None:
        weights = vllm_worker.weights_of(self)

        def load(version: str) -> None:
            self.disarm()
            weights.load_staged(version)
            with torch.no_grad():
                break_it()

        weights.load_staged = load

    def _arm_swap(self: Any, names: str) -> None:
        """Two tensors arrive in each other's place, after the checks of bytes."""
        a, b = names.split(" ")
        swapped = {a: b, b: a}
        weights = vllm_worker.weights_of(self)

        def fill(model: Any) -> Iterator[None]:
            for name, tensor in weights._tensors():
                model.load_weights([(swapped.get(name, name), tensor)])
                yield

        weights._fill = fill

    def disarm(self: Any) -> None:
        for name in ("_fill", "load_staged", "load_ahead"):
            vars(vllm_worker.weights_of(self)).pop(name, None)
