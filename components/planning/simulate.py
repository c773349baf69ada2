"""Simulates the run as events: what starts when, what it waits for, and which version sampled each token.

    admit (AdmissionRule) -> engine [queue, decoding] -> environment -> withheld until verified -> put -> batch -> train
       ^                        ^ pull: pause, load (groups begin), canary                                       |
       +------ published <------+-------------------------------- upload <---------- gather <--------------------+

Each function below is one event and mirrors one wait of the system: `recipes/async_rl.py` (trainer, publishing),
`collector/collector.py` and `weight_sync.py` (admission, versions, pulls), `replay/buffer.py` (batches). Only the heap
advances time. Nothing here is random except the lengths and factors, which are drawn by group and step number, so that
two plans differ by their settings alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from ..replay.window import Window
from .engine_model import Chunk, SimulatedEngine
from .model import Calibration, Settings
from .parts import Draws, PacedWork, SimulatedCollector, SimulatedGroup, SimulatedRun

_MAX_AT_ONCE = 1_000_000
"""Events at one moment; a fleet that does everything together has thousands."""


class Simulation:
    """`run()` simulates `num_steps` optimizer steps; the first `skip` of them are not recorded."""

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
        self._window = Window(self._rule)  # no group is filtered or fails: its queue index is its number
        self._draws = Draws(calibration, settings.group_size, chunks_per_group, seed)
        self._factors = self._draws.train_factors(num_steps)
        share = max(1, -(-settings.max_outstanding_groups // settings.generators))
        self._max_in_flight = min(share, settings.max_groups_in_flight or share)
        keep = calibration.kept_frac  # filtered groups are generated too, but never trained on
        self._collectors = [
            SimulatedCollector(
                SimulatedEngine(
                    pass_s=calibration.pass_s / keep,
                    token_s=calibration.token_s / keep,
                    max_sequences=calibration.max_sequences,
                    prefill_budget=calibration.prefill_budget,
                )
            )
            for _ in range(settings.generators)
        ]
        self._groups: dict[int, SimulatedGroup] = {}
        self._heap: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._num_pushed = 0
        self._published = 0
        self._version = 0
        self._batch_is_wanted = True
        self._batch: list[int] | None = None
        self._trainer_waits_since: float | None = 0.0
        self._training = False
        self._work = PacedWork(0.0, 0.0)
        self._num_generating = 0  # engines
        self._uploading = False
        self._after_upload: Callable[[], None] | None = None
        self._after_training: Callable[[], None] = lambda: None
        self._last_end = 0.0
        self._now = 0.0
        self.record = SimulatedRun()

    def run(self) -> SimulatedRun:
        self._admit()
        if self._skip == 0:
            self._start_recording()
        since_moved = 0
        while self._heap and self._version < self._num_steps:
            now, _, function, arguments = heapq.heappop(self._heap)
            since_moved = since_moved + 1 if now == self._now else 0
            assert since_moved < _MAX_AT_ONCE, f"the simulated clock stands at {now:g} s, in {function.__name__}"
            self._now = now
            self.record.num_events += 1
            function(*arguments)
        assert self._version >= self._num_steps, "the simulated run stands still"
        self._stop_recording()
        return self.record

    # ---- admission and engines ---------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Free slots go one at a time to the collector with the fewest groups, as in the real buffer."""
        free = self._num_free_slots()
        emptiest = [(c.in_flight, i) for i, c in enumerate(self._collectors) if c.in_flight < self._max_in_flight]
        heapq.heapify(emptiest)
        given: dict[int, None] = {}
        for _ in range(free):
            if not emptiest:
                break
            held, index = emptiest[0]
            collector = self._collectors[index]
            given[index] = None
            group_id = self._window.next_queue_index
            min_policy_version = self._window.admit(group_id)
            group = self._groups[group_id] = SimulatedGroup(group_id, min_policy_version, collector)
            if collector.loaded >= min_policy_version:
                self._submit(group)
            else:
                collector.waiting.append(group)
                collector.wanted = max(collector.wanted, min_policy_version)
            collector.in_flight = held + 1
            if collector.in_flight < self._max_in_flight:
                heapq.heapreplace(emptiest, (collector.in_flight, index))
            else:
                heapq.heappop(emptiest)
        for index in given:
            collector = self._collectors[index]
            self._reschedule(collector)
            if collector.waiting:
                self._pull([collector])

    def _num_free_slots(self) -> int:
        return max(0, self._rule.num_admissible(published=self._published) - self._window.next_queue_index)

    def _submit(self, group: SimulatedGroup) -> None:
        lengths, environment_s = self._draws.of(group.group_id)
        group.environment_s = environment_s + self._c.latency_s
        group.open_chunks = len(lengths)
        self._set_in_engine(group.collector, group.collector.in_engine + 1)
        engine = group.collector.engine
        engine.advance(self._now)
        prompt = self._c.prefill_tokens(self._s.group_size) / self._s.group_size
        engine.submit(
            [Chunk(group, size, tokens, prompt * size) for size, tokens in zip(self._draws.sizes, lengths, strict=True)]
        )

    def _reschedule(self, collector: SimulatedCollector) -> None:
        engine = collector.engine
        engine.epoch += 1
        end = engine.next_end()
        if end < float("inf"):
            self._at(end, self._engine_done, collector, engine.epoch)

    def _engine_done(self, collector: SimulatedCollector, epoch: int) -> None:
        engine = collector.engine
        if epoch != engine.epoch:
            return
        engine.advance(self._now)
        for chunk in engine.finished():
            group: SimulatedGroup = chunk.group
            spans = engine.versions_of(chunk)
            for version, tokens in spans:
                group.versions[version] = group.versions.get(version, 0.0) + tokens * chunk.size
            if spans[0][0] > group.newest:
                group.newest = spans[0][0]
            group.tokens += chunk.size * chunk.tokens
            group.open_chunks -= 1
            if not group.open_chunks:
                self._set_in_engine(collector, collector.in_engine - 1)
                if group.environment_s:
                    self._at(self._now + group.environment_s, self._group_done, group)
                else:
                    self._group_done(group)
        if collector.draining and not engine.running:
            collector.draining = False
            self._pause([collector])
        self._reschedule(collector)

    def _group_done(self, group: SimulatedGroup) -> None:
        collector = group.collector
        if group.newest > collector.verified:
            collector.withheld.append(group)
            return
        collector.in_flight -= 1
        self._window.finish(group.group_id)
        if self._num_free_slots():
            self._admit()
        self._serve_batch()

    # ---- batches and the trainer -------------------------------------------------------------------------------------

    def _serve_batch(self) -> None:
        """At most one batch is prepared ahead of the trainer."""
        if self._batch_is_wanted and self._window.is_ready(last=False):
            self._batch_is_wanted = False
            self._at(self._now + self._c.hand_off_s, self._batch_arrived, self._window.take_batch(last=False))

    def _batch_arrived(self, batch: list[int]) -> None:
        self._batch = batch
        if self._trainer_waits_since is not None:
            self._start_batch()

    def _start_batch(self) -> None:
        assert self._batch is not None
        assert self._trainer_waits_since is not None
        batch, self._batch = self._batch, None
        waited = self._now - self._trainer_waits_since
        self._trainer_waits_since = None
        self._batch_is_wanted = True
        self._serve_batch()
        self._train([self._groups.pop(g) for g in batch], 0, waited)

    def _train(self, groups: list[SimulatedGroup], update: int, waited: float) -> None:
        c, u = self._c, self._s.updates_per_batch
        share = groups[update::u]
        tokens = sum(g.tokens for g in share) + len(share) * c.prompt_tokens * self._s.group_size
        compute_s = tokens * c.train_token_s / self._s.trainers * self._factors[self._version] + c.optim_s
        if self._version >= self._skip:
            for group in share:
                for version, count in group.versions.items():
                    lag = self._version - version
                    self.record.lag_tokens[lag] = self.record.lag_tokens.get(lag, 0.0) + count
        publish_s = c.publish_s if self._publishes_after(self._version + 1) else 0.0
        self._set_training(True)
        self._work = PacedWork(compute_s, self._now)
        self._after_training = lambda: self._at(self._now + publish_s, self._step_done, groups, update, waited)
        self._pace()

    def _pace(self) -> None:
        """Training takes longer while an engine generates."""
        rate = 1.0 / self._c.train_slowdown if self._num_generating else 1.0
        if self._training and (end := self._work.at_rate(rate, self._now)) is not None:
            self._at(end, self._trained, self._work, self._work.epoch)

    def _trained(self, work: PacedWork, epoch: int) -> None:
        if work is not self._work or epoch != work.epoch:  # its pace has changed since, or it has ended
            return
        if self._version >= self._skip:
            self.record.train_s += self._now - work.began_at
        self._set_training(False)
        self._after_training()

    def _publishes_after(self, version: int) -> bool:
        return version % self._s.publish_every == 0

    def _step_done(self, groups: list[SimulatedGroup], update: int, waited: float) -> None:
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
        self._pull(self._collectors)
        self._admit()
        if self._after_upload is not None:
            go_on, self._after_upload = self._after_upload, None
            self._upload(self._version)
            go_on()

    def _after_step(self, groups: list[SimulatedGroup], update: int, waited: float) -> None:
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
            self._at(end, self._next_batch)

    def _next_batch(self) -> None:
        self._trainer_waits_since = self._now
        if self._batch is not None:
            self._start_batch()

    def _set_training(self, training: bool) -> None:
        self._training = training
        if self._c.generate_slowdown == 1.0:
            return
        for collector in self._collectors:
            collector.engine.advance(self._now)
            collector.engine.slowdown = self._c.generate_slowdown if training else 1.0
            self._reschedule(collector)

    # ---- weights -----------------------------------------------------------------------------------------------------

    def _pull(self, collectors: Iterable[SimulatedCollector]) -> None:
        """Collectors pull the newest version if it is worth a pause, or if a group waits for it.

        Whatever they do at the same moment is one event for all of them: a fleet pulls together.
        """
        pausing = []
        for collector in collectors:
            verified, wanted = collector.verified, collector.wanted
            least = verified + self._s.pull_every
            if verified < wanted < least:
                least = wanted
            available = self._available(collector)
            if collector.pulling is not None or available < least:
                continue
            collector.pulling = available
            engine = collector.engine
            engine.advance(self._now)
            if self._s.in_flight == "off" and engine.running:
                engine.held = collector.draining = True
            else:
                pausing.append(collector)
        if pausing:
            self._pause(pausing)

    def _available(self, collector: SimulatedCollector) -> int:
        """The newest version that this collector can load."""
        return self._published

    def _pause(self, collectors: list[SimulatedCollector]) -> None:
        for collector in collectors:
            self._account(collector)
            collector.engine.paused = True
            collector.engine.epoch += 1  # scheduled completions are now invalid
        self._at(self._now + self._c.pause_s, self._loaded, collectors)

    def _loaded(self, collectors: list[SimulatedCollector]) -> None:
        recompute = self._s.in_flight == "recompute"
        for collector in collectors:
            assert collector.pulling is not None
            engine = collector.engine
            engine.advance(self._now)
            self._account(collector)
            engine.load(collector.pulling, recompute=recompute)
            engine.resume()
            collector.loaded = collector.pulling
            if collector.waiting:
                self._start_waiting(collector)
            if engine.running:
                self._reschedule(collector)
        # A canary overtakes waiting requests, but not the pass that began when generation resumed: it joins the next.
        beside_s = sum(c.engine.passes_s(2) for c in collectors) / len(collectors)
        self._at(self._now + self._c.canary_s + beside_s, self._verified, collectors)

    def _verified(self, collectors: list[SimulatedCollector]) -> None:
        for collector in collectors:
            assert collector.pulling is not None
            collector.verified, collector.pulling = collector.pulling, None
            if collector.withheld:
                withheld, collector.withheld = collector.withheld, []
                for group in withheld:
                    self._group_done(group)
        self._pull(collectors)

    def _start_waiting(self, collector: SimulatedCollector) -> None:
        ready = [g for g in collector.waiting if g.min_policy_version <= collector.loaded]
        if ready:
            collector.waiting = [g for g in collector.waiting if g.min_policy_version > collector.loaded]
            for group in ready:
                self._submit(group)
            self._reschedule(collector)

    # ---- bookkeeping -------------------------------------------------------------------------------------------------

    def _at(self, time: float, function: Callable[..., None], *arguments: object) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (time, self._num_pushed, function, arguments))

    def _set_in_engine(self, collector: SimulatedCollector, count: int) -> None:
        self._account(collector)
        changed = bool(count) - bool(collector.in_engine)
        collector.in_engine = count
        if changed:
            self._num_generating += changed
            self._pace()

    def _account(self, collector: SimulatedCollector) -> None:
        """Seconds in which a collector counts itself as generating: a request is in the engine and nothing is loading.

        Call it before either of the two changes.
        """
        if collector.in_engine and not collector.engine.paused:
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
