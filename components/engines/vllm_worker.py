"""Runs inside vLLM's own worker process: takes published weights in, and proves that all of the model was loaded.

vLLM imports this module there because the engine names `WorkerExtension` as its `worker_extension_cls`; importing it
registers the weight transfer backend "leeway".
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.platforms import current_platform

from ..weights import Manifest, read_bucket
from .shared_memory import bucket_name
from .slices import SLICE_S, ends_within
from .vllm_readback import read_back
from .vllm_worker_env import BACKEND, CORES_ENV, MANIFEST, MEMORY_ENV, PARENT_ENV

logger = logging.getLogger(__name__)


def die_with_parent() -> None:
    """End this process when the collector that started it is gone.

    The engine's own process outlives a killed parent for more than a minute otherwise, holding memory and a core.
    """
    parent = int(os.environ.get(PARENT_ENV, "0"))
    if not parent or parent == os.getpid():
        return

    def watch() -> None:
        while os.path.exists(f"/proc/{parent}"):
            time.sleep(0.5)
        shutil.rmtree(os.environ.get(MEMORY_ENV, ""), ignore_errors=True)  # buckets that nobody will read
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="leeway-parent-watch").start()


def pin_to_cores() -> None:
    """Keep the thread that computes, and every thread it starts, on the engine's cores."""
    if cores := os.environ.get(CORES_ENV):
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])


class WorkerExtension:
    """Becomes part of vLLM's worker; naming this class is also what makes the worker import this module."""

    def abandon_weight_update(self: Any) -> None:
        """End a weight sync that failed half-way, so that the next one can start.

        What is loaded now must not be served.
        """
        engine = self.weight_transfer_engine
        finalize_layerwise_reload(engine.model, engine.model_config)
        self._weight_update_active = False

    def map_staged(self: Any, folder: str) -> None:
        """Before the pause: what the next load takes."""
        self.weight_transfer_engine.map_staged(Path(folder))

    def read_back_some(self: Any) -> bool:
        """After the pause: compare for a moment what was loaded; whether all of it was compared."""
        return self.weight_transfer_engine.read_back_some()


@dataclass
class InitInfo(WeightTransferInitInfo):
    read_back: bool = True


@dataclass
class Nothing(WeightTransferUpdateInfo):
    """What is to be loaded was said before the pause."""


class SharedMemoryWeightEngine(WeightTransferEngine[InitInfo, Nothing]):
    """Loads buckets that lie, checked, in shared memory; every weight must be covered. Then reads the weights back."""

    init_info_cls = InitInfo
    update_info_cls = Nothing

    def __init__(
        self, config: WeightTransferConfig, vllm_config: object, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)  # type: ignore[arg-type]
        self._manifest: Manifest | None = None
        self._buckets: list[torch.Tensor] = []
        self._reads_back = True
        self._reading: Iterator[None] | None = None
        self._was_read = True
        self._unread: list[str] = []

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._reads_back = init_info.read_back

    def map_staged(self, folder: Path) -> None:
        self._reading, self._was_read = None, False
        self._manifest = Manifest.from_json((folder / MANIFEST).read_text())
        self._buckets = [_mapped(folder / bucket_name(i)) for i in range(len(self._manifest.bucket_bytes))]

    def start_weight_update(self) -> None:
        forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)
        forget_uncounted(self.model)

    def receive_weights(self, update_info: Nothing) -> None:
        self.model.load_weights(self._tensors())  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        assert self._manifest is not None
        missing = [*uncovered_parameters(self.model), *uncovered_uncounted(self.model)]
        if missing:
            raise self._manifest.error("load", f"no published tensor reached {', '.join(missing)}")
        finalize_layerwise_reload(self.model, self.model_config)
        self._reading = self._read_back(self._manifest)

    @torch.no_grad()
    def read_back_some(self) -> bool:
        if not self._was_read:
            assert self._reading is not None, "nothing was loaded since it was staged"
            self._was_read = not self._reads_back or ends_within(SLICE_S, self._reading)
            if self._was_read:
                self._reading, self._manifest, self._buckets = None, None, []
        return self._was_read

    def _read_back(self, manifest: Manifest) -> Iterator[None]:
        result = yield from read_back(
            self.model,
            self._tensors(),
            dtype=self.model_config.dtype,
            device=self.device,
            turn=manifest.policy_version,
        )
        if result.differing:
            where = ", ".join(result.differing)
            raise manifest.error("load", f"after the load, weights differ from those published in {where}")
        if result.unread != self._unread:
            self._unread = result.unread
            logger.warning("only the canary proves these layers, their layout is unknown: %s", ", ".join(self._unread))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._manifest is not None
        for index, bucket in enumerate(self._buckets):
            yield from read_bucket(self._manifest, index, bucket)

    def shutdown(self) -> None:
        pass


def _mapped(path: Path) -> torch.Tensor:
    """A file's bytes, uint8. They stay mapped as long as a tensor of them is held, whatever happens to the file."""
    if not path.stat().st_size:
        return torch.empty(0, dtype=torch.uint8)
    with path.open("rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Make vLLM pack the experts of this load as it packed the first ones.

    On a CPU a mixture's experts are packed when their kernel is made. A later load finds a kernel and leaves that out:
    plain weights would lie where the kernel reads packed ones. On GPUs, where graphs hold on to kernels, nothing is
    packed there.
    """
    if current_platform.is_cpu():
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod):
                method.moe_kernel = None


def uncovered_parameters(model: torch.nn.Module) -> list[str]:
    """Names of layers with parameters that the load in progress has not written completely.

    vLLM puts a layer's *old* values back, without an error, when nothing was loaded into it. That is how a tied output
    head stays old on CPU, where the head's packed copy is a tensor of its own. Layers without parameters (rotary
    embeddings) have nothing to load.
    """
    missing = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load():
            continue  # complete: vLLM has processed this layer already
        expected = _num_loadable(layer)
        if expected and info.load_numel < expected:
            missing.append(f"{name or type(layer).__name__} ({info.load_numel} of {expected} elements)")
    return missing


def forget_uncounted(model: torch.nn.Module) -> None:
    """Make what vLLM loads without counting it (a router's correction of its scores) not a number until it is loaded.

    It is written in place and outside of vLLM's layerwise reload, so that an old value would stay without a word.
    """
    for _, parameter in _uncounted(model):
        parameter.data.fill_(torch.nan)


def uncovered_uncounted(model: torch.nn.Module) -> list[str]:
    """Names of what `forget_uncounted` has erased and the load in progress has not written completely."""
    return [name for name, parameter in _uncounted(model) if parameter.data.isnan().any()]


def _uncounted(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in SKIP_LOAD_TENSORS and parameter.is_floating_point():
            yield name, parameter


def _num_loadable(layer: torch.nn.Module) -> int:
    """Elements of a layer's own parameters that vLLM counts as a checkpoint fills them.

    Not the padding rows of a vocabulary, and not what `forget_uncounted` sees to.
    """
    total = sum(p.numel() for name, p in layer.named_parameters(recurse=False) if name not in SKIP_LOAD_TENSORS)
    if isinstance(layer, VocabParallelEmbedding):
        padding_rows = layer.num_embeddings_per_partition - layer.shard_indices.num_org_elements
        total -= padding_rows * layer.embedding_dim
    return total


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryWeightEngine)
die_with_parent()
pin_to_cores()
