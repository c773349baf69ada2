"""Memory of a device that other processes on it can open: of a GPU by CUDA IPC, of a CPU as mapped files.

What crosses is bytes and whole numbers (`DevicePlace`), and nothing of it is unpickled. CUDA's handles mean nothing on
another device, and the same device may have another index in each process: devices are compared by their UUID.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..weights import Manifest, bucket_checks
from .files import open_regular
from .leases import Lease
from .transport import DevicePlace, NotKept

if TYPE_CHECKING:
    import torch

INSTEAD = "set param_server.transport_options.memory=host"
NO_COUNTER = b"/leeway-none"
"""torch counts the readers of what it shares in a file that the writer names, and takes any place in it: an address in
this process that another one chose. Leases count them here, so torch is given a file that does not exist."""
EVENT_BYTES = 64
PIECE_BYTES = 16 << 20
"""Read into (pinned) main memory at once, to be checked there: a moment between two passes."""


class DeviceMemory(Protocol):
    """Of one device, in one process. Tensors are uint8 [num_bytes] on it.

    `name`: the same in all processes, and another one on each device.
    """

    name: str

    def new(self, num_bytes: int) -> torch.Tensor:
        """Memory that can be shared. Raises RuntimeError where there is none, naming what to choose instead."""
        ...

    def share(self, memory: torch.Tensor) -> tuple[bytes, int]:
        """(handle, offset in bytes) by which others open what `new` returned; once for each."""
        ...

    def opened(self, place: DevicePlace) -> torch.Tensor:
        """What another process shares, until the tensor is dropped. Raises OSError, ValueError or RuntimeError."""
        ...

    def fill(self, memory: torch.Tensor, bucket: np.ndarray) -> None:
        """Copy from main memory. Returns when all of it is there, for every process."""
        ...

    def read(self, memory: torch.Tensor, start: int, size: int) -> np.ndarray:
        """Bytes of it in main memory, which the next call may use again."""
        ...

    def finish(self) -> None:
        """Returns when the device has done all that this process has asked it to."""
        ...

    def free(self, memory: torch.Tensor) -> None:
        """What `new` returned, shared or not; nobody has it open."""
        ...


def device_memory(device: torch.device, folder: Path | None = None) -> DeviceMemory:
    """`folder`: for the files of a writer on a CPU, in shared memory."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory(folder)


class HostMemory:
    """Main memory, as if it were a device's: all that does not need CUDA is tried with it."""

    def __init__(self, folder: Path | None = None) -> None:
        self.name = f"CPU-{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
        self._folder = folder
        self._files: dict[int, Path] = {}
        self._num_files = 0

    def new(self, num_bytes: int) -> torch.Tensor:
        import torch

        assert self._folder is not None, "a reader makes no memory"
        path = self._folder / f"{self._num_files:05d}.device"
        self._num_files += 1
        with path.open("w+b") as file:
            if not num_bytes:
                memory = torch.empty(0, dtype=torch.uint8)
            else:
                try:
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                except OSError as error:
                    path.unlink()
                    text = f"{path.parent.parent} has no room for {num_bytes} bytes of a published version"
                    raise RuntimeError(f"{text} ({error.strerror}); enlarge it, or {INSTEAD}") from None
                memory = torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="r+", shape=(num_bytes,)))
        self._files[id(memory)] = path
        return memory

    def share(self, memory: torch.Tensor) -> tuple[bytes, int]:
        return os.fsencode(self._files[id(memory)]), 0

    def opened(self, place: DevicePlace) -> torch.Tensor:
        import torch

        if not place.num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        with open_regular(Path(os.fsdecode(place.handle))) as file:
            size = os.fstat(file.fileno()).st_size
            if size != place.num_bytes or place.offset:
                raise ValueError(f"it has {size} bytes, expected {place.num_bytes}")
            return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)

    def fill(self, memory: torch.Tensor, bucket: np.ndarray) -> None:
        np.copyto(memory.numpy(), bucket)

    def read(self, memory: torch.Tensor, start: int, size: int) -> np.ndarray:
        return memory[start : start + size].numpy()

    def finish(self) -> None:
        """A CPU's copies are done when they return."""

    def free(self, memory: torch.Tensor) -> None:
        self._files.pop(id(memory)).unlink(missing_ok=True)


class CudaMemory:
    """Of a GPU. All copies go over a stream of its own, beside what the GPU computes, and are waited for here: no event
    needs to cross, and torch would never close one that did.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        if " MIG " in torch.cuda.get_device_name(index) or os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG"):
            raise RuntimeError(
                f"param_server.transport_options.memory: got device on {torch.cuda.get_device_name(index)}, expected a "
                f"whole GPU: parts of one (MIG) cannot be told apart by their UUID; {INSTEAD}"
            )
        self.name = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        self._stream = torch.cuda.Stream(self._device)
        self._counters: dict[int, tuple[bytes, int]] = {}
        self._scratch: Any = None

    def new(self, num_bytes: int) -> torch.Tensor:
        import torch

        try:
            # Made on this stream: what another one has given back, it may still be using.
            with torch.cuda.stream(self._stream):
                return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            raise RuntimeError(
                f"{self.name} has no room for {num_bytes} bytes of a published version; lower "
                f"rollout.engine.gpu_memory_utilization, or {INSTEAD}"
            ) from None

    def share(self, memory: torch.Tensor) -> tuple[bytes, int]:
        import torch

        if not memory.nbytes:
            return b"", 0
        try:
            with torch.cuda.stream(self._stream):
                shared = memory.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.name}: its memory cannot be shared ({_first_line(error)}); take expandable_segments out of "
                f"PYTORCH_CUDA_ALLOC_CONF, or {INSTEAD}"
            ) from None
        _, handle, num_bytes, offset, counter, counter_offset, _, _ = shared
        assert num_bytes == memory.nbytes, "a bucket has a storage of its own"
        self._counters[memory.data_ptr()] = counter, counter_offset
        return handle, offset

    def opened(self, place: DevicePlace) -> torch.Tensor:
        import torch

        if not place.num_bytes:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        given = self._device.index, place.handle, place.num_bytes, place.offset
        try:
            storage = torch.UntypedStorage._new_shared_cuda(*given, NO_COUNTER, 0, bytes(EVENT_BYTES), False)
        except RuntimeError as error:
            raise RuntimeError(f"{self.name} does not open it ({_first_line(error)}); {INSTEAD}") from None
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def fill(self, memory: torch.Tensor, bucket: np.ndarray) -> None:
        import torch

        with torch.cuda.stream(self._stream):
            memory.copy_(torch.from_numpy(bucket), non_blocking=True)
        self._stream.synchronize()

    def read(self, memory: torch.Tensor, start: int, size: int) -> np.ndarray:
        import torch

        if self._scratch is None or self._scratch.nbytes < size:
            self._scratch = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        into = self._scratch[:size]
        with torch.cuda.stream(self._stream):
            into.copy_(memory[start : start + size], non_blocking=True)
        self._stream.synchronize()
        return into.numpy()

    def finish(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)

    def free(self, memory: torch.Tensor) -> None:
        """Its one count is given back here, or torch would keep the memory for a reader that never says so."""
        import torch

        if (counter := self._counters.pop(memory.data_ptr(), None)) is not None:
            torch.UntypedStorage._release_ipc_counter_cuda(*counter)


class Opened:
    """The buckets of one version, open in this process until `close`: `tensors`, uint8, on `device`.

    Raises NotKept if they are not there any more, and WeightSyncError ("transfer") for what cannot be opened.
    """

    def __init__(self, manifest: Manifest, places: Sequence[DevicePlace], device: DeviceMemory) -> None:
        self._device = device
        self.tensors: list[torch.Tensor] = []
        first = places[0]
        self._lease = Lease(Path(first.lease), first.number)
        try:
            for index, place in enumerate(places):
                self.tensors.append(self._open(manifest, index, place, f"bucket {index + 1} of {len(places)}"))
        except BaseException:
            self.close()
            raise

    def _open(self, manifest: Manifest, index: int, place: DevicePlace, what: str) -> torch.Tensor:
        if place.device != self._device.name:
            raise manifest.error(
                "transfer",
                f"{what} is in memory of {place.device}, this engine computes on {self._device.name}; {INSTEAD}",
            )
        if index >= len(manifest.bucket_bytes) or place.num_bytes != manifest.bucket_bytes[index] or place.offset < 0:
            raise manifest.error("transfer", f"{what} has {place.num_bytes} bytes, which is not what was published")
        try:
            return self._device.opened(place)
        except (OSError, ValueError, RuntimeError) as error:
            raise manifest.error("transfer", f"{what} cannot be opened: {error}") from error

    def checks(self, manifest: Manifest) -> Generator[None, None, None]:
        """Checks every byte, in main memory, some at a time. Raises WeightSyncError, or NotKept."""
        for index, memory in enumerate(self.tensors):
            read = functools.partial(self._device.read, memory)
            yield from bucket_checks(manifest, index, memory.nbytes, read, piece_bytes=PIECE_BYTES)
        self._lease.check()

    def confirm(self, manifest: Manifest) -> None:
        """After a copy of it: it was what had been checked. Raises WeightSyncError ("load")."""
        self._device.finish()
        try:
            self._lease.check()
        except NotKept as error:
            raise manifest.error(
                "load", f"it took longer than the trainer waits (cluster.step_timeout_s): {error}"
            ) from None

    def close(self) -> None:
        """The memory first, then the lease: nobody may free what is still open somewhere."""
        if self.tensors:
            self._device.finish()
        self.tensors = []
        self._lease.end()


def places_to_json(places: Sequence[DevicePlace]) -> str:
    return json.dumps([asdict(place) | {"handle": place.handle.hex()} for place in places])


def places_from_json(text: str) -> list[DevicePlace]:
    """The inverse of `places_to_json`. Raises ValueError for anything else, which runs nothing."""
    kinds: dict[str, Callable[[Any], Any]] = {name: str for name in ("device", "handle", "lease")}
    kinds |= {name: int for name in ("num_bytes", "offset", "number")}
    try:
        places = []
        for given in json.loads(text):
            if given.keys() != kinds.keys() or any(type(given[name]) is not kind for name, kind in kinds.items()):
                raise TypeError(f"got {given!r:.80}")
            places.append(DevicePlace(**given | {"handle": bytes.fromhex(given["handle"])}))
    except (AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"not a list of buckets on a device: {error}") from None
    return places


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
