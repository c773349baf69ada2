"""The speeds of a finished run's parts, from the files it wrote: metrics.jsonl, config.yaml and rollouts/.

Generation was measured alone at the start (docs/metrics.md, limit/). To find how much concurrent training slows it, the
run itself is simulated until it generates for as many seconds per step as was measured. Training speed is taken from
the run as it was.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..config import Config, ConfigError, Stage, resolve_stages
from ..config.errors import words
from ..config.load import read_tree
from ..monitor import read_metrics
from ..runtime.limit import PROBE_TOKENS
from .lengths import Distribution, from_samples, lognormal
from .model import Calibration, Settings
from .predict import predict

MIN_STEPS = 10
_DEFAULT_BLOCK = 16
"""vLLM's on a GPU; on a CPU 16 or 32, by the width of the heads (engines/vllm_blocks.py)."""
_DEFAULT_BUDGET = 2048
_MAX_ROLLOUT_FILES = 200
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A finished run: the config of its `async_rl` stage, and that stage's folder."""

    config: Config
    dir: Path


def open_run(folder: Path, overrides: Sequence[str] = ()) -> Run:
    """Find the asynchronous stage of the run in `folder`; `overrides` change its settings (key=value).

    Raises a one-line ConfigError if there is none.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            "--from",
            got=words(f"{folder} ({'no config.yaml in it' if folder.is_dir() else 'nothing there'})"),
            expected="the folder of a finished run",
            fix="e.g. runs/leeway/quickstart",
        )
    tree = read_tree(file)
    for part in (tree, *tree.get("stages", {}).values()):
        part.pop("env", None)  # a plan does not need the user's environment, whose module may not be importable here
    stage: Stage = resolve_stages(tree, "async_rl", overrides, of_a_run=True)[-1]
    for candidate in (folder / "stages" / stage.name, folder):
        if (candidate / "metrics.jsonl").is_file():
            return Run(stage.config, candidate)
    raise ConfigError(
        "--from",
        got=words(f"{folder} (no metrics.jsonl of stage {stage.name})"),
        expected="a run of async_rl that took at least one step",
        fix="run it first: leeway run async_rl ...",
    )


def calibrate(run: Run) -> Calibration:
    """Measure `run`; takes about a second. Raises ConfigError if it was too short."""
    try:
        rows = read_metrics(run.dir / "metrics.jsonl")
    except (OSError, ValueError) as error:
        raise ConfigError("--from", got=words(str(error)), expected="readable metrics", fix="use another run") from None
    settings = Settings.of(run.config)
    steps = _settled([r for r in rows if "limit/step_s" in r and "limit/first_token_s" in r])
    if len(steps) < MIN_STEPS:
        raise ConfigError(
            "--from",
            got=words(f"{len(steps)} usable steps in {run.dir / 'metrics.jsonl'}"),
            expected=f"at least {MIN_STEPS} after the first fifth",
            fix="use a longer run",
        )
    measured = _Measured(rows, steps, settings, run)
    return _fitted(measured.calibration(), generating_s=measured.generating_s())


class _Measured:
    """Means and fits over the rows of a run; `steps` are those of the first optimizer step of each batch."""

    def __init__(self, rows: Sequence[Row], steps: Sequence[Row], settings: Settings, run: Run) -> None:
        self._rows = rows
        self._steps = steps
        self._settings = settings
        self._run = run
        # A row without shares is of a moment at which no generator was there to say anything.
        self._collector = [r for r in rows if "collector/generate_frac" in r and r["step"] >= steps[0]["step"]]
        self._step_s = statistics.fmean(r["step/total_s"] for r in _settled([r for r in rows if "step/total_s" in r]))
        rollouts = list(_rollouts(run.dir / "rollouts"))
        self._prompts = [r.prompt_tokens for r in rollouts]
        self._prompt_tokens = statistics.fmean(self._prompts) if rollouts else 0.0
        self._lengths = self._distribution([r.response_tokens for r in rollouts])
        self._environment_s = self._outside({r.group_id: r.environment_s for r in rollouts if r.environment_s})

    def calibration(self) -> Calibration:
        s, engine = self._settings, self._run.config.rollout.engine
        block = int(engine.get("block_size", _DEFAULT_BLOCK))
        shared = self._shared(block) if engine.get("enable_prefix_caching", True) else 0.0
        room = self._run.config.rollout.engine_options.places
        budget = int(engine.get("max_num_batched_tokens", _DEFAULT_BUDGET))
        pass_s, token_s, latency_s = self._engine_speeds(room, shared, budget)
        per_token, slowdown, factors = self._trainer_speeds()
        overhead_s = statistics.fmean(
            max(0.0, r["step/total_s"] - sum(r.get(f"step/{name}_s", 0.0) for name in _PARTS)) for r in self._steps
        )
        return Calibration(
            settings=s,
            lengths=self._lengths,
            prompt_tokens=self._prompt_tokens,
            shared_prompt_tokens=shared,
            pass_s=pass_s,
            token_s=token_s,
            latency_s=latency_s,
            environment_s=self._environment_s,
            max_sequences=room,
            prefill_budget=budget,
            kept_frac=self._kept_frac(),
            train_token_s=per_token,
            train_slowdown=slowdown,
            train_factors=factors,
            optim_s=self._mean("step/optim_s"),
            publish_s=self._publish_s(),
            overhead_s=overhead_s,
            hand_off_s=overhead_s,
            upload_s=_median(self._rows, "param_server/publish_s"),
            pause_s=_mean(self._collector, "collector/pause_s"),
            # It includes passes of other requests, which are simulated: the minimum has the fewest of them.
            canary_s=min((r["param_server/proof_s"] for r in self._rows if r.get("param_server/proof_s")), default=0.0),
            measured_step_s=self._step_s,
        )

    def _publish_s(self) -> float:
        """Of a version, whichever of the steps around it pays for it."""
        every = self._settings.publish_every
        paid = [row.get("step/publish_s", 0.0) for row in self._rows if "step/total_s" in row]
        settled = paid[len(paid) // 5 :]
        versions = max(1, len(settled) // every)
        return sum(settled[-versions * every :]) / versions

    def generating_s(self) -> float:
        """Seconds per optimizer step in which a collector had something in flight and was not paused."""
        share = statistics.fmean(r["collector/generate_frac"] for r in self._collector)
        return share * self._step_s

    def _distribution(self, samples: Sequence[int]) -> Distribution:
        if samples:
            return from_samples(samples)
        mean, longest = self._mean("train/response_tokens/mean"), self._mean("train/response_tokens/max")
        # No rollouts were kept: use the sigma at which the batch's longest response matches the observed one.
        count = self._settings.groups_per_step * self._settings.group_size
        sigmas = [0.0, *np.linspace(0.05, 2.0, 40).tolist()]
        limit = max(mean, float(self._run.config.rollout.max_response_tokens))
        tried = [lognormal(mean, sigma, limit) for sigma in sigmas]
        return min(tried, key=lambda d: abs(d.longest_of(count) - longest))

    def _engine_speeds(self, room: int, shared: float, budget: int) -> tuple[float, float, float]:
        """(pass_s, token_s, latency_s) from the measurements at the start.

        They time each further token of a group alone, its first tokens, and as many groups as are ever in flight, or as
        fill the engine.
        """
        s = self._settings
        longest = self._lengths.longest_in_group(s.group_size)
        prompts = shared + (self._prompt_tokens - shared) * s.group_size
        sampled = self._lengths.mean * s.group_size
        decoded = sampled - s.group_size  # the first token comes with the prompt
        first_s = statistics.median(r["limit/first_token_s"] for r in self._steps)
        further_s = (longest - 1) * statistics.median(r["limit/token_s"] for r in self._steps)
        response_tokens = [r["train/response_tokens/total"] / s.updates_per_batch for r in self._steps]
        per_token = statistics.median(
            r["limit/generate_s"] / t for r, t in zip(self._steps, response_tokens, strict=True)
        )
        groups = -(-min(s.max_outstanding_groups, 2 * s.groups_per_step) // s.generators)  # on each engine
        is_cut = self._run.config.rollout.max_response_tokens > PROBE_TOKENS
        if is_cut:
            groups = min(groups, -(-room // s.group_size))
        many_s = per_token * sampled * groups * s.generators
        many_passes = groups * decoded / min(room, groups * s.group_size) + max(1.0, groups * prompts / budget)
        if not is_cut:  # otherwise all were equally long, and the engine was full until the end
            many_passes = max(many_passes, longest)
        # The last two both include what a group waits for once, so their difference is passes and tokens only.
        rows = np.array([[longest - 1, decoded], [many_passes - 1, groups * (decoded + prompts) - prompts]])
        seconds = np.array([further_s, max(0.0, many_s - first_s)])
        pass_s, token_s = np.linalg.solve(rows, seconds) if longest > 1 else (0.0, seconds[1] / rows[1, 1])
        if token_s <= 0:  # noise: assume that a pass costs the same however full it is
            pass_s, token_s = seconds[1] / rows[1, 0], 1e-9
        if pass_s <= 0:
            pass_s, token_s = 1e-9, seconds[1] / rows[1, 1]
        return float(pass_s), float(token_s), max(0.0, first_s - float(pass_s) - prompts * float(token_s))

    def _outside(self, samples: Mapping[int, float]) -> Distribution | None:
        """Seconds of a group outside the engine, from `samples` by group; if none were kept, the mean for all."""
        if samples:
            return from_samples(list(samples.values()))
        mean = statistics.fmean(r.get("train/environment_s/mean", 0.0) for r in self._steps)
        return from_samples([mean]) if mean else None

    def _shared(self, block: int) -> float:
        """Mean prompt tokens that a group's sequences share: whole blocks, and never the last token."""
        return statistics.fmean((n - 1) // block * block for n in self._prompts) if self._prompts else 0.0

    def _trainer_speeds(self) -> tuple[float, float, tuple[float, ...]]:
        """(seconds per token on one rank alone, slowdown while generating, variation between equal batches)."""
        s = self._settings
        prompts = self._prompt_tokens * s.groups_per_step * s.group_size
        tokens = [(r["train/response_tokens/total"] + prompts) / s.updates_per_batch for r in self._steps]
        each = [r["step/forward_backward_s"] / t for r, t in zip(self._steps, tokens, strict=True)]
        mean = statistics.fmean(each)
        alone = statistics.fmean(
            (r["limit/train_s"] - r["step/optim_s"]) / t for r, t in zip(self._steps, tokens, strict=True)
        )
        alone = min(mean, alone)  # it may include warm-up
        return alone * s.trainers, mean / alone, tuple(e / mean for e in each)

    def _kept_frac(self) -> float:
        last = next((r for r in reversed(self._rows) if "replay/groups_taken" in r), None)
        if last is None or not last["replay/groups_taken"]:
            return 1.0
        lost = last["replay/filtered"] + last["replay/failed"]
        return last["replay/groups_taken"] / (last["replay/groups_taken"] + lost)

    def _mean(self, name: str) -> float:
        return statistics.fmean(r[name] for r in self._steps)


_PARTS = ("wait_for_batch", "forward_backward", "optim", "publish")


def _fitted(calibration: Calibration, *, generating_s: float) -> Calibration:
    """Slow generation during training until the simulated run generates for as long per step as the real run did.

    A factor below 1 means that the engines were faster in the run than when measured; it then applies at all times.
    """

    def slowed(factor: float) -> Calibration:
        if factor >= 1:
            return replace(calibration, generate_slowdown=factor)
        return calibration.faster_generators(1 / factor)

    def simulated_s(factor: float) -> float:
        prediction = predict(slowed(factor), calibration.settings, events=8_000)
        return prediction.generating_frac * prediction.step_s

    low, high = 0.5, 4.0
    if simulated_s(low) >= generating_s:
        return slowed(low)
    if simulated_s(high) <= generating_s:
        # Nothing is generated during training (lockstep), or environments spread it: no factor explains the rest.
        return slowed(1.0)
    for _ in range(7):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if simulated_s(middle) < generating_s else (low, middle)
    return slowed(math.sqrt(low * high))


def _settled(steps: Sequence[Row]) -> list[Row]:
    """The steps without the first fifth (warm-up) and without those delayed by something else."""
    kept = list(steps[max(1, len(steps) // 5) :])
    if not kept:
        return []
    usual = statistics.median(r["step/total_s"] for r in kept)
    return [r for r in kept if r["step/total_s"] <= 5 * usual]


def _median(rows: Iterable[Row], name: str) -> float:
    values = [r[name] for r in rows if r.get(name) is not None]
    return statistics.median(values) if values else 0.0


def _mean(rows: Iterable[Row], name: str) -> float:
    values = [r[name] for r in rows if r.get(name) is not None]
    return statistics.fmean(values) if values else 0.0


class _Rollout(NamedTuple):
    group_id: int
    prompt_tokens: int
    response_tokens: int
    environment_s: float


def _rollouts(folder: Path) -> Iterable[_Rollout]:
    """The trajectories that the run recorded."""
    files = sorted(folder.glob("step-*.jsonl"))
    for file in files[-_MAX_ROLLOUT_FILES:]:
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # cut short by a kill
                continue
            if "response_tokens" in row:
                yield _Rollout(
                    row.get("group_id", 0),
                    len(row["prompt_tokens"]),
                    len(row["response_tokens"]),
                    row.get("environment_s", 0.0),
                )
