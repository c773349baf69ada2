"""Adapters inside vLLM's process: several versions beside each other, under weights that never change.

    slots of a layer   | version 6 | version 7 |  free  |     A [rank, in] and B [out, rank] of each of its parts
    a row of a pass    y = W x + B7 (A7 x)                    where its request is of version 7

vLLM has the slots (`vllm_slots`), and computes each row of a pass with the slot of its request's adapter. It would read
adapters from files of its own. Here they come from where every version is staged.

The weights under the adapters are vLLM's own, loaded from the model's files when it starts. What proves them is read
from the same files: its digest must be that of the trainer's weights, and the column sums of what the engine computes
with must be its own (`vllm_readback`), at every version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from vllm.config import VllmConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.utils import parse_fine_tuned_lora_name

from ..trainer.lora import base_entry, base_error
from ..trainer.names import PublishedNames
from ..trainer.pretrained import skeleton, tensors_of
from ..trainer.tensors import by_tensor, saved_tensors
from ..weights import Manifest, TensorEntry, digest_of
from .slices import Slices
from .vllm_lora_rows import use_in
from .vllm_readback import Layout, compare
from .vllm_slots import Slots
from .vllm_staged import Staged

logger = logging.getLogger(__name__)


class EngineAdapters:
    """As `EngineWeights`, without a pause: map_adapter in the place of map_staged, and nothing after load_ahead."""

    def __init__(
        self,
        model: torch.nn.Module,
        manager: LoRAModelManager,
        vllm_config: VllmConfig,
        device: torch.device,
        *,
        targets: Sequence[str],
        scaling: float,
    ) -> None:
        """`targets`: modules that get an adapter, by the names of the model's files."""
        self.model, self._device = model, device
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        renaming = None if mapper is None else mapper.get_rename_mapper()
        own_names = {parse_fine_tuned_lora_name(f"{name}.lora_A.weight", renaming)[0]: name for name in targets}
        self.slots = Slots(
            manager, targets=own_names, scaling=scaling, new_entry=lambda adapter_id: LoRAModel(adapter_id, 1, {})
        )
        if device.type == "cpu" and vllm_config.model_config.enforce_eager:  # a compiled model has vLLM's form in it
            for wrapper in manager.punica_wrapper_mapping.values():
                use_in(wrapper)
        self._base = BaseProof(model, vllm_config, device)
        self._staged: Staged | None = None
        self._loading = Slices()
        self._reading = Slices()

    def map_staged(self, folder: Path, *, double_buffer: bool | None) -> None:
        """For `check_some`."""
        self._forget()
        self._staged = Staged(folder, self._device)

    def check_some(self) -> bool:
        """Check for a moment what lies on this device; whether every byte of it was."""
        assert self._staged is not None, "nothing was staged"
        return self._staged.checks.go_on()

    def map_adapter(self, folder: Path, adapter_id: int) -> None:
        """What the next load takes, and under which id."""
        self._forget()
        self._staged = staged = Staged(folder, self._device)
        tensors = dict(staged.tensors())
        self._loading = Slices(self.slots.load(staged.manifest, tensors, adapter_id))
        self._reading = Slices(self._read_back(staged.manifest, tensors, adapter_id))

    @torch.no_grad()
    def load_ahead(self) -> bool:
        """Write for a moment into a slot that nothing computes with; whether all is done."""
        if not self._loading.go_on():
            return False
        assert self._staged is not None, "nothing was staged"
        self._staged.confirm()
        return True

    @torch.no_grad()
    def read_back_some(self, *, compare: bool) -> bool:
        """Compare for a moment, if at all; whether all is done."""
        if compare and not self._reading.go_on():
            return False
        if self._staged is not None:
            self._staged.confirm()
        self._forget()
        return True

    def drop_adapter(self, adapter_id: int) -> None:
        self.slots.drop(adapter_id)

    def _forget(self) -> None:
        self._loading, self._reading = Slices(), Slices()
        if self._staged is not None:
            self._staged.close()
            self._staged = None

    def _read_back(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor], adapter_id: int) -> Iterator[None]:
        yield from self.slots.read_back(manifest, tensors, adapter_id)
        yield from self._base.prove(manifest)


class BaseProof:
    """What the weights under the adapters must be, of the model's files: read once, compared at every version."""

    def __init__(self, model: torch.nn.Module, vllm_config: VllmConfig, device: torch.device) -> None:
        served = vllm_config.model_config
        self._path, self._dtype = str(served.model), served.dtype
        self._model = model
        self._layout = Layout.of(model, head_is_packed=served.head_dtype == served.dtype)
        self._published = self._layout.published(dtype=self._dtype, device=device)
        self._digest = ""
        self._turn = 0
        self._unread: list[str] = []

    def prove(self, manifest: Manifest) -> Iterator[None]:
        """Raises `WeightSyncError` with the check "base" unless the engine computes with the weights it belongs to."""
        if not self._digest:
            yield from self._read_files()
        if self._digest != manifest.base:
            raise base_error(manifest, self._digest)
        columns = self._layout.columns(self._turn)
        self._turn += 1
        published = self._published.narrowed(columns)
        result = yield from compare(self._model, self._layout, published, dtype=self._dtype)
        if result.differing:
            where = ", ".join(result.differing)
            raise manifest.error("base", f"the weights under the adapters differ from the model's files in {where}")
        if result.unread != self._unread:
            self._unread = result.unread
            logger.warning("only the canary proves these layers, their layout is unknown: %s", ", ".join(self._unread))

    def _read_files(self) -> Iterator[None]:
        """Tensor by tensor, as the trainer publishes whole weights: a copy of the model is never there."""
        lm = skeleton(self._path, "eager")
        saved, entries = saved_tensors(lm), dict[str, TensorEntry]()
        tied = {name: names for names in by_tensor(saved).values() for name in names}
        reading = tensors_of(lm, self._path)
        names = PublishedNames(lm)
        for own_name, tensor in reading:
            if isinstance(saved[own_name], torch.nn.Parameter):
                tensor = tensor.to(self._dtype)
            for name in tied[own_name]:
                for published, part in names.split(name, tensor).items():
                    if published not in entries:  # tied: the files may have it under both names
                        entries[published] = base_entry(published, part)
                        self._published.add(published, part)
            yield
        self._digest = digest_of(entries.values())
