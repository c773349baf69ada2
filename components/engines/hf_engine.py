"""A small engine on transformers: a thread of its collector's process, no other process, nothing to compile.

    event loop  --generate, pause, load-->  commands  -->  [ commands | admit, prefill | one pass | finish ]  thread
                <--tokens, progress------------------------------------------------------------------------

Requests join and leave between two passes, and so do weights. Sequences that are the same so far, as the answers to one
prompt are at first, are one row of a pass, until they draw different tokens. With adapters, several versions are there
at once, and a request keeps the one that it was made for: nothing pauses, and no cache is read again. A sequence draws
each token with a number of its own generator, so that its tokens are a function of (weights, prompt, seed).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ..collector.clock import RolloutClock
from ..collector.engine import EngineLost, EngineSettings, Heard, LoadTimes, SampledTokens, StagedWeights
from ..collector.progress import Progress, Sampled
from ..config.engines import HfOptions
from ..failures import Refused
from ..transports.shared_memory import mapped
from ..transports.transport import DevicePlace, Place
from ..weights import Canary, CanaryGap, Manifest
from .hf_beginnings import Beginnings
from .hf_cache import BLOCK, num_blocks
from .hf_conversations import Conversation, Conversations
from .hf_decode import Decoder, load_decoder
from .hf_lora import Adapters
from .hf_reading import Reader
from .hf_sampling import Drawn, Sampling, sample
from .hf_sequences import Generation, Request, completions, rows_of
from .hf_threads import PassThreads
from .hf_weights import ModelTensors, OpenedHere, load, read_back
from .released import Released
from .slices import Slices

logger = logging.getLogger(__name__)

T = TypeVar("T")
CLOSE_S = 10.0


class HfEngine:
    """See `collector.engine.Engine`. Complete when it is made: the model is loaded and proven, and the thread waits."""

    @classmethod
    async def start(cls, settings: EngineSettings) -> HfEngine:
        return await asyncio.to_thread(cls, settings)

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._seeds = random.Random(settings.seed)
        self._version = -1 if settings.initial_version is None else settings.initial_version
        self._waiting: deque[Generation] = deque()
        self._held: list[Request] = []
        self._running: list[Generation] = []
        self._ending: list[Generation] = []
        """Of the last pass, until their requests are answered."""
        self._conversations = Conversations()
        self._drained: Future[None] | None = None
        self._paused = False
        self._cache_is_old = False
        self._released = Released()
        self._spare: list[np.ndarray] = []
        self._filled: set[str] = set()  # names of memory that all of a version is in
        self._closing = False
        self._death: EngineLost | None = None
        self.progress = Progress()
        self.places = HfOptions(**settings.options).places
        self._thread = threading.Thread(target=self._work, daemon=True, name="leeway-engine")
        ready: Future[tuple[Decoder, ModelTensors, int]] = Future()
        self._commands.put(functools.partial(_answer, ready, self._load_model))
        self._thread.start()
        try:
            self._decoder, self._tensors, self.cache_tokens = ready.result()
            self._adapters = self._decoder.adapters
            self._beginnings = Beginnings(self.cache_tokens // BLOCK // 16)
            self._reader = Reader(self._decoder, self._beginnings)
        except BaseException:
            self._commands.put(self._close)
            raise
        if self.cache_tokens < settings.max_model_len:
            self.shutdown()
            raise Refused(
                f"cluster.kv_cache_gib: got {settings.kv_cache_gib:g}, which holds {self.cache_tokens} tokens of this "
                f"model, expected room for rollout.max_model_len {settings.max_model_len}; raise it"
            )

    # ------------------------------------------------------------------------------------- from the event loop

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        *,
        n: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        seed: int | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        min_tokens: int = 0,
        clock: RolloutClock | None = None,
        heard: Heard | None = None,
        version: int | None = None,
    ) -> list[SampledTokens]:
        room = self._settings.max_model_len - len(prompt_tokens)
        if not prompt_tokens or room < 1:
            raise ValueError(
                f"prompt of {len(prompt_tokens)} tokens; rollout.max_model_len is {room + len(prompt_tokens)}"
            )
        request = Request(
            id=str(next(self._ids)),
            prompt=list(prompt_tokens),
            sampling=Sampling(temperature, top_p, top_k),
            min_tokens=min_tokens,
            max_tokens=min(max_tokens, room),
            stop=frozenset(stop_token_ids),
            loop=asyncio.get_running_loop(),
            heard=heard,
            version=version,
            is_seeded=seed is not None,
            rollout=clock,
        )
        first = self._seeds.getrandbits(62) if seed is None else seed
        num_sampled = n if temperature else 1
        request.sequences = [
            Generation(
                request,
                i,
                random.Random(first + i),
                list(prompt_tokens),
                len(prompt_tokens) + request.max_tokens,
                begin=len(prompt_tokens),
            )
            for i in range(num_sampled)
        ]
        with self.progress.request(
            request.id, num_sequences=num_sampled, prompt_tokens=len(prompt_tokens), clock=clock
        ):
            self._put(functools.partial(self._accept, request))
            try:
                completions = await asyncio.wrap_future(request.answer)
            except asyncio.CancelledError:
                self._commands.put(functools.partial(self._abort, request))
                raise
        return completions if temperature else completions * n  # greedy: n times the same, sampled once

    async def score(self, canary: Canary, *, version: int | None = None) -> CanaryGap:
        with self.progress.call():
            return await self._call(functools.partial(self._score, canary, version))

    def stage(self, manifest: Manifest, places: Sequence[Place] = ()) -> StagedWeights:
        if on_device := [place for place in places if isinstance(place, DevicePlace)]:
            opened = OpenedHere(manifest, on_device, self._decoder.device)
            return StagedWeights(manifest, [], opened.close, opened=opened)
        if places:
            return StagedWeights(manifest, [mapped(place) for place in places if isinstance(place, Path)])
        # To make new pages takes longer than to copy into them.
        spare, self._spare = self._spare, []
        if [bucket.nbytes for bucket in spare] != list(manifest.bucket_bytes):
            spare = [np.empty(num_bytes, dtype=np.uint8) for num_bytes in manifest.bucket_bytes]
        name = str(next(self._ids))
        return StagedWeights(manifest, spare, functools.partial(self._leave, spare, name), name)

    def _leave(self, buckets: list[np.ndarray], name: str) -> None:
        """To the next version; but what was never loaded may still be written by a fetch that was given up."""
        was_filled = name in self._filled
        self._filled.discard(name)
        if was_filled and not self._paused:  # else it sleeps, and makes room, or its load failed
            self._spare = buckets

    async def load_weights(
        self,
        staged: StagedWeights,
        *,
        in_flight: str,
        paused: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> LoadTimes:
        started = time.monotonic()
        if self._adapters is not None:
            await asyncio.to_thread(self._adapters.load, staged)
            return LoadTimes(drain_s=0.0, pause_s=0.0, ahead_s=time.monotonic() - started)
        with self.progress.call():
            await asyncio.wrap_future(await self._call(functools.partial(self._pause, in_flight == "off")))
        self.progress.pause()
        stopped = time.monotonic()
        with paused():
            with self.progress.call():
                await self._call(functools.partial(self._load_staged, staged, in_flight))
            self.progress.resume()
        return LoadTimes(drain_s=stopped - started, pause_s=time.monotonic() - stopped)

    async def drop(self, version: int) -> None:
        """Between two passes, like everything that changes what a pass may use."""
        with self.progress.call():
            await self._call(functools.partial(self._drop, version))

    async def sleep(self, *, in_flight: str) -> int:
        with self.progress.call():
            await asyncio.wrap_future(await self._call(functools.partial(self._pause, in_flight == "off")))
            released = await self._call(self._release)
        self.progress.pause()
        return released

    async def read_back(self, staged: StagedWeights) -> None:
        """Some tensors between two passes, so that generation continues; adapters beside them."""
        if not self._settings.read_back:
            return
        if self._adapters is not None:
            return await asyncio.to_thread(self._adapters.read_back, staged)
        reading, done = Slices(read_back(staged, self._tensors)), False
        while not done:
            with self.progress.call():
                done = await self._call(reading.go_on)

    def process_ids(self) -> list[int]:
        return []

    def shutdown(self) -> None:
        self._commands.put(self._close)
        self._thread.join(CLOSE_S)

    async def _call(self, work: Callable[[], T]) -> T:
        """Have the thread do something between two passes."""
        answer: Future[T] = Future()
        self._put(functools.partial(_answer, answer, work))
        return await asyncio.wrap_future(answer)

    def _put(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        if not self._thread.is_alive() and self._death is not None:  # no call is there to see it
            raise self._death

    # --------------------------------------------------------------------------------------------- in the thread

    def _work(self) -> None:
        with torch.inference_mode(), ExitStack() as stack:
            try:
                if self._settings.cores:
                    os.sched_setaffinity(0, self._settings.cores)
                    torch.set_num_threads(len(self._settings.cores))
                number = torch.get_num_threads() if self._settings.device == "cpu" else 1
                self._pass_threads = stack.enter_context(PassThreads(number))
            except Exception as error:
                self._fail(error)
            while not self._closing:
                try:
                    command = self._commands.get(block=self._is_idle())
                except queue.Empty:
                    command = self._pass
                try:
                    command()
                except Exception as error:
                    self._fail(error)
            while not self._commands.empty():  # calls that came in meanwhile are answered too
                self._commands.get()()

    def _fail(self, error: Exception) -> None:
        """What it was dead of first is what everybody is told."""
        logger.error("the engine's thread failed", exc_info=error)
        if self._death is None:
            self._die(EngineLost(f"the inference engine died: {type(error).__name__}: {error}"))

    def _is_idle(self) -> bool:
        return self._paused or self._death is not None or not (self._running or self._waiting)

    def _load_model(self) -> tuple[Decoder, ModelTensors, int]:
        s = self._settings
        if self._death is not None:
            raise self._death
        with torch.inference_mode(False):
            decoder = load_decoder(
                s.model_path,
                max_length=s.max_model_len,
                device=torch.device(s.device),
                dtype=getattr(torch, s.dtype),
                head_dtype=None if s.head_dtype is None else getattr(torch, s.head_dtype),
                threads=self._pass_threads,
            )
        decoder.free(decoder.prefill([[0]]))
        if s.lora is not None:
            with torch.inference_mode(False):
                decoder.adapters = Adapters(decoder.model.lm, s.lora, dtype=getattr(torch, s.dtype))
        memory = s.kv_cache_gib * 2**30 if s.device == "cpu" else torch.cuda.mem_get_info()[0] / 2
        return decoder, ModelTensors(decoder.model.lm), int(memory / decoder.bytes_per_token)

    def _accept(self, request: Request) -> None:
        if self._death is not None:
            _answer(request.answer, functools.partial(_raise, self._death))
        elif self._adapters is not None and request.version not in self._adapters:
            absent = RuntimeError(
                f"the engine was asked for tokens of version {request.version}, which it does not hold"
            )
            _answer(request.answer, functools.partial(_raise, absent))
        elif self._adapters is None and self._version < 0:
            unready = RuntimeError("the engine was asked for tokens before it had any weights")
            _answer(request.answer, functools.partial(_raise, unready))
        elif self._drained is not None:
            self._held.append(request)
        else:
            self._waiting.extend(request.sequences)

    def _abort(self, request: Request) -> None:
        self._held = [r for r in self._held if r is not request]
        self._waiting = deque(s for s in self._waiting if s.request is not request)
        self._end([s for s in self._running if s.request is request])
        self._note_drained()

    def _drop(self, version: int) -> None:
        """The rollouts of what is still of it have ended, though the news of that may come after this."""
        assert self._adapters is not None
        left = {s.request.id: s.request for s in (*self._running, *self._waiting) if s.request.version == version}
        for request in left.values():
            self._abort(request)
            _answer(request.answer, functools.partial(_raise, RuntimeError(f"version {version} was dropped")))
        self._decoder.free([*self._conversations.drop(version), *self._beginnings.drop(version)])
        self._adapters.drop(version)

    def _pause(self, drain: bool) -> Future[None]:
        """The answer comes when the engine stands still: at once, or when all that it has was finished (`drain`)."""
        still: Future[None] = Future()
        if self._death is not None:
            raise self._death
        if drain and not self._paused:
            self._drained = still
            self._note_drained()
        else:
            self._paused = True
            still.set_result(None)
        return still

    def _note_drained(self) -> None:
        if self._drained is not None and not self._paused and not self._running and not self._waiting:
            self._paused = True
            if self._drained.set_running_or_notify_cancel():  # else nobody waits for it any more
                self._drained.set_result(None)

    def _release(self) -> int:
        cache_bytes = self._decoder.forget()
        self._conversations = Conversations()
        self._beginnings.clear()
        self._cache_is_old = True
        self._spare = []
        if self._settings.sleep_level == 2:
            self._released.release(self._decoder.model.parameters())
        if self._decoder.device.type == "cuda":
            torch.cuda.empty_cache()  # else it is this process's still
        return cache_bytes + self._released.num_bytes

    def _load_staged(self, staged: StagedWeights, in_flight: str) -> None:
        self._released.reclaim()
        self._decoder.weights_change()
        self._filled.add(staged.name)
        load(staged, self._tensors)
        self._version = staged.manifest.policy_version
        self._cache_is_old = self._cache_is_old or in_flight != "keep"
        for s in self._running:
            s.is_mixed = not self._cache_is_old
        self._decoder.free([*self._conversations.drop(None), *self._beginnings.drop(None)])
        self._drained, self._paused = None, False
        for request in self._held:
            self._waiting.extend(request.sequences)
        self._held = []

    def _pass(self) -> None:
        if self._cache_is_old:
            self._decoder.clear()
            self._beginnings.clear()
            for s in self._running:
                # The prompt is a part of its own: the answers to it have it alike.
                asked = len(s.request.prompt)
                s.turns = [(asked, asked)] if len(s.tokens) > asked else []
                s.row, s.num_held, s.begin = None, 0, len(s.tokens)
            self._cache_is_old = False
        self._admit()
        self._reader.read(self._running)
        shared = self._reader.parted(self._running, lambda s: s.tokens[s.num_held])
        firsts = [own[0] for own in shared]
        drawn = self._decoder.step(
            rows_of(firsts),
            [s.tokens[s.num_held] for s in firsts],
            [s.num_held for s in firsts],
            [s.request.version for s in firsts],
            then=functools.partial(self._drawn, shared),
        )
        passed: dict[asyncio.AbstractEventLoop, list[Sampled]] = {}
        news: dict[asyncio.AbstractEventLoop, list[functools.partial[None]]] = {}
        running = list(itertools.chain(*shared))
        for s, draw in zip(running, itertools.chain(*drawn), strict=True):
            s.num_held += 1
            sampled = passed.setdefault(s.request.loop, [])
            if draw is None:
                continue
            token, logprob, kept = draw
            version = self._version if s.request.version is None else s.request.version
            s.tokens.append(token)
            if s.request.sampling.top_k:
                s.kept.append(kept)
            s.logprobs.append(logprob)
            s.versions.append(version)
            if token in s.request.stop:
                s.finish_reason = "stop"
            elif len(s.tokens) >= s.num_wanted:
                s.finish_reason = "length"
            sampled.append(Sampled(s.request.id, f"{s.request.id}-{s.index}", 1, bool(s.finish_reason)))
            if s.request.heard is not None:
                heard = functools.partial(s.request.heard, s.index, [token], [logprob], version)
                news.setdefault(s.request.loop, []).append(heard)
        for loop, sampled in passed.items():
            news.setdefault(loop, []).append(functools.partial(self.progress.passed, time.monotonic(), sampled))
        for loop, calls in news.items():
            _tell(loop, calls)
        ended = self._ending = [s for s in running if s.finish_reason]
        self._end(ended, may_go_on=True)
        for request in {s.request.id: s.request for s in ended}.values():
            if all(s.finish_reason for s in request.sequences):
                _answer(request.answer, functools.partial(completions, request))
        self._ending = []
        self._note_drained()

    def _admit(self) -> None:
        """Begin what waits, in order, while there are places, and memory for all that it may become."""
        begun: list[Generation] = []
        held = self._beginnings.num_blocks + sum(num_blocks(s.num_wanted) for s in self._running)
        while self._waiting and (num_rows := len(self._running) + len(begun)) < self.places:
            held += num_blocks(self._waiting[0].num_wanted)
            if num_rows and held * BLOCK > self.cache_tokens:
                break
            begun.append(self._waiting.popleft())
        if not begun:
            return
        for s in begun:
            if len(s.request.sequences) == 1:
                self._go_on(s)
        self._running += begun
        self._make_room()

    def _go_on(self, s: Generation) -> None:
        """With what is there of the conversation that its prompt goes on from."""
        conversation = self._conversations.taken(s.tokens, s.request.version, s.request.rollout)
        if conversation is None:
            return
        if conversation.row is not None:
            s.row, s.num_held = conversation.row, conversation.turns[-1][1] - 1
        if s.row is not None or s.request.is_seeded:
            s.turns = conversation.turns

    def _make_room(self) -> None:
        """For what passes may need, from the conversations that wait."""
        room = self._decoder.room_aside(self.cache_tokens // BLOCK, self._beginnings.num_blocks)
        self._decoder.free(self._conversations.make_room(room))

    def _drawn(
        self, shared: list[list[Generation]], logits: torch.Tensor, places: Sequence[int]
    ) -> list[list[Drawn | None]]:
        """Tokens for the sequences of these rows: none for those whose next token is known."""
        rows: list[int] = []
        wanted: list[list[Generation]] = []  # of each of these rows, those that draw alike
        for row, place in enumerate(places):
            for same in _alike([s for s in shared[place] if s.num_held == len(s.tokens) - 1]):
                rows.append(row)
                wanted.append(same)
        drawn: dict[Generation, Drawn] = {}
        if wanted:
            sampled = sample(
                logits if rows == list(range(len(places))) else logits[rows],
                [same[0].request.sampling for same in wanted],
                [[s.draw.random() for s in same] for same in wanted],
                barred=[same[0].barred for same in wanted],
                scale=self._decoder.model.transform.scale,
            )
            for same, draws in zip(wanted, sampled, strict=True):
                drawn.update(zip(same, draws, strict=True))
        return [[drawn.get(s) for s in shared[place]] for place in places]

    def _end(self, sequences: list[Generation], *, may_go_on: bool = False) -> None:
        """They do not run any more. Conversations may go on from what is all of one version."""
        ended = set(map(id, sequences))
        self._running = [s for s in self._running if id(s) not in ended]
        alone = [s for s in sequences if may_go_on and len(s.request.sequences) == 1 and not s.is_mixed]
        kept = set(rows_of(self._running))
        shared = []
        for s in alone:  # a conversation has a row of its own
            if s.row in kept:
                shared.append(s)
            kept.update(rows_of([s]))
        for s, row in zip(shared, self._decoder.copy(rows_of(shared)), strict=True):
            s.row = row
        self._decoder.free(list(set(rows_of(sequences)) - kept - set(rows_of(alone))))
        self._decoder.set_aside(rows_of(alone))
        for s in alone:
            turns = [*s.turns, (s.begin, len(s.tokens))]
            conversation = Conversation(turns, s.row, s.request.is_seeded, s.request.rollout)
            self._decoder.free(self._conversations.keep(s.tokens, conversation, s.request.version))
        self._make_room()

    def _score(self, canary: Canary, version: int | None) -> CanaryGap:
        # With a cache of its own: requests continue afterwards.
        decoder = self._decoder.beside()
        scored = decoder.score(canary.prompts.scored, version)
        gaps = [
            abs(a - b)
            for got, want in zip(scored, canary.logprobs, strict=True)
            for a, b in zip(got, want, strict=True)
        ]
        contexts = canary.prompts.cached
        if not contexts:
            return CanaryGap.of(gaps, [])
        versions = [version] * len(contexts)
        logprobs = decoder.step(
            decoder.prefill([c[:-1] for c in contexts], versions),
            [c[-1] for c in contexts],
            [len(c) - 1 for c in contexts],
            versions,
            then=lambda logits, _: list(torch.log_softmax(logits * decoder.model.transform.scale, dim=-1)),
        )
        got = [float(row[token]) for row, token in zip(logprobs, canary.next_tokens, strict=True)]
        return CanaryGap.of(gaps, [abs(a - b) for a, b in zip(got, canary.next_logprobs, strict=True)])

    def _close(self) -> None:
        self._die(EngineLost("the inference engine was shut down"))
        self._closing = True

    def _die(self, death: EngineLost) -> None:
        """Nothing is generated any more; every waiting call is told why."""
        self._death = death
        requests = {s.request.id: s.request for s in [*self._running, *self._waiting, *self._ending]}
        requests |= {request.id: request for request in self._held}
        self._running, self._waiting, self._held, self._ending = [], deque(), [], []
        for request in requests.values():
            if not request.answer.done():
                _answer(request.answer, functools.partial(_raise, death))
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(death)


def _alike(sequences: list[Generation]) -> Iterable[list[Generation]]:
    """Those of one row, in parts whose next token is drawn from the same."""
    if len(sequences) < 2:
        return [sequences] if sequences else []
    parts: dict[tuple[Sampling, frozenset[int]], list[Generation]] = {}
    for s in sequences:
        parts.setdefault((s.request.sampling, s.barred), []).append(s)
    return parts.values()


def _answer(answer: Future[T], work: Callable[[], T]) -> None:
    """Give `answer` what `work` returns or raises; nothing where nobody waits any more."""
    if not answer.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except Exception as error:
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _raise(error: Exception) -> Any:
    raise error


def _tell(loop: asyncio.AbstractEventLoop, calls: Sequence[Callable[[], None]]) -> None:
    """Have the loop make these calls. It is woken up once: that is a system call."""
    try:
        loop.call_soon_threadsafe(_call_soon, loop, calls)
    except RuntimeError:  # the loop was closed: nobody listens
        if not loop.is_closed():
            raise


def _call_soon(loop: asyncio.AbstractEventLoop, calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:  # each on its own: one that fails is reported, and the others are made
        loop.call_soon(call)
