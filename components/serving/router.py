"""Which engine answers a request: the one that has read its prompt's beginning before, unless that is far busier."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ..collector.engine import SampledTokens
from ..collector.open_requests import Piece

BLOCK = 16
"""Tokens that are remembered together; engines keep the keys and values of whole blocks."""
MAX_BLOCKS = 2**16
SLACK = 8
"""Sequences. An engine with up to twice as many as the least busy one, and these, is not far busier."""


class EngineGone(RuntimeError):
    """The engine was lost before it had answered."""


class ServedEngine(Protocol):
    """One engine behind the address, wherever it runs. See `collector.open_requests`; all raise `EngineGone`."""

    @property
    def name(self) -> str: ...

    @property
    def is_up(self) -> bool: ...

    async def sample(
        self, name: str, prompt_tokens: list[int], *, listens: bool, **sampling: object
    ) -> list[SampledTokens] | None: ...

    async def heard(self, name: str, *, within_s: float) -> list[Piece]: ...

    async def end(self, name: str) -> None: ...


class Router:
    """`engines`: those that there are at the moment."""

    def __init__(self, engines: Callable[[], Sequence[ServedEngine]]) -> None:
        self._engines = engines
        self._num_sequences: Counter[str] = Counter()
        self._readers: OrderedDict[int, str] = OrderedDict()  # a prompt's beginning -> who read it last

    def engines(self) -> list[tuple[ServedEngine, int]]:
        """Each with the number of sequences that it works on."""
        return [(engine, self._num_sequences[engine.name]) for engine in self._engines()]

    @contextmanager
    def engine_for(self, prompt_tokens: Sequence[int], num_sequences: int) -> Iterator[ServedEngine | None]:
        """The engine to ask; it counts as busy until the end of the context. None: none is up now."""
        engine = self._chosen(prompt_tokens)
        if engine is None:
            yield None
            return
        self._num_sequences[engine.name] += num_sequences
        try:
            yield engine
        finally:
            self._num_sequences[engine.name] -= num_sequences
            if not self._num_sequences[engine.name]:
                del self._num_sequences[engine.name]

    def _chosen(self, prompt_tokens: Sequence[int]) -> ServedEngine | None:
        up = {engine.name: engine for engine in self._engines() if engine.is_up}
        if not up:
            return None
        loads = {name: self._num_sequences[name] for name in up}
        chosen = min(loads, key=lambda name: loads[name])
        beginnings = list(_beginnings(prompt_tokens))
        reader = next((r for b in reversed(beginnings) if (r := self._readers.get(b)) is not None), None)
        if reader in up and loads[reader] <= 2 * loads[chosen] + SLACK:
            chosen = reader
        for beginning in beginnings:
            self._readers[beginning] = chosen
            self._readers.move_to_end(beginning)
        while len(self._readers) > MAX_BLOCKS:
            self._readers.popitem(last=False)
        return up[chosen]


def _beginnings(prompt_tokens: Sequence[int]) -> Iterator[int]:
    """A number for each beginning of the prompt that is a whole number of blocks long."""
    before = 0
    for start in range(0, len(prompt_tokens) - BLOCK + 1, BLOCK):
        before = hash((before, *prompt_tokens[start : start + BLOCK]))
        yield before
