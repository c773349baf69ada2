"""A load as one list of copies: where vLLM's loaders put every part of every published tensor, noted while they did.

For each version vLLM runs the loader of each tensor twice, makes layers anew, and copies again: 0.1 to 0.3 s of the
engine's own process for a model of 30 layers, however small. Where weights stay as they were published and where they
were (on a GPU, whose graphs hold on to addresses), that ends in the same copies every time. So one load is watched, on
a shadow of the model, and later ones are its copies. A load that did anything else, such as to compute something from a
tensor, gives no plan: then vLLM's loaders go on loading. A plan's load is read back as every other is, and a plan whose
load was not what was published is not used again.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..weights import Manifest, read_bucket
from .shards import Part


@dataclass(frozen=True)
class _Target:
    """A part of a module's parameter or buffer."""

    module: Any
    name: str
    part: Part

    def view(self) -> torch.Tensor:
        return view(getattr(self.module, self.name).data, self.part)


@dataclass(frozen=True)
class CopyPlan:
    """`copies`: (published name, part of it, target); `fills`: (value, target), such as rows that pad a vocabulary.

    `published`: of which tensors, (names, type, shape).
    """

    published: frozenset[tuple[Any, ...]]
    copies: Sequence[tuple[str, Part, _Target]]
    fills: Sequence[tuple[Any, _Target]]

    def fits(self, manifest: Manifest) -> bool:
        return self.published == _published(manifest)

    def prepared(self, tensors: Mapping[str, torch.Tensor]) -> PreparedLoad:
        """Of these tensors, by published name: before the pause what can be done before it."""
        sources = [view(tensors[name], part) for name, part, _ in self.copies]
        return PreparedLoad(sources, [target.view() for *_, target in self.copies], self.fills)


@dataclass(frozen=True)
class PreparedLoad:
    sources: list[torch.Tensor]
    targets: list[torch.Tensor]
    fills: Sequence[tuple[Any, _Target]]

    def copy(self) -> None:
        """In the pause. Returns when the device has done it, and all that was asked of it before."""
        targets, sources = [], []
        for target, source in zip(self.targets, self.sources, strict=True):
            if target.dtype == source.dtype:
                targets.append(target)
                sources.append(source)
            else:
                target.copy_(source)
        if targets:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        for value, target in self.fills:
            target.view().fill_(value)
        if (device := next((target.device for target in self.targets if target.is_cuda), None)) is not None:
            torch.cuda.synchronize(device)


class Watched(TorchDispatchMode):
    """While it is entered: notes what is copied out of `buckets` (uint8, of this version), and what is filled."""

    def __init__(self, manifest: Manifest, buckets: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._manifest, self._buckets = manifest, buckets
        self._numbers = {bucket.untyped_storage().data_ptr(): i for i, bucket in enumerate(buckets) if bucket.nbytes}
        # Tied tensors share their bytes: any one of them stands for all.
        self._entries = [sorted({e.offset: e for e in manifest.entries_of(i)}.items()) for i in range(len(buckets))]
        # Their targets are kept, so that nothing else comes to lie at the address of one.
        self._copied: list[tuple[str, Part, torch.Tensor]] = []
        self._filled: list[tuple[Any, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and not args[0].is_meta:
            if (found := self._part_of(args[1])) is not None and args[0].shape == args[1].shape:
                self._copied.append((*found, args[0]))
        elif func is torch.ops.aten.fill_.Scalar and not args[0].is_meta:
            self._filled.append((args[1], args[0]))
        return func(*args, **(kwargs or {}))

    def _part_of(self, source: torch.Tensor) -> tuple[str, Part] | None:
        number = None if source.is_meta else self._numbers.get(source.untyped_storage().data_ptr())
        if number is None:
            return None
        start, entries = int(source.storage_offset()) * source.element_size(), self._entries[number]
        _, entry = entries[bisect.bisect_right(entries, start, key=lambda entry: entry[0]) - 1]
        if f"torch.{entry.dtype}" != str(source.dtype):
            return None
        offset = (start - entry.offset) // source.element_size()
        return entry.name, (offset, tuple(source.shape), source.stride())

    def plan(self, made: Iterable[tuple[Any, str, torch.Tensor]]) -> Generator[None, None, CopyPlan | None]:
        """`made`: (module, its tensor's name, the tensor that was loaded for it), all of them.

        None unless every element of these is a copy or a filled one, once. In pieces: it compares all tensors.
        """
        places = {tensor.untyped_storage().data_ptr(): (module, name, tensor) for module, name, tensor in made}

        def placed(target: torch.Tensor) -> _Target | None:
            """None for a tensor that was made on the way."""
            if (place := places.get(target.untyped_storage().data_ptr())) is None:
                return None
            module, name, tensor = place
            offset = int(target.storage_offset() - tensor.storage_offset())
            return _Target(module, name, (offset, tuple(target.shape), target.stride()))

        # What vLLM loads in place, a bias, it loads twice: the first time to count.
        copies = {(name, part, at): target for name, part, target in self._copied if (at := placed(target))}
        fills = {(value, at): target for value, target in self._filled if (at := placed(target))}
        parts = defaultdict[tuple[Any, str], list[Part]](list)
        for *_, at in (*copies, *fills):
            parts[at.module, at.name].append(at.part)
        for module, name, tensor in places.values():
            own = getattr(module, name)
            if (own.shape, own.stride()) != (tensor.shape, tensor.stride()):
                return None
            if not _is_covered(tensor, parts[module, name]):
                return None
            yield
        tensors = {
            name: tensor
            for number, bucket in enumerate(self._buckets)
            for name, tensor in read_bucket(self._manifest, number, bucket)
        }
        for (name, part, _), target in copies.items():
            if not torch.equal(target, view(tensors[name], part).to(target)):
                return None
            yield
        if not all(bool((target == value).all()) for (value, _), target in fills.items()):
            return None
        return CopyPlan(_published(self._manifest), list(copies), list(fills))


def _is_covered(tensor: torch.Tensor, parts: Iterable[Part]) -> bool:
    """Whether each element is in one of these parts of it, and in no other."""
    times = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.int8, device=tensor.device).zero_()
    for part in parts:
        view(times, part).add_(1)
    return bool((times == 1).all())


def view(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    offset, size, stride = part
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _published(manifest: Manifest) -> frozenset[tuple[Any, ...]]:
    """Tied tensors share their bytes: (all names of these, type, shape)."""
    names = defaultdict[tuple[Any, ...], list[str]](list)
    for e in manifest.entries:
        names[e.bucket, e.offset, e.dtype, e.shape].append(e.name)
    return frozenset((tuple(sorted(of_span)), dtype, shape) for (_, _, dtype, shape), of_span in names.items())
