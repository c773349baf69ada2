"""vLLM's slots for adapters: written between passes, some layers at a time, and read back from there, bit for bit.

    lora_a_stacked[slice][slot]   A [rank, in]     q, k and v are slices of one layer, each with slots of its own
    lora_b_stacked[slice][slot]   B [out, rank] times alpha / rank, rounded once to its type

A slot has room for vLLM's next larger rank, and is zero outside of the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..weights import Manifest


@dataclass(frozen=True)
class _Layer:
    """One of vLLM's layers with slots. `parts`: the published module of each of its slices (None: it has no adapter).
    `is_packed`: vLLM gives it a list, of one tensor for each slice.
    """

    name: str
    layer: Any
    parts: list[str | None]
    is_packed: bool


class Slots:
    """vLLM's slots for adapters. `without_place`: targets that none of its layers has a slice for."""

    def __init__(
        self, manager: Any, *, targets: Mapping[str, str], scaling: float, new_entry: Callable[[int], Any]
    ) -> None:
        """`manager`: vLLM's own, of the layers that have slots. `targets`: by vLLM's name of a module, that of the
        model's files; `new_entry`: what vLLM's registry holds for an id.
        """
        self._manager, self._scaling, self._new_entry = manager, scaling, new_entry
        self._layers: list[_Layer] = []
        for name, layer in manager.modules.items():
            slices = manager.packed_modules.get(name, [name])
            if len(slices) == getattr(layer, "n_slices", 0):
                parts = [targets.get(part) for part in slices]
                self._layers.append(_Layer(name, layer, parts, name in manager.packed_modules))
        placed = {part for layer in self._layers for part in layer.parts}
        self.without_place = [name for name in targets.values() if name not in placed]
        self._expected = {f"{name}.lora_{which}.weight" for name in targets.values() for which in "AB"}

    def load(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor], adapter_id: int) -> Iterator[None]:
        """Write an adapter into a free slot, and make requests with its id computed with it.

        Raises `WeightSyncError` unless it is complete, and as the slots are.
        """
        slot = next((i for i, held in enumerate(self._manager.lora_index_to_id) if held is None), None)
        if slot is None:
            raise manifest.error("load", f"all {self._manager.lora_slots} places for adapters are taken")
        if missing := sorted(self._expected - tensors.keys()):
            raise manifest.error("load", f"no published tensor reached {', '.join(missing)}")
        if unknown := sorted(tensors.keys() - self._expected):
            raise manifest.error("load", f"no target of model.lora has {', '.join(unknown)}")
        for layer in self._layers:
            a, b = (
                [None if part is None else tensors[f"{part}.lora_{w}.weight"] for part in layer.parts] for w in "AB"
            )
            for i, (of_a, of_b) in enumerate(zip(a, b, strict=True)):
                self._check(manifest, layer.parts[i], of_a, layer.layer.lora_a_stacked[i][slot, 0], rank_at=0)
                self._check(manifest, layer.parts[i], of_b, layer.layer.lora_b_stacked[i][slot, 0], rank_at=1)
            scaled = [None if of_b is None else self._scaled(of_b) for of_b in b]
            if all(part is None for part in layer.parts):
                layer.layer.reset_lora(slot)
            elif layer.is_packed:
                layer.layer.set_lora(slot, a, scaled)
            else:
                layer.layer.set_lora(slot, a[0], scaled[0])
            yield
        # As vLLM does when it has read one: its registry knows the id, and the slot is the id's.
        self._manager._registered_adapters[adapter_id] = self._new_entry(adapter_id)
        self._manager._active_adapters[adapter_id] = None
        self._manager.lora_index_to_id[slot] = adapter_id

    def read_back(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor], adapter_id: int) -> Iterator[None]:
        """Compare the adapter's slot, all of it, to what was published. Raises `WeightSyncError` by name."""
        if adapter_id not in self._manager.lora_index_to_id:
            raise manifest.error("load", "after the load, no slot holds the adapter")
        slot, wrong = self._manager.lora_index_to_id.index(adapter_id), list[str]()
        for layer in self._layers:
            for i, part in enumerate(layer.parts):
                for which, stacked in (("A", layer.layer.lora_a_stacked), ("B", layer.layer.lora_b_stacked)):
                    name = f"{part or layer.name}.lora_{which}.weight"
                    tensor = None if part is None else tensors[name]
                    held = stacked[i][slot, 0]
                    expected = torch.zeros_like(held)
                    if tensor is not None:
                        tensor = tensor.to(held.device)
                        expected[: tensor.shape[0], : tensor.shape[1]] = (
                            self._scaled(tensor) if which == "B" else tensor
                        )
                    if not torch.equal(held.view(torch.uint8), expected.view(torch.uint8)):
                        wrong.append(name)
            yield
        if wrong:
            raise manifest.error(
                "load", f"after the load, weights differ from those published in {', '.join(sorted(wrong))}"
            )

    def drop(self, adapter_id: int) -> None:
        self._manager.remove_adapter(adapter_id)

    def _scaled(self, b: torch.Tensor) -> torch.Tensor:
        return b if self._scaling == 1 else b * self._scaling

    def _check(
        self, manifest: Manifest, part: str | None, tensor: torch.Tensor | None, held: torch.Tensor, *, rank_at: int
    ) -> None:
        if tensor is None:
            return
        other = 1 - rank_at
        fits = tensor.dim() == 2 and tensor.shape[other] == held.shape[other]
        if not fits or tensor.shape[rank_at] > held.shape[rank_at] or tensor.dtype != held.dtype:
            raise manifest.error(
                "load",
                f"{part}: {'AB'[rank_at]} was published as {tensor.dtype} {tuple(tensor.shape)}, the engine's slot is "
                f"{held.dtype} {tuple(held.shape)}",
            )
