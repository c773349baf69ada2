"""The run as events: what starts when, what it waits for, and which version sampled each token.

    admit (AdmissionRule) -> engine [queue, decoding] -> environment -> withheld until verified -> put -> take -> train
       ^                        ^ pull: pause, load, canary                                                      |
       +------ published <------+-------------------------------- upload <---------- gather <--------------------+

Each function below is one event and mirrors one wait of the system: `recipes/async_rl.py` (trainer, publishing),
`collector/collector.py` and `hand_over.py` (admission, floors, pulls), `replay/buffer.py` (takes). Time is only ever
moved by the heap; nothing here is random except the lengths and factors, which are drawn by group and step number, so
that two plans differ by their settings alone.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .engine import Chunk, SimulatedEngine
from .model import Calibration, Settings
from .order import TakeOrder

_BLOCK = 512
"""Groups whose lengths are drawn at a time."""


class _Group:
    __slots__ = ("collector", "environment_s", "floor", "group_id", "newest", "open_chunks", "tokens", "versions")

    def __init__(self, group_id: int, floor: int, collector: _Collector) -> None:
        self.group_id = group_id
        self.floor = floor
        self.collector = collector
        self.tokens = 0.0
        self.newest = 0
        self.open_chunks = 0
        self.environment_s = 0.0
        self.versions: dict[int, float] = {}


class _Collector:
    """One engine with what its collector and its hand-over remember."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.in_flight = 0
        self.asked = 0  # groups asked for by the admission that is open; 0: none is
        self.verified = 0
        self.wanted = 0
        self.pulling: int | None = None  # the version that is being taken over
        self.loading = False  # paused, or waiting for the pause
        self.waiting: list[_Group] = []  # for weights of their floor
        self.withheld: list[_Group] = []
        self.generating_s = 0.0
        self.changed_at = 0.0


@dataclass
class Record:
    """What was seen, from `started_at` on; seconds."""

    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    lag_tokens: dict[int, float] = field(default_factory=dict)
    started_at: float = 0.0
    ended_at: float = 0.0
    first_step: int = 0
    train_s: float = 0.0
    engine_busy_s: float = 0.0
    generating_s: float = 0.0
    num_events: int = 0
    num_groups: int = 0


class Simulation:
    """`run()` plays `num_steps` optimizer steps; the first `skip` of them are not recorded."""

    def __init__(
        self,
        calibration: Calibration,
        settings: Settings,
        *,
        num_steps: int,
        skip: int,
        chunks_per_group: int = 4,
        seed: int = 0,
    ) -> None:
        self._c = calibration
        self._s = settings
        self._num_steps = num_steps
        self._skip = skip
        self._rule = settings.rule
        self._order = TakeOrder(self._rule)
        self._cuts = _cuts(settings.group_size, chunks_per_group)
        self._seed = seed
        self._lengths: list[list[float]] = []
        self._environment_s: list[float] = []
        self._factors = np.random.default_rng((seed, 1)).choice(
            np.asarray(calibration.train_factors), size=num_steps + 1
        )
        limit = max(1, -(-settings.max_outstanding_groups // settings.generators))
        self._max_in_flight = limit
        keep = calibration.kept_frac  # filtered groups are generated as well, and nothing comes of them
        self._collectors = [
            _Collector(
                SimulatedEngine(
                    pass_s=calibration.pass_s / keep,
                    token_s=calibration.token_s / keep,
                    max_sequences=calibration.max_sequences,
                )
            )
            for _ in range(settings.generators)
        ]
        self._asking = deque(self._collectors)
        for collector in self._collectors:
            collector.asked = limit
        self._groups: dict[int, _Group] = {}
        self._heap: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._num_pushed = 0
        self._published = 0
        self._version = 0
        self._take_is_wanted = True
        self._take: list[int] | None = None
        self._trainer_waits_since: float | None = 0.0
        self._training = False
        self._uploading = False
        self._after_upload: Callable[[], None] | None = None
        self._last_end = 0.0
        self._now = 0.0
        self.record = Record()

    def run(self) -> Record:
        self._admit()
        if self._skip == 0:
            self._start_recording()
        while self._heap and self._version < self._num_steps:
            self._now, _, function, arguments = heapq.heappop(self._heap)
            self.record.num_events += 1
            function(*arguments)
        assert self._version >= self._num_steps, "the simulated run stands still"
        self._stop_recording()
        return self.record

    # ---- admission and engines ---------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Collectors are served in the order in which they asked, each with as many groups as it asked for."""
        free = self._order.num_free_slots(published=self._published)
        while free and self._asking:
            collector = self._asking.popleft()
            count = min(free, collector.asked)
            free -= count
            collector.asked = 0
            self._set_in_flight(collector, collector.in_flight + count)
            for _ in range(count):
                group_id, floor = self._order.admit()
                group = self._groups[group_id] = _Group(group_id, floor, collector)
                if collector.verified >= floor:
                    self._submit(group)
                else:
                    collector.waiting.append(group)
                    collector.wanted = max(collector.wanted, floor)
            self._ask(collector)
            self._reschedule(collector)
            if collector.waiting:
                self._pull(collector)

    def _ask(self, collector: _Collector) -> None:
        room = self._max_in_flight - collector.in_flight
        if not collector.asked and room > 0:
            collector.asked = room
            self._asking.append(collector)

    def _submit(self, group: _Group) -> None:
        lengths, group.environment_s = self._drawn(group.group_id)
        group.open_chunks = len(self._cuts)
        engine = group.collector.engine
        engine.advance(self._now)
        prompt = self._c.prefill_tokens(self._s.group_size) / self._s.group_size
        for size, tokens in zip(self._cuts, lengths, strict=True):
            engine.submit(Chunk(group, size, tokens, prompt * size))

    def _drawn(self, group_id: int) -> tuple[list[float], float]:
        while group_id >= len(self._lengths):
            block = len(self._lengths) // _BLOCK
            rng = np.random.default_rng((self._seed, 2, block))
            drawn = np.sort(self._c.lengths.draw_groups(rng, _BLOCK, self._s.group_size), axis=1)
            starts = np.cumsum([0, *self._cuts[:-1]])
            means = np.add.reduceat(drawn, starts, axis=1) / np.asarray(self._cuts)
            self._lengths.extend(means.tolist())
            outside = self._c.environment_s
            rng = np.random.default_rng((self._seed, 3, block))
            self._environment_s.extend(
                [0.0] * _BLOCK if outside is None else outside.draw_groups(rng, _BLOCK, 1)[:, 0].tolist()
            )
        return self._lengths[group_id], self._environment_s[group_id]

    def _reschedule(self, collector: _Collector) -> None:
        engine = collector.engine
        engine.epoch += 1
        end = engine.next_end()
        if end < float("inf"):
            self._at(end, self._engine_done, collector, engine.epoch)

    def _engine_done(self, collector: _Collector, epoch: int) -> None:
        engine = collector.engine
        if epoch != engine.epoch:
            return
        engine.advance(self._now)
        for chunk in engine.finished():
            group: _Group = chunk.group
            for version, tokens in engine.versions_of(chunk):
                group.versions[version] = group.versions.get(version, 0.0) + tokens * chunk.size
                group.newest = max(group.newest, version)
            group.tokens += chunk.size * chunk.tokens
            group.open_chunks -= 1
            if not group.open_chunks:
                if group.environment_s:
                    self._at(self._now + group.environment_s, self._group_done, group)
                else:
                    self._group_done(group)
        if collector.loading and not engine.paused and not engine.running:
            self._start_pause(collector)
        self._reschedule(collector)

    def _group_done(self, group: _Group) -> None:
        collector = group.collector
        if group.newest > collector.verified:
            collector.withheld.append(group)
            return
        self._set_in_flight(collector, collector.in_flight - 1)
        self._ask(collector)
        self._order.finish(group.group_id)
        if self._order.num_free_slots(published=self._published):
            self._admit()
        self._serve_take()

    # ---- takes and the trainer ---------------------------------------------------------------------------------------

    def _serve_take(self) -> None:
        """At most one take is made ahead of the trainer."""
        if self._take_is_wanted and self._order.is_complete():
            self._take_is_wanted = False
            self._at(self._now + self._c.hand_on_s, self._take_arrived, self._order.take())

    def _take_arrived(self, take: list[int]) -> None:
        self._take = take
        if self._trainer_waits_since is not None:
            self._start_take()

    def _start_take(self) -> None:
        assert self._take is not None and self._trainer_waits_since is not None
        take, self._take = self._take, None
        waited = self._now - self._trainer_waits_since
        self._trainer_waits_since = None
        self._take_is_wanted = True
        self._serve_take()
        self._train([self._groups.pop(g) for g in take], 0, waited)

    def _train(self, groups: list[_Group], update: int, waited: float) -> None:
        c, u = self._c, self._s.updates_per_batch
        share = groups[update::u]
        tokens = sum(g.tokens for g in share) + len(share) * c.prompt_tokens * self._s.group_size
        compute_s = tokens * c.train_token_s / self._s.trainers * float(self._factors[self._version]) + c.optim_s
        if c.train_slowdown > 1 and not any(x.engine.running for x in self._collectors):
            compute_s /= c.train_slowdown
        if self._version >= self._skip:
            self.record.train_s += compute_s
            for group in share:
                for version, count in group.versions.items():
                    lag = self._version - version
                    self.record.lag_tokens[lag] = self.record.lag_tokens.get(lag, 0.0) + count
        self._set_training(True)
        publish_s = c.publish_s if self._publishes_after(self._version + 1) else 0.0
        self._at(self._now + compute_s, self._set_training, False)
        self._at(self._now + compute_s + publish_s, self._step_done, groups, update, waited)

    def _publishes_after(self, version: int) -> bool:
        return version % self._s.publish_every == 0

    def _step_done(self, groups: list[_Group], update: int, waited: float) -> None:
        self._version += 1
        go_on = lambda: self._after_step(groups, update, waited)  # noqa: E731
        if not self._publishes_after(self._version):
            go_on()
        elif self._uploading:
            self._after_upload = go_on
        else:
            self._upload(self._version)
            go_on()

    def _upload(self, version: int) -> None:
        self._uploading = True
        self._at(self._now + self._c.upload_s, self._uploaded, version)

    def _uploaded(self, version: int) -> None:
        self._uploading = False
        self._published = version
        for collector in self._collectors:
            self._pull(collector)
        self._admit()
        if self._after_upload is not None:
            go_on, self._after_upload = self._after_upload, None
            self._upload(self._version)
            go_on()

    def _after_step(self, groups: list[_Group], update: int, waited: float) -> None:
        end = self._now + self._c.overhead_s
        record = self.record
        if self._version > self._skip:
            record.steps.append(end - self._last_end)
            record.waits.append(waited if update == 0 else 0.0)
            record.num_groups += len(groups[update :: self._s.updates_per_batch])
        self._last_end = end
        if self._version == self._skip:
            self._start_recording()
        if update + 1 < self._s.updates_per_batch:
            self._at(end, self._train, groups, update + 1, 0.0)
        else:
            self._at(end, self._next_take)

    def _next_take(self) -> None:
        self._trainer_waits_since = self._now
        if self._take is not None:
            self._start_take()

    def _set_training(self, training: bool) -> None:
        self._training = training
        if self._c.generate_slowdown == 1.0:
            return
        for collector in self._collectors:
            collector.engine.advance(self._now)
            collector.engine.slowdown = self._c.generate_slowdown if training else 1.0
            self._reschedule(collector)

    # ---- weights -----------------------------------------------------------------------------------------------------

    def _pull(self, collector: _Collector) -> None:
        """Take over the newest version, if it is new enough to be worth a pause or a group waits for it."""
        patient = collector.verified + self._s.pull_every
        least = min(patient, collector.wanted) if collector.wanted > collector.verified else patient
        if collector.pulling is not None or self._published < max(collector.verified + 1, least):
            return
        collector.pulling = self._published
        collector.loading = True
        engine = collector.engine
        engine.advance(self._now)
        if self._s.in_flight == "off" and engine.running:
            engine.held = True
            self._account(collector)
            return
        self._start_pause(collector)
        self._reschedule(collector)

    def _start_pause(self, collector: _Collector) -> None:
        self._account(collector)
        collector.engine.paused = True
        self._at(self._now + self._c.pause_s, self._loaded, collector)

    def _loaded(self, collector: _Collector) -> None:
        assert collector.pulling is not None
        engine = collector.engine
        engine.advance(self._now)
        self._account(collector)
        engine.load(collector.pulling, recompute=self._s.in_flight == "recompute")
        collector.loading = False
        engine.resume()
        self._reschedule(collector)
        self._at(self._now + self._c.canary_s, self._verified, collector)

    def _verified(self, collector: _Collector) -> None:
        assert collector.pulling is not None
        collector.verified, collector.pulling = collector.pulling, None
        ready = [g for g in collector.waiting if g.floor <= collector.verified]
        if ready:
            collector.waiting = [g for g in collector.waiting if g.floor > collector.verified]
            for group in ready:
                self._submit(group)
            self._reschedule(collector)
        withheld, collector.withheld = collector.withheld, []
        for group in withheld:
            self._group_done(group)
        self._pull(collector)

    # ---- bookkeeping -------------------------------------------------------------------------------------------------

    def _at(self, time: float, function: Callable[..., None], *arguments: object) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (time, self._num_pushed, function, arguments))

    def _set_in_flight(self, collector: _Collector, count: int) -> None:
        self._account(collector)
        collector.in_flight = count

    def _account(self, collector: _Collector) -> None:
        """Seconds in which a collector counts itself as generating: something in flight and nothing being loaded.

        Called before either of the two changes.
        """
        if collector.in_flight and not collector.engine.paused:
            collector.generating_s += self._now - collector.changed_at
        collector.changed_at = self._now

    def _start_recording(self) -> None:
        self.record.started_at = self._now
        for collector in self._collectors:
            self._account(collector)
            collector.engine.advance(self._now)
            collector.generating_s = 0.0
            collector.engine.busy_s = 0.0

    def _stop_recording(self) -> None:
        self.record.ended_at = self._now
        for collector in self._collectors:
            self._account(collector)
            collector.engine.advance(self._now)
            self.record.generating_s += collector.generating_s
            self.record.engine_busy_s += collector.engine.busy_s


def _cuts(group_size: int, num_chunks: int) -> list[int]:
    """Sizes of a group's chunks from its shortest to its longest sequences; the longest one is alone."""
    others = min(num_chunks, group_size) - 1
    if others <= 0:
        return [group_size]
    rest = group_size - 1
    return [rest // others + (i < rest % others) for i in range(others)] + [1]
