"""Runs inside vLLM's own worker processes: takes published weights in, and proves that all of the model was loaded.

vLLM imports this module there because the engine names `WorkerExtension` as its `worker_extension_cls`. With tensor
parallelism there is a worker for each rank. All map the same buckets; vLLM's loaders take each rank's own parts.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.platforms import current_platform

from ..weights import Manifest, WeightSyncError
from . import vllm_shadow
from .shards import Part, PartsTaken
from .slices import Slices
from .vllm_blocks import allow_least_blocks
from .vllm_memory import WorkerMemory
from .vllm_plan import CopyPlan, PreparedLoad, Watched
from .vllm_products import in_few_shapes
from .vllm_readback import read_back
from .vllm_shadow import ShadowModel, can_be_shadowed
from .vllm_staged import Staged
from .vllm_worker_env import CORES_ENV, MEMORY_ENV, PARENT_ENV

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
"""Given to vLLM's loader at once, if no single tensor is larger: about what a slice has time for."""
ROOM = 1.2
"""So many times the weights' size must be free for a second copy of them."""
ROOM_TO_WATCH = 3.0
"""For one that nobody asked for, and that is given back at once: on a shared device others may be about to need it."""

Failure = tuple[str, str]
"""(check, detail) of a `WeightSyncError`."""


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


def answered(method: Callable[..., Any]) -> Callable[..., tuple[Any, Failure | None]]:
    """What a call to all ranks answers: (result, failure). Nothing is raised.

    vLLM reads the answers of the ranks up to the first error. It would take the others for answers to its next call.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any) -> tuple[Any, Failure | None]:
        try:
            with set_current_vllm_config(self.vllm_config):
                return method(weights_of(self), *args), None
        except WeightSyncError as error:
            return None, (error.check, error.detail)
        except Exception as error:
            logger.exception("%s failed", method.__name__)
            return None, ("load", f"{type(error).__name__}: {error}")

    return call


class WorkerExtension:
    """Becomes part of vLLM's worker; naming this class is also what makes the worker import this module."""

    @answered
    def map_staged(self: Any, folder: str, double_buffer: bool | None) -> None:
        self.map_staged(Path(folder), double_buffer=double_buffer)

    @answered
    def check_some(self: Any) -> bool:
        return self.check_some()

    @answered
    def load_ahead(self: Any) -> bool:
        return self.load_ahead()

    @answered
    def load_staged(self: Any, version: str) -> None:
        self.load_staged(version)

    @answered
    def read_back_some(self: Any, compare: bool) -> bool:
        return self.read_back_some(compare=compare)

    @answered
    def release_memory(self: Any, level: int) -> int:
        return self.memory.release(level)

    @answered
    def reclaim_memory(self: Any) -> None:
        self.memory.reclaim()

    def hold_adapters(self: Any, targets: list[str], scaling: float) -> list[str]:
        """Once, before the first version: what is loaded are adapters of these modules.

        Returns those that no layer has a place for.
        """
        from .vllm_lora import EngineAdapters  # which reads the model's files with transformers

        with set_current_vllm_config(self.vllm_config):
            self.leeway_weights = held = EngineAdapters(
                self.model_runner.get_model(),
                self.model_runner.lora_manager._adapter_manager,
                self.vllm_config,
                self.device,
                targets=targets,
                scaling=scaling,
            )
        return held.slots.without_place

    @answered
    def map_adapter(self: Any, folder: str, adapter_id: int) -> None:
        self.map_adapter(Path(folder), adapter_id)

    @answered
    def drop_adapter(self: Any, adapter_id: int) -> None:
        self.drop_adapter(adapter_id)

    @answered
    def parts_taken(self: Any) -> dict[str, list[Part]]:
        return {name: sorted(parts) for name, parts in self.parts.items()}


def weights_of(worker: Any) -> Any:
    """What takes versions in: `EngineWeights`, or `EngineAdapters` where the engine was told to hold those."""
    if not hasattr(worker, "leeway_weights"):
        memory = WorkerMemory(worker)
        worker.leeway_weights = EngineWeights(
            worker.model_runner.get_model(), worker.vllm_config, worker.device, memory
        )
    return worker.leeway_weights


class EngineWeights:
    """Loads buckets that lie in shared memory, checked, or in memory of this device, which are checked here; every
    weight must be covered. Then reads the weights back.

    map_staged (-> check_some until it is done -> map_staged)
               -> load_ahead until it is done -> the pause: load_staged -> read_back_some until it is done
    """

    def __init__(self, model: Any, vllm_config: VllmConfig, device: torch.device, memory: WorkerMemory) -> None:
        self.model, self.memory = model, memory
        self._config, self._device = vllm_config, device
        self._num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self.parts: dict[str, set[Part]] = {}
        """What this rank's loader takes of each published tensor, if there are several ranks."""
        self._staged: Staged | None = None
        self._shadow: ShadowModel | None = None
        self._plan: CopyPlan | None = None
        self._copied_by: CopyPlan | None = None
        self._prepared: PreparedLoad | None = None
        self._has_watched = False
        self._double_buffer: bool | None = None
        self._is_ready = False
        self._filling: Slices | None = None
        self._reading: Slices | None = None
        self._half_loaded = False
        self._unread: list[str] = []
        self._num_loads = 0

    def map_staged(self, folder: Path, *, double_buffer: bool | None) -> None:
        """What the next load takes. `double_buffer`: the setting."""
        self._forget()
        self._staged, self._double_buffer = Staged(folder, self._device), double_buffer
        self._is_ready = self.memory.is_away  # nothing can be done then before the memory comes back

    def check_some(self) -> bool:
        """Check for a moment what lies on this device; whether every byte of it was."""
        assert self._staged is not None, "nothing was staged"
        return self._staged.checks.go_on()

    @torch.no_grad()
    def load_ahead(self) -> bool:
        """Do for a moment beside generation what can be done before the pause; whether that is all done."""
        if self._filling is None and not self._is_ready:
            self._filling = Slices(self._before_the_pause())
        return self._filling is None or self._filling.go_on()

    def _before_the_pause(self) -> Iterator[None]:
        assert self._staged is not None, "nothing was staged"
        manifest, stays, wanted = self._staged.manifest, vllm_shadow.graphs_may_hold_tensors(), self._double_buffer
        if (plan := self._plan_for(manifest)) is not None:
            self._plan = None  # if anything fails, loaders load the next version
            tensors = dict(self._tensors())
            if wanted and not self._staged.is_on_device and self._has_room(ROOM * manifest.num_bytes):
                tensors = yield from self._staged.fetched()
            self._prepared, self._plan = plan.prepared(tensors), plan
        elif not self._half_loaded and can_be_shadowed(self.model):
            own_bytes = manifest.num_bytes / self._num_ranks
            asked = wanted or (wanted is None and not stays)
            watches = wanted is None and stays and not self._has_watched
            if (asked and self._has_room(ROOM * own_bytes)) or (
                watches and self._has_room(ROOM_TO_WATCH * own_bytes, warns=False)
            ):
                yield from self._fill_shadow()
        self._is_ready = True

    def _plan_for(self, manifest: Manifest) -> CopyPlan | None:
        """None where vLLM's loaders load: on a CPU, for what they change, and after one of their loads failed."""
        plan = self._plan
        stays = vllm_shadow.graphs_may_hold_tensors() and not self._half_loaded
        return plan if stays and plan is not None and plan.fits(manifest) else None

    def _has_room(self, needed: float, *, warns: bool = True) -> bool:
        free = free_bytes(self._device)
        if needed > free and warns:
            logger.warning(
                "%.1f GiB of memory are free, a second copy of the weights needs %.1f: they are loaded in the "
                "pause; free some, or set rollout.engine.double_buffer=false",
                free / 2**30,
                needed / 2**30,
            )
        return needed <= free

    def _fill_shadow(self) -> Iterator[None]:
        """Where tensors stay where they are, the first time is watched: later loads are its copies."""
        assert self._staged is not None
        self._shadow = shadow = ShadowModel(self.model)
        yield
        watched = None
        if shadow.copies and not self._has_watched:
            self._has_watched = True
            watched = Watched(self._staged.manifest, self._staged.buckets)
        filling = self._fill(shadow.model)
        ended = False
        while not ended:
            with watched or nullcontext():  # not around the pass that comes in between
                ended = next(filling, filling) is filling
            yield
        self._all_covered(shadow.model)
        with watched or nullcontext():
            shadow.finish()
        if shadow.copies and shadow.made:
            logger.warning("a load made %s: weights are loaded in the pause", ", ".join(shadow.made))
            shadow.drop()
            self._shadow = None
        elif watched is not None:
            try:
                self._plan = yield from watched.plan(shadow.loaded())
            except RuntimeError as error:  # such as no memory to compare in
                logger.warning("vLLM's loaders load every version: %s", error)

    @torch.no_grad()
    def load_staged(self, version: str) -> None:
        """In the pause. Raises RuntimeError unless it is this version that was staged, and loaded as far as can be."""
        staged = None if self._staged is None else str(self._staged.manifest.policy_version)
        if self._staged is None or staged != version or not self._is_ready:
            raise RuntimeError(f"told to load version {version}, while {staged} is staged: the load was given up")
        if self._shadow is not None:
            self._shadow.swap()
        elif (plan := self._plan_for(self._staged.manifest)) is not None:
            self._plan = None  # until this load was read back
            (self._prepared or plan.prepared(dict(self._tensors()))).copy()
            self._copied_by = plan
        else:
            self._load_in_place()
        self._staged.confirm()
        self._reading = Slices(self._read_back(self._staged.manifest))

    @torch.no_grad()
    def read_back_some(self, *, compare: bool) -> bool:
        """After the pause: compare for a moment what was loaded, if at all; whether all is done."""
        if self._shadow is not None:  # it holds the weights before these
            self._shadow.drop()
            self._shadow = None
            if self._plan is not None and self._device.type == "cuda":
                torch.cuda.empty_cache()  # it was the last one
        self._prepared = None
        if self._staged is not None:
            assert self._reading is not None, "nothing was loaded since it was staged"
            if compare and not self._reading.go_on():
                return False
            self._staged.confirm()
            self._plan = self._copied_by or self._plan
            self._forget()
        return True

    def _forget(self) -> None:
        if self._shadow is not None:
            self._shadow.drop()
        self._shadow, self._prepared, self._filling, self._reading, self._copied_by = None, None, None, None, None
        self._is_ready = False
        if self._staged is not None:
            self._staged.close()
            self._staged = None

    def _load_in_place(self) -> None:
        if self._half_loaded:  # by a load that failed; what it left is not served
            finalize_layerwise_reload(self.model, self._config.model_config)
        self._half_loaded = True
        forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)
        forget_uncounted(self.model)
        for _ in self._fill(self.model):
            pass
        self._all_covered(self.model)
        finalize_layerwise_reload(self.model, self._config.model_config)
        self._half_loaded = False

    def _fill(self, model: Any) -> Iterator[None]:
        """Give all tensors to vLLM's loader, some at a time. The first load of several ranks notes what it takes."""
        if self._num_ranks > 1 and not self.parts:
            taken = PartsTaken()
            for name, tensor in self._tensors():
                with taken.of(name, tensor):
                    model.load_weights([(name, tensor)])
                yield
            self.parts = taken.parts
            return
        chunk: list[tuple[str, torch.Tensor]] = []
        num_bytes = 0
        for name, tensor in self._tensors():
            if chunk and num_bytes + tensor.nbytes > CHUNK_BYTES:
                model.load_weights(chunk)
                yield
                chunk, num_bytes = [], 0
            chunk.append((name, tensor))
            num_bytes += tensor.nbytes
        model.load_weights(chunk)
        yield

    def _all_covered(self, model: torch.nn.Module) -> None:
        assert self._staged is not None
        missing = [*uncovered_parameters(model), *uncovered_uncounted(model)]
        if missing:
            raise self._staged.manifest.error("load", f"no published tensor reached {', '.join(missing)}")

    def _read_back(self, manifest: Manifest) -> Iterator[None]:
        served = self._config.model_config
        turn, self._num_loads = self._num_loads, self._num_loads + 1  # versions may come in strides, and miss columns
        result = yield from read_back(
            self.model,
            self._own_tensors(),
            dtype=served.dtype,
            device=self._device,
            turn=turn,
            head_is_packed=served.head_dtype == served.dtype,
        )
        if result.differing:
            where = ", ".join(result.differing)
            raise manifest.error("load", f"after the load, weights differ from those published in {where}")
        if result.unread != self._unread:
            self._unread = result.unread
            logger.warning("only the canary proves these layers, their layout is unknown: %s", ", ".join(self._unread))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._staged is not None
        yield from self._staged.tensors()

    def _own_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of each published tensor what belongs to this rank."""
        for name, tensor in self._tensors():
            if self._num_ranks == 1:
                yield name, tensor
            for offset, size, stride in sorted(self.parts.get(name, ())):
                yield name, tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def free_bytes(device: torch.device) -> int:
    """What a second copy of the weights may take on the device; what torch has taken and does not use counts."""
    if device.type == "cpu":
        return psutil.virtual_memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


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


def is_no_false_alarm(record: logging.LogRecord) -> bool:
    """Not vLLM's word, at every load in place, that rotary embeddings got no weights: nobody publishes any for them.

    `uncovered_parameters` raises for a layer that has weights and got none.
    """
    return record.msg != "%s: Failed to load weights"


logging.getLogger(initialize_layerwise_reload.__module__).addFilter(is_no_false_alarm)
die_with_parent()
pin_to_cores()
if current_platform.is_cpu():
    allow_least_blocks()
    in_few_shapes()
