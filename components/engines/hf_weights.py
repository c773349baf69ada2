"""Published weights into a model of transformers, and the proof that they arrived."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from ..trainer.names import PublishedNames
from ..trainer.tensors import saved_tensors
from ..weights import Manifest, TensorEntry, WeightSyncError, read_bucket, sha256_of


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


class Load:
    """One publication on its way into the model: `take` every bucket, then `finish`. Each raises WeightSyncError."""

    def __init__(self, into: ModelTensors, manifest: Manifest) -> None:
        self._into = into
        self._manifest = manifest
        self._covered: set[str] = set()
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}  # parts of tensors of which others are still to come

    def take(self, index: int, bucket: np.ndarray) -> None:
        """Copy one bucket's tensors into the model, each after a check of its bytes."""
        entries = [e for e in self._manifest.entries if e.bucket == index]
        memory = torch.from_numpy(bucket if bucket.flags.writeable else bucket.copy())
        for name, tensor in read_bucket(memory, entries, policy_version=self._manifest.policy_version):
            if (owner := self._into.owner.get(name)) is None:
                raise self._error(f"the model has no {name}")
            if len(self._into.parts[owner]) == 1:
                self._put(owner, tensor)
                continue
            parts = self._waiting.setdefault(owner, {})
            parts[name] = tensor.clone()
            if parts.keys() == self._into.parts[owner]:
                self._put(owner, self._into.names.join(owner, self._into.tensors[owner].shape, parts))
                del self._waiting[owner]

    def finish(self, *, read_back: bool) -> None:
        """Every tensor was published; `read_back`: and the model holds its very bytes."""
        if missing := sorted(self._into.tensors.keys() - self._covered):
            raise self._error(f"no published tensor reached {', '.join(missing)}")
        if not read_back:
            return
        wrong = sorted({e.name for e in self._manifest.entries if not self._holds(e)})
        if wrong:
            raise self._error(f"after the load, weights differ from those published in {', '.join(wrong)}")

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        target = self._into.tensors[name]
        if (tensor.shape, tensor.dtype) != (target.shape, target.dtype):
            raise self._error(
                f"{name} was published as {tensor.dtype} {tuple(tensor.shape)}, the model has {target.dtype} "
                f"{tuple(target.shape)}"
            )
        target.copy_(tensor)
        self._covered.add(name)

    def _holds(self, entry: TensorEntry) -> bool:
        owner = self._into.owner[entry.name]
        whole = self._into.tensors[owner].detach().cpu()
        part = whole if len(self._into.parts[owner]) == 1 else self._into.names.split(owner, whole)[entry.name]
        return sha256_of(part.contiguous().view(-1).view(torch.uint8)) == entry.sha256

    def _error(self, detail: str) -> WeightSyncError:
        return WeightSyncError("load", self._manifest.policy_version, detail)
