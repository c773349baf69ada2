"""What breaks first when a run grows: the simulator of `leeway plan` with a buffer, a parameter server and links that
take time.

    python benchmarks/scale.py                               # reckoned: 1 to 1,000 engines; some minutes
    python benchmarks/scale.py --runs /tmp/scale             # measured: runs with 1, 2 and 4 engines (hf), minutes

What takes time here and not in the planner:

    admit() ----> [coordinator: order, bound] ----> engine ----> put() ----> [shard of the buffer] ----> batch
    publish ----> [relays, a tree] ----> engine

Every call waits its turn at the one event loop that answers it. A group is delivered to shard `id mod shards`; its
order and its bound stay with one coordinator, who is told of each delivery. Weights leave the trainer once for each
child of the root (all children of a relay share its link), bucket after bucket, so that a level of the tree adds one
bucket and not one copy. Without relays all engines are children of
the trainer. Each group is delivered in a call of its own; in a run, groups that finish together travel
together, so calls are counted too high.

Printed for each number of engines: groups and calls per second; how busy coordinator, shard and the trainer's link are
(1: it is the limit); the longest wait of a call; seconds until the last engine has a version; mean lag; and the step,
beside that of the planner, for which none of that takes time.

`--runs`: for each number of engines, a run of the quickstart's RL stage is calibrated on itself, as `leeway plan` does,
and simulated. Printed beside each other: calls per group, bytes of a publication, lags, and the share of a step in
which the trainer waits. An engine needs a core: with fewer than four there is no run with four. Engines and trainer
share what cores there are, so seconds are not compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quickstart_runs import finished_run, series, warmed_up

from leeway.planning.calibration import calibrate, open_run
from leeway.planning.lengths import lognormal
from leeway.planning.model import Calibration, Settings
from leeway.planning.parts import SimulatedCollector, SimulatedGroup
from leeway.planning.simulate import SimulatedRun, Simulation

ENGINES = (1, 10, 100, 1000)
TOKEN_BYTES = 13
"""Of a sampled token in a group: id, version, logprob and loss mask (4 + 4 + 4 + 1)."""
OVERRIDES = ["staleness.max_policy_lag=2", "rollout.pull_every=1", "train.groups_per_step=32", "log.ray_timeline=true"]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of one core, and bytes per second. The defaults were measured: see docs/scale.md.

    `call_s`: of a call, whatever is in it. `group_s`: of a group in its shard, from delivery to batch; `order_s`: at
    the coordinator, which knows nothing but its id. `byte_s`: for each byte of a group that is copied and assembled.
    """

    call_s: float = 1.0e-3
    group_s: float = 0.9e-3
    order_s: float = 0.03e-3
    byte_s: float = 2.6e-9
    link_bytes_per_s: float = 12.5e9
    model_bytes: float = 64e9
    bucket_bytes: float = 0.5e9
    shards: int = 1
    fan_out: int = 0


class Queue:
    """One event loop: calls wait their turn."""

    def __init__(self) -> None:
        self._free_at = self.busy_s = self.longest_wait_s = 0.0
        self.calls = 0

    def answers_at(self, now: float, cost_s: float) -> float:
        begins = max(now, self._free_at)
        self.longest_wait_s = max(self.longest_wait_s, begins - now)
        self._free_at = begins + cost_s
        self.busy_s += cost_s
        self.calls += 1
        return self._free_at


class Fleet(Simulation):
    """The planner's simulation, in which calls and weights take time."""

    def __init__(self, calibration: Calibration, settings: Settings, costs: Costs, *, num_steps: int) -> None:
        super().__init__(calibration, settings, num_steps=num_steps, skip=0, chunks_per_group=2)
        self._costs = costs
        self.coordinator = Queue()
        self.shards = [Queue() for _ in range(costs.shards)] if costs.shards > 1 else [self.coordinator]
        self._asked_at: dict[int, float] = {}
        self._has = dict.fromkeys(map(id, self._collectors), 0)
        self.slowest_s = 0.0
        self.link_s = 0.0

    def _submit(self, group: SimulatedGroup) -> None:
        """An `admit` brings all groups for which there is room at that moment."""
        engine, costs = id(group.collector), self._costs
        is_with_others = self._asked_at.get(engine) == self._now
        self._asked_at[engine] = self._now
        cost_s = costs.order_s + (0.0 if is_with_others else costs.call_s)
        self._at(self.coordinator.answers_at(self._now, cost_s), self._arrived, group)

    def _arrived(self, group: SimulatedGroup) -> None:
        super()._submit(group)
        self._reschedule(group.collector)

    def _group_done(self, group: SimulatedGroup) -> None:
        if group.newest > group.collector.verified:
            super()._group_done(group)
            return
        costs, shard = self._costs, self.shards[group.group_id % len(self.shards)]
        cost_s = costs.call_s + costs.group_s + costs.byte_s * TOKEN_BYTES * group.tokens
        if len(self.shards) > 1:  # it tells the coordinator, of many at once
            self.coordinator.answers_at(self._now, costs.order_s)
        self._at(shard.answers_at(self._now, cost_s), super()._group_done, group)

    def _uploaded(self, version: int) -> None:
        costs, number = self._costs, len(self._collectors)
        children = min(costs.fan_out or number, number)
        copy_s, bucket_s = (
            size * children / costs.link_bytes_per_s for size in (costs.model_bytes, costs.bucket_bytes)
        )
        self.link_s += copy_s
        first, level = 0, 0
        while first < number:
            own = self._collectors[first : first + children ** (level + 1)]
            after_s = copy_s + level * bucket_s  # no relay is faster than the root
            self.slowest_s = max(self.slowest_s, after_s)
            self._at(self._now + after_s, self._brought, own, version)
            first, level = first + len(own), level + 1
        super()._uploaded(version)

    def _brought(self, collectors: list[SimulatedCollector], version: int) -> None:
        for collector in collectors:
            self._has[id(collector)] = max(version, self._has[id(collector)])
        self._pull(collectors)

    def _available(self, collector: SimulatedCollector) -> int:
        return self._has[id(collector)]


def fleet(calibration: Calibration, settings: Settings, costs: Costs, *, num_steps: int) -> dict[str, Any]:
    simulated = Fleet(calibration, settings, costs, num_steps=num_steps)
    record = simulated.run()
    wall_s = record.ended_at - record.started_at
    calls = sum(queue.calls for queue in {simulated.coordinator, *simulated.shards})
    return {
        "engines": settings.generators,
        "shards": costs.shards,
        "fan_out": costs.fan_out,
        "groups_per_s": round(record.num_groups / wall_s, 1),
        "calls_per_s": round(calls / wall_s, 1),
        "coordinator_busy": round(simulated.coordinator.busy_s / wall_s, 3),
        "shard_busy": round(max(s.busy_s for s in simulated.shards) / wall_s, 3),
        "longest_wait_s": round(max(q.longest_wait_s for q in (simulated.coordinator, *simulated.shards)), 2),
        "link_busy": round(simulated.link_s / wall_s, 3),
        "last_engine_has_it_s": round(simulated.slowest_s, 2),
        "lag_mean": round(lag_mean(record), 2),
        "step_s": round(wall_s / len(record.steps), 2),
    }


def free_of_cost(calibration: Calibration, settings: Settings, num_steps: int) -> dict[str, float]:
    record = Simulation(calibration, settings, num_steps=num_steps, skip=0, chunks_per_group=2).run()
    step_s = (record.ended_at - record.started_at) / len(record.steps)
    return {"step_s_if_nothing_took_time": round(step_s, 2), "lag_mean": round(lag_mean(record), 2)}


def lag_mean(record: SimulatedRun) -> float:
    total = math.fsum(record.lag_tokens.values()) or 1.0
    return math.fsum(lag * tokens for lag, tokens in record.lag_tokens.items()) / total


def job(name: str, engines: int) -> tuple[Calibration, Settings, Costs]:
    """Made up, of the size of real ones. Four trainer ranks for each engine, a batch that fills the engines once."""
    long = name == "long"
    # An engine decodes 256 sequences in a pass: 32B parameters in 40 ms, or 1B in 12 ms.
    settings = Settings(
        groups_per_step=max(8, engines * 256 // 16 // 2),
        group_size=16,
        generators=engines,
        trainers=max(1, engines * 4096 // 1000),
        max_policy_lag=4,
        target_policy_lag=4,
    )
    calibration = Calibration(
        settings=settings,
        lengths=lognormal(6000.0, 0.8, 32_768.0) if long else lognormal(200.0, 0.5, 1024.0),
        prompt_tokens=200.0,
        shared_prompt_tokens=192.0,
        pass_s=0.030 if long else 0.008,
        token_s=4e-5 if long else 1.5e-5,
        max_sequences=256,
        prefill_budget=8192,
        train_token_s=5e-4 if long else 3e-5,
        optim_s=0.5 if long else 0.1,
        pause_s=1.0 if long else 0.1,
    )
    return calibration, settings, Costs(model_bytes=64e9 if long else 2e9)


def reckoned(options: argparse.Namespace) -> None:
    for name in ("long", "short"):
        print(json.dumps({"job": name}), flush=True)
        for engines in options.engines:
            calibration, settings, costs = job(name, engines)
            print(json.dumps({"engines": engines, **free_of_cost(calibration, settings, options.steps)}), flush=True)
            for shards, fan_out in [(1, 0)] if engines < 100 else [(1, 0), (1, 4), (16, 4)]:
                own = replace(costs, shards=shards, fan_out=fan_out)
                print(json.dumps(fleet(calibration, settings, own, num_steps=options.steps)), flush=True)


def measured(options: argparse.Namespace) -> None:
    out = options.runs.absolute()
    model = warmed_up(out, "scale")
    for engines in options.engines:
        overrides = (*OVERRIDES, f"rollout.num_generators={engines}", "rollout.engine.name=hf")
        steps = f"stages.async_rl.train.steps={options.steps}"
        folder = finished_run(out, "scale", f"engines_{engines}", model, *overrides, steps)
        run = open_run(folder)
        calibration = calibrate(run)
        settings = calibration.settings
        model_bytes = max(series(folder, "param_server/bytes"))
        # On one machine the weights are in memory that all share, and the calls cost what two busy cores make of them.
        simulated = Fleet(
            calibration, settings, Costs(model_bytes=0.0, bucket_bytes=0.0), num_steps=max(20, options.steps)
        )
        record = simulated.run()
        calls = real_calls(folder)
        waits, steps_s = series(folder, "step/wait_for_batch_s"), series(folder, "step/total_s")
        groups = settings.groups_per_step * len(steps_s)
        row = {
            "engines": engines,
            "calls_per_group": {
                "measured": {verb: round(calls[verb] / groups, 2) for verb in ("admit", "put", "pull")},
                "simulated": round(simulated.coordinator.calls / max(1, record.num_groups), 2),
            },
            "publication_bytes": {
                "measured": model_bytes,
                "fetched": max(series(folder, "param_server/fetched_bytes")),
            },
            "lag_mean": {
                "measured": round(mean(series(folder, "train/policy_lag/mean")), 2),
                "simulated": round(lag_mean(record), 2),
            },
            "lag_max": {
                "measured": max(series(folder, "train/policy_lag/max")),
                "simulated": max(record.lag_tokens, default=0),
            },
            "waits_frac": {
                "measured": round(sum(waits) / sum(steps_s), 3),
                "simulated": round(sum(record.waits) / sum(record.steps), 3),
            },
        }
        print(json.dumps(row), flush=True)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def real_calls(folder: Path) -> Counter[str]:
    """What Ray recorded, by the method's name; it keeps about the last 100,000."""
    (file,) = folder.glob("ray-timeline.json")
    return Counter(str(event.get("name")) for event in json.loads(file.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--runs", type=Path, help="folder for real runs")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    if options.runs and max(options.engines or [1]) > cores:
        raise SystemExit(
            f"--engines: got {max(options.engines)} with --runs, expected at most {cores}, a core for each"
        )
    measured_ones = tuple(number for number in (1, 2, 4) if number <= cores)
    options.engines = options.engines or (measured_ones if options.runs else ENGINES)
    (measured if options.runs else reckoned)(options)


if __name__ == "__main__":
    main()
