"""Passes of one model on several threads, each with rows of its own.

    rows 0 to 15 of a pass   -> one thread, one core
    rows 16 to 31            -> another

torch would give every matrix product all threads instead. Then which thread computes a row, and so how it rounds,
depends on how many rows there are: a seed would no longer decide a sequence's tokens and logprobs to the last bit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from ..trainer.scoring import head_forward, output_head

T = TypeVar("T")
START_S = 60.0


class PassThreads:
    """`number` threads, on the cores of the thread that makes this, and works with them: it is the first of them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._pool = None
        if number > 1:
            self._pool = ThreadPoolExecutor(number - 1, thread_name_prefix="leeway-pass")
            started = threading.Barrier(number - 1, timeout=START_S)
            for ready in [self._pool.submit(_on_one_core, started) for _ in range(number - 1)]:
                ready.result()
            torch.set_num_threads(number)  # of the threads that have none yet: the last number that was set is theirs

    def run(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """What they return, in their order; raises what one of them raised, once all have ended."""
        if self._pool is None:
            return [work() for work in works]
        left = iter(enumerate(works))
        # The first one is not for another thread, even if it is the only one: what the last pass left in this core's
        # cache is of use.
        first = [next(left)] if works else []
        others = [self._pool.submit(_done, left) for _ in range(min(self.number, len(works)) - 1)]
        torch.set_num_threads(1)
        try:
            done = dict(_done(itertools.chain(first, left)))
        finally:
            torch.set_num_threads(self.number)
            wait(others)
        for other in others:
            done.update(other.result())
        return [done[i] for i in range(len(works))]

    def __enter__(self) -> PassThreads:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _on_one_core(started: threading.Barrier) -> None:
    torch.get_num_threads()  # or else torch gives this thread the number of another one when it first computes
    torch.set_num_threads(1)
    started.wait()


def _done(works: Iterable[tuple[int, Callable[[], T]]]) -> list[tuple[int, T]]:
    with torch.inference_mode():  # a mode of each thread
        return [(i, work()) for i, work in works]


class HeadInputs(threading.local):
    """The hidden states that enter a model's output head, in each of the threads that compute with it."""

    _is_wanted = False
    _hidden: torch.Tensor | None = None

    @contextmanager
    def of(self, lm: nn.Module) -> Iterator[None]:
        """Around `taken`, in whatever thread that is called."""
        head = output_head(lm)  # type: ignore[arg-type]
        own = type(head).forward

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            if not self._is_wanted:
                return own(head, hidden)
            self._hidden = hidden
            return hidden[..., :1]  # stands for logits, of a vocabulary of one

        with head_forward(head, forward):
            yield

    def taken(self, call: Callable[[], object]) -> torch.Tensor:
        """The hidden states [B, T, D] of `call`, a pass of the model whose head then does nothing."""
        self._is_wanted = True
        try:
            call()
        finally:
            self._is_wanted = False
        assert self._hidden is not None
        hidden, self._hidden = self._hidden, None
        return hidden
