"""What engine `hf` was asked for, and the completions of it that are under way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..collector.engine import Heard, SampledTokens
from .hf_cache import Row
from .hf_conversations import Turn
from .hf_sampling import Sampling

NOTHING: frozenset[int] = frozenset()


@dataclass
class Request:
    id: str
    prompt: list[int]
    sampling: Sampling
    min_tokens: int
    max_tokens: int
    stop: frozenset[int]
    loop: asyncio.AbstractEventLoop
    heard: Heard | None = None
    version: int | None = None
    is_seeded: bool = False
    rollout: object = None
    answer: Future[list[SampledTokens]] = field(default_factory=Future)
    sequences: list[Generation] = field(default_factory=list)


@dataclass(eq=False)
class Generation:
    """One completion under way. `tokens`: prompt and response; `num_wanted`: their number at the most.

    `num_held`: tokens whose keys and values `row` has. `begin`: tokens that there were when the answer began, or when
    all was read anew. `turns`: of a conversation, those before, as they are to be computed, or were. `is_mixed`: it
    has keys and values of two versions.
    """

    request: Request
    index: int
    draw: random.Random
    tokens: list[int]
    num_wanted: int
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    finish_reason: str = ""
    row: Row | None = None  # while it is running
    num_held: int = 0
    begin: int = 0
    turns: list[Turn] = field(default_factory=list)
    is_mixed: bool = False

    @property
    def barred(self) -> frozenset[int]:
        """What its next token may not be."""
        return self.request.stop if len(self.logprobs) < self.request.min_tokens else NOTHING

    @property
    def read_end(self) -> int:
        """Up to where tokens are read, for those held now: from there on they go through one pass each."""
        return next((begin for begin, end in self.turns if self.num_held < end - 1), self.begin) - 1


def rows_of(sequences: Iterable[Generation]) -> list[Row]:
    return [s.row for s in sequences if s.row is not None]


def completions(request: Request) -> list[SampledTokens]:
    start = len(request.prompt)
    return [
        SampledTokens(
            s.tokens[start:],
            s.logprobs,
            s.versions,
            s.finish_reason,
            kept=s.kept if request.sampling.top_k else None,
            barred=sorted(request.stop) if request.min_tokens else (),
        )
        for s in request.sequences
    ]
