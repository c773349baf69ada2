"""Published weights into a model of transformers, and the proof that they arrived."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from ..collector.engine import StagedWeights
from ..trainer.names import PublishedNames
from ..trainer.tensors import saved_tensors
from ..transports.device_memory import Opened, device_memory
from ..transports.transport import DevicePlace
from ..weights import Manifest, TensorEntry, checksum_of, read_bucket


class OpenedHere:
    """A version on the device of a model that is in this process."""

    def __init__(self, manifest: Manifest, places: Sequence[DevicePlace], device: torch.device) -> None:
        self.version = Opened(manifest, places, device_memory(device))
        self._checks = self.version.checks(manifest)
        self._one_at_a_time = threading.Lock()
        self._closed = False

    async def check(self) -> None:
        await asyncio.to_thread(self._check)

    def _check(self) -> None:
        """One tensor after the other, so that a check that nobody waits for any more ends with the next."""
        going = True
        while going:
            with self._one_at_a_time:
                going = not self._closed and next(self._checks, self) is not self

    def close(self) -> None:
        with self._one_at_a_time:
            self._closed = True
            self._checks.close()
            self.version.close()


class ModelTensors:
    """The tensors of a model by the names that they are published under; made once, because names are found by trying.

    `parts`: of each tensor of the model, the published names that it is made of; nearly always one.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        self.names = PublishedNames(lm)
        self.tensors = saved_tensors(lm)
        self.parts = {
            name: {self.names.renamed[name]} if name in self.names.renamed else self.names.parts(name, tensor.shape)
            for name, tensor in self.tensors.items()
        }
        self.owner = {part: name for name, parts in self.parts.items() for part in parts}


def load(staged: StagedWeights, into: ModelTensors) -> None:
    """Copy what was staged into the model. Raises WeightSyncError unless that covers every tensor."""
    manifest, covered = staged.manifest, set[str]()
    waiting: dict[str, dict[str, torch.Tensor]] = {}  # parts of tensors of which others are still to come

    def put(name: str, tensor: torch.Tensor) -> None:
        target = into.tensors[name]
        if (tensor.shape, tensor.dtype) != (target.shape, target.dtype):
            raise manifest.error(
                "load",
                f"{name} was published as {tensor.dtype} {tuple(tensor.shape)}, the model has {target.dtype} "
                f"{tuple(target.shape)}",
            )
        target.copy_(tensor)
        covered.add(name)

    for index, bucket in enumerate(buckets_of(staged)):
        for name, tensor in read_bucket(manifest, index, bucket):
            if (owner := into.owner.get(name)) is None:
                raise manifest.error("load", f"the model has no {name}")
            if len(into.parts[owner]) == 1:
                put(owner, tensor)
                continue
            parts = waiting.setdefault(owner, {})
            parts[name] = tensor
            if parts.keys() == into.parts[owner]:
                put(owner, into.names.join(owner, into.tensors[owner].shape, waiting.pop(owner)))
    if missing := sorted(into.tensors.keys() - covered):
        raise manifest.error("load", f"no published tensor reached {', '.join(missing)}")
    confirm(staged)


def buckets_of(staged: StagedWeights) -> list[torch.Tensor]:
    """uint8, in main memory or on the device."""
    if isinstance(staged.opened, OpenedHere):
        return staged.opened.version.tensors
    return [torch.from_numpy(bucket) for bucket in staged.buckets]


def confirm(staged: StagedWeights) -> None:
    """After the last copy of what was staged. Raises WeightSyncError if that had been taken back meanwhile."""
    if isinstance(staged.opened, OpenedHere):
        staged.opened.version.confirm(staged.manifest)


def read_back(staged: StagedWeights, model: ModelTensors) -> Iterator[None]:
    """Compare the model's bytes to those published, tensor by tensor: it may compute something else in between.

    Raises WeightSyncError at the end, naming all tensors that differ.
    """
    manifest, wrong = staged.manifest, set[str]()
    for entry in manifest.entries:
        if not _holds(model, entry, manifest.checksum):
            wrong.add(entry.name)
        yield
    if wrong:
        names = ", ".join(sorted(wrong))
        raise manifest.error("load", f"after the load, weights differ from those published in {names}")


def _holds(model: ModelTensors, entry: TensorEntry, checksum: str) -> bool:
    owner = model.owner[entry.name]
    whole = model.tensors[owner].detach().cpu()
    part = whole if len(model.parts[owner]) == 1 else model.names.split(owner, whole)[entry.name]
    return checksum_of(part.contiguous().view(-1).view(torch.uint8).numpy(), checksum) == entry.checksum
