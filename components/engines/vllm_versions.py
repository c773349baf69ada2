"""The adapters that vLLM's process holds, by policy version, and the requests that are under way under each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def engine_arguments(*, slot_rank: int, num_versions: int, targets: list[str]) -> dict[str, Any]:
    """What vLLM is started with. `slot_rank`: see `EngineOptions`.

    `targets`: modules that get an adapter, by the names of the model's files.
    """
    return dict(
        load_format="safetensors",  # weights are never unpickled
        enable_lora=True,
        max_loras=num_versions,
        max_cpu_loras=num_versions,
        max_lora_rank=slot_rank,
        lora_target_modules=sorted({name.rpartition(".")[2] for name in targets}),
    )


class Versions:
    """`new_request`: of vLLM's name, id and folder of an adapter."""

    def __init__(self, new_request: Callable[[str, int, str], Any]) -> None:
        self._new_request = new_request
        self._num_loads = 0
        self._held: dict[int, Any] = {}
        self._under_way: dict[int, set[str]] = {}

    def __contains__(self, version: int | None) -> bool:
        return version in self._held

    def next_request(self, version: int) -> Any:
        """For the next load of `version`, under a name and an id that no load had before.

        vLLM finds its prefix cache by the name: a version that is loaded again, after a load that went wrong or in
        another run, meets no old keys and values.
        """
        self._num_loads += 1
        name = f"{version}/{self._num_loads}"
        return self._new_request(name, self._num_loads, name)  # it has no folder, and vLLM never looks there

    def hold(self, version: int, request: Any) -> None:
        self._held[version] = request

    @contextmanager
    def under(self, version: int | None, request_id: str) -> Iterator[Any]:
        """Around a request: what it must say to vLLM. Raises RuntimeError for a version that is not held, or that was
        dropped before the request ended.
        """
        if version not in self._held:
            raise RuntimeError(f"the engine was asked for tokens of version {version}, which it does not hold")
        held, under_way = self._held[version], self._under_way.setdefault(version, set())
        under_way.add(request_id)
        try:
            yield held
        finally:
            under_way.discard(request_id)
        if self._held.get(version) is not held:
            raise RuntimeError(f"version {version} was dropped")

    def drop(self, version: int) -> tuple[int | None, list[str]]:
        """(vLLM's id of it, None if it is not held; the requests that are left of it)."""
        held = self._held.pop(version, None)
        left = self._under_way.pop(version, set())
        return (None if held is None else held.lora_int_id), sorted(left)
