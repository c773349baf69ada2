"""Several adapters of one model at once: each row of a pass is computed under the version that it belongs to.

    rows of a pass    version 6 | 6 | 7 | 6 | 7      y = W x for all, + B6 (A6 x) where the row is of 6, + B7 (A7 x) ...

Every adapter of a pass is applied to all of its rows, and each row takes its own: so the products have as many rows as
those of the model itself, and a row's numbers do not depend on the versions beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..collector.engine import StagedWeights
from ..config.inputs import LoraConfig
from ..trainer.linear import linear
from ..trainer.lora import base_entry, base_error, lora_targets, low_rank
from ..weights import Manifest, TensorEntry, checksum_of, digest_of, read_bucket
from .hf_weights import ModelTensors, buckets_of, confirm


class _Pass(threading.local):
    """What the targets need to know of a thread's pass under way: [R] per version, whether a row is of it."""

    num_rows: int = 0
    width: int = 0
    parts: Sequence[tuple[dict[str, torch.Tensor], torch.Tensor]] = ()


class _Routed(nn.Linear):
    """A target whose rows may each have another adapter."""

    module_name: str
    scaling: float
    routing: _Pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = linear(input, self.weight, self.bias)
        routing = self.routing
        for weights, rows in routing.parts:
            tokens = input.numel() // input.shape[-1]
            if tokens != routing.num_rows * routing.width:
                raise RuntimeError(f"{self.module_name} got {tokens} tokens of {routing.num_rows} x {routing.width}")
            a, b = weights[f"{self.module_name}.lora_A.weight"], weights[f"{self.module_name}.lora_B.weight"]
            adapted = out + low_rank(input, a, b, self.scaling)
            own = rows.repeat_interleave(routing.width).view(*input.shape[:-1], 1)
            out = torch.where(own, adapted, out)
        return out


class Adapters:
    """The versions that an engine holds, beside a model that never changes."""

    def __init__(self, lm: PreTrainedModel, lora: LoraConfig, *, dtype: torch.dtype) -> None:
        """Changes the model's targets in place. `dtype`: in which it computes."""
        self._base = ModelTensors(lm)  # before there is anything else in it
        self._dtype, self._device = dtype, lm.device
        self._shapes: dict[str, tuple[int, int]] = {}
        self._routing = _Pass()
        self._versions: dict[int, dict[str, torch.Tensor]] = {}
        for name in lora_targets(lm, lora):
            module = lm.get_submodule(name)
            assert isinstance(module, nn.Linear)
            module.__class__ = type(f"Routed{type(module).__name__}", (_Routed, type(module)), {})
            routed = cast(_Routed, module)
            routed.module_name, routed.scaling, routed.routing = name, lora.scaling, self._routing
            self._shapes[f"{name}.lora_A.weight"] = (lora.rank, module.in_features)
            self._shapes[f"{name}.lora_B.weight"] = (module.out_features, lora.rank)
        # Published under the names that the model's files would give them.
        self._own_names = {self._published(name): name for name in self._shapes}

    def __contains__(self, version: int | None) -> bool:
        return version in self._versions

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for weights in self._versions.values() for t in weights.values())

    def load(self, staged: StagedWeights) -> None:
        """Hold one more version, or replace one, beside generation. Raises `WeightSyncError` unless it is complete."""
        manifest, found = staged.manifest, dict[str, torch.Tensor]()
        for index, bucket in enumerate(buckets_of(staged)):
            for published, tensor in read_bucket(manifest, index, bucket):
                name = self._own_names.get(published)
                if name is None:
                    raise manifest.error("load", f"no target of model.lora has {published}")
                if (tuple(tensor.shape), tensor.dtype) != (self._shapes[name], self._dtype):
                    raise manifest.error(
                        "load",
                        f"{name} was published as {tensor.dtype} {tuple(tensor.shape)}, the engine expects "
                        f"{self._dtype} {self._shapes[name]}",
                    )
                found[name] = tensor.to(self._device, copy=True)
        if missing := sorted(self._shapes.keys() - found.keys()):
            raise manifest.error("load", f"no published tensor reached {', '.join(missing)}")
        confirm(staged)
        self._versions[manifest.policy_version] = found

    def drop(self, version: int) -> None:
        self._versions.pop(version, None)

    def read_back(self, staged: StagedWeights) -> None:
        """Compare what passes compute with to what was published: the adapter, and the weights that it is added to.

        Neither changes while an engine generates, so this may run beside it. Raises `WeightSyncError`.
        """
        manifest = staged.manifest
        own = self._versions[manifest.policy_version]
        wrong = [
            e.name for e in manifest.entries if _checksum(own[self._own_names[e.name]], manifest.checksum) != e.checksum
        ]
        if wrong:
            names = ", ".join(sorted(wrong))
            raise manifest.error("load", f"after the load, weights differ from those published in {names}")
        self._check_base(manifest)

    @contextmanager
    def applied(self, versions: Sequence[int | None], *, num_rows: int, width: int) -> Iterator[None]:
        """Inside, a pass over `num_rows` rows of `width` tokens, the first of which are of these versions.

        None, and rows beyond: the model without an adapter.
        """
        routing = self._routing
        routing.num_rows, routing.width = num_rows, width
        padded = [*versions, *[None] * (num_rows - len(versions))]
        routing.parts = [
            (self._versions[version], torch.tensor([v == version for v in padded], device=self._device))
            for version in sorted({v for v in versions if v is not None})
        ]
        try:
            yield
        finally:
            routing.parts = ()

    def _published(self, name: str) -> str:
        module, _, which = name.partition(".lora_")
        return f"{self._base.names.renamed[f'{module}.weight'].removesuffix('.weight')}.lora_{which}"

    def _check_base(self, manifest: Manifest) -> None:
        entries: list[TensorEntry] = []
        for name, parts in self._base.parts.items():
            whole = self._base.tensors[name].detach()
            of_parts = {next(iter(parts)): whole} if len(parts) == 1 else self._base.names.split(name, whole)
            entries += [base_entry(part, tensor) for part, tensor in of_parts.items()]
        if (digest := digest_of(entries)) != manifest.base:
            raise base_error(manifest, digest)


def _checksum(tensor: torch.Tensor, kind: str) -> str:
    return checksum_of(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy(), kind)
