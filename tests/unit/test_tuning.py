"""`leeway tune`: what it tries, what it keeps, and what it says, with trials whose times are known."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from leeway.cli import tune as command
from leeway.cli.main import app
from leeway.config import Config, ConfigError, derive, load_config, plan_run
from leeway.planning import tuning
from leeway.planning.lengths import from_samples
from leeway.planning.model import Calibration, Settings
from leeway.planning.tuning import Candidate, candidates, search, step_seconds

LOCKSTEP = ("staleness.max_policy_lag=0", "staleness.reorder_window=1", "stages.async_rl.train.groups_per_step=8")


@pytest.fixture(autouse=True)
def short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_EVENTS", 500)


@functools.cache
def config_of(*overrides: str) -> Config:
    return load_config("quickstart", overrides)


def calibration(
    config: Config, *, token_s: float = 1e-4, train_token_s: float = 5e-4, environment_s: float | None = None
) -> Calibration:
    """One engine and one trainer that need about as long for a batch as each other."""
    return Calibration(
        settings=Settings.of(config),
        lengths=from_samples([5]),
        prompt_tokens=10.0,
        shared_prompt_tokens=0.0,
        pass_s=0.01,
        token_s=token_s,
        latency_s=0.0,
        environment_s=None if environment_s is None else from_samples([environment_s]),
        max_sequences=256,
        prefill_budget=2048,
        kept_frac=1.0,
        train_token_s=train_token_s,
        train_slowdown=1.0,
        train_factors=(1.0,),
        optim_s=0.01,
        publish_s=0.0,
        overhead_s=0.0,
        hand_off_s=0.0,
        upload_s=0.0,
        pause_s=0.01,
        canary_s=0.0,
        measured_step_s=1.0,
    )


class Machine:
    """Runs whose step takes 1 s, times the factor of each override; or that fail."""

    def __init__(self, factors: dict[str, float], *, fails: str = "") -> None:
        self.factors, self.fails, self.asked, self.took = factors, fails, [], {}

    def __call__(self, name: str, overrides: Sequence[str]) -> Path:
        self.asked.append(list(overrides))
        if self.fails and any(self.fails in o for o in overrides):
            raise RuntimeError("Traceback\nno room for it")
        step_s = 1.0
        for part, factor in self.factors.items():
            step_s *= factor if any(part in o for o in overrides) else 1.0
        folder = Path(str(len(self.asked)))
        self.took[folder] = step_s
        return folder


def tuned(
    machine: Machine, config: Config, *, most: int = 20, environment_s: float | None = None, publish_s: float = 0.0
) -> tuple[Any, list[str]]:
    said: list[str] = []
    found = search(
        config,
        machine,
        most=most,
        say=said.append,
        measured=machine.took.__getitem__,
        calibrated=lambda folder: replace(calibration(config, environment_s=environment_s), publish_s=publish_s),
    )
    return found, said


@pytest.mark.slow
def test_what_saves_time_is_kept_and_tried_together_with_what_follows() -> None:
    machine = Machine({"max_policy_lag": 0.7, "max_num_seqs": 0.9, "placement=turns": 1.2})
    found, said = tuned(machine, config_of(*LOCKSTEP))
    best = found.best.candidate.overrides
    assert best["staleness.max_policy_lag"] >= 1, "by simulation, half of lockstep is waiting"
    assert "cluster.placement" not in best
    assert "rollout.engine.max_num_seqs" in best
    assert found.measured_s == pytest.approx((1.0, 0.63))
    assert machine.asked[-2:] == [[], [f"{k}={v}" for k, v in best.items()]], "both once more, in turns"
    assert "-37% (each measured twice)" in found.in_words()
    assert "more off-policy" in found.in_words()
    assert len(said) == len(machine.asked)


def test_a_gain_that_is_not_there_again_is_not_reported() -> None:
    machine = Machine({})
    times = itertools.chain([1.0, 0.8], itertools.repeat(1.1))
    found = search(
        config_of(*LOCKSTEP),
        machine,
        most=2,
        say=lambda line: None,
        measured=lambda folder: next(times),
        calibrated=lambda folder: calibration(config_of(*LOCKSTEP)),
    )
    assert found.measured_s == pytest.approx((1.05, 0.95))
    assert found.again == [1.1, 1.1]
    times = itertools.chain([1.0, 0.94], itertools.repeat(1.1))
    found = search(
        config_of(*LOCKSTEP),
        machine,
        most=2,
        say=lambda line: None,
        measured=lambda folder: next(times),
        calibrated=lambda folder: calibration(config_of(*LOCKSTEP)),
    )
    assert found.in_words().startswith("keep the settings")


def test_a_trial_that_fails_is_said_and_the_search_goes_on() -> None:
    machine = Machine({"max_num_seqs": 0.5}, fails="placement")
    found, said = tuned(machine, config_of(*LOCKSTEP))
    assert any(line.startswith("failed: ") and line.endswith("no room for it") for line in said)
    assert found.best.step_s == 0.5
    with pytest.raises(ConfigError, match="no room for it"):
        search(config_of(), _fails, most=3, say=lambda line: None)


def _fails(name: str, overrides: Sequence[str]) -> Path:
    raise RuntimeError("no room for it")


def test_no_more_trials_than_asked() -> None:
    machine = Machine({})
    tuned(machine, config_of(*LOCKSTEP), most=2)
    assert len(machine.asked) == 2


@pytest.mark.slow
def test_candidates_are_settings_that_the_config_takes() -> None:
    config = config_of(*LOCKSTEP)
    for cores in (1, 2, 8):
        found = candidates(config, calibration(config), num_cores=cores)
        assert any("cluster.placement" in c.overrides for c in found) == (cores > 1)
        for candidate in found:
            changed = load_config("quickstart", [*LOCKSTEP, *(f"{k}={v}" for k, v in candidate.overrides.items())])
            for key, value in candidate.overrides.items():
                own: Any = changed
                for part in key.split("."):
                    own = own[part] if isinstance(own, dict) else getattr(own, part)
                assert own == value, key


def halves_of(*overrides: str, environment_s: float | None = 1.0, cores: int = 2) -> list[Candidate]:
    config = config_of(*LOCKSTEP, *overrides)
    found = candidates(config, calibration(config, environment_s=environment_s), num_cores=cores)
    return [candidate for candidate in found if "train.stream_groups" in candidate.overrides]


def test_in_lockstep_one_half_is_generated_while_environments_take_their_time_for_the_other() -> None:
    [halves] = halves_of()
    together = {"cluster.placement": "together", "cluster.cpus_per_generator": 2, "cluster.cpus_per_trainer": 2}
    assert halves.overrides == {"rollout.engine.max_num_seqs": 4 * 8, "train.stream_groups": 4, **together}
    config_of(*LOCKSTEP, *(f"{key}={value}" for key, value in halves.overrides.items()))
    [apart] = halves_of(cores=1)
    assert apart.overrides == {"rollout.engine.max_num_seqs": 4 * 8, "train.stream_groups": 4}
    assert halves_of(environment_s=None) == []
    assert halves_of(environment_s=1e-6) == [], "less than a batch takes by far"
    assert halves_of("staleness.max_policy_lag=2") == [], "others are generated meanwhile"
    assert halves_of("algorithm.advantage.name=whitened") == [], "refused by the config"


def test_in_lockstep_each_core_can_have_an_engine() -> None:
    config = config_of(*LOCKSTEP)
    [two] = [c for c in candidates(config, calibration(config), num_cores=2) if "rollout.num_generators" in c.overrides]
    together = {"cluster.placement": "together", "cluster.cpus_per_trainer": 2}
    assert two.overrides == {**together, "rollout.num_generators": 2, "cluster.cpus_per_generator": 1}
    config_of(*LOCKSTEP, *(f"{key}={value}" for key, value in two.overrides.items()))
    [four] = [
        c for c in candidates(config, calibration(config), num_cores=9) if "rollout.num_generators" in c.overrides
    ]
    assert (four.overrides["rollout.num_generators"], four.overrides["cluster.cpus_per_generator"]) == (4, 2)
    with_lag = config_of(*LOCKSTEP, "staleness.max_policy_lag=2")
    found = candidates(with_lag, calibration(with_lag), num_cores=2)
    assert not any("rollout.num_generators" in c.overrides for c in found)


def test_what_follows_more_engines_is_for_each_of_them() -> None:
    found, _ = tuned(Machine({"num_generators=2": 0.8, "stream_groups": 0.9}), config_of(*LOCKSTEP), environment_s=1.0)
    best = found.best.candidate.overrides
    assert (best["rollout.num_generators"], best["cluster.cpus_per_generator"]) == (2, 1)
    assert (best["rollout.engine.max_num_seqs"], best["train.stream_groups"]) == (16, 4), "half of 64, in two engines"
    found, _ = tuned(Machine({"stream_groups": 0.9}), config_of(*LOCKSTEP), environment_s=1.0)
    best = found.best.candidate.overrides
    assert (best["rollout.engine.max_num_seqs"], best["cluster.cpus_per_generator"]) == (32, 2)


def test_more_cores_do_not_shorten_what_environments_take() -> None:
    config = config_of(*LOCKSTEP)
    of: list[list[float]] = []
    for seconds in (None, 2.0):
        found = candidates(config, calibration(config, environment_s=seconds), num_cores=2)
        expected = [(c.overrides.get("cluster.placement"), c.expected_s) for c in found]
        of.append([s for placement, s in expected if placement in ("together", "turns") and s is not None])
    assert [after - before for before, after in zip(*of, strict=True)] == pytest.approx([2, 2], rel=0.1)


def test_what_is_for_lockstep_alone_is_not_tried_with_a_larger_bound() -> None:
    slower, _ = tuned(Machine({}), config_of(*LOCKSTEP), environment_s=1.0)
    assert any("train.stream_groups" in trial.candidate.overrides for trial in slower.trials)
    machine = Machine({"max_policy_lag": 0.7})
    larger, _ = tuned(machine, config_of(*LOCKSTEP), environment_s=1.0)
    assert "staleness.max_policy_lag" in larger.best.candidate.overrides
    asked = [override for overrides in machine.asked for override in overrides]
    assert not any("stream_groups" in override or "=together" in override for override in asked)


def test_a_lag_bound_that_is_to_stay_stays() -> None:
    config = config_of(*LOCKSTEP)
    own = calibration(config)
    assert any("staleness.max_policy_lag" in c.overrides for c in candidates(config, own, num_cores=2))
    kept = candidates(config, own, num_cores=2, keep_lag=True)
    assert kept
    assert not any("staleness.max_policy_lag" in c.overrides for c in kept)


def test_it_is_said_what_faster_settings_give_up() -> None:
    found, _ = tuned(Machine({"stream_groups": 0.8}), config_of(*LOCKSTEP), environment_s=1.0)
    assert "does not decide the weights to the last bit" in found.in_words()
    found, _ = tuned(Machine({"max_num_seqs": 0.8}), config_of(*LOCKSTEP))
    assert "\n" not in found.in_words().partition("\n  ")[2]


def test_in_turns_no_keys_are_kept() -> None:
    config = config_of("staleness.in_flight=keep")
    [turns] = [c for c in candidates(config, calibration(config), num_cores=2) if "turns" in c.overrides.values()]
    changed = config_of("staleness.in_flight=keep", *(f"{key}={value}" for key, value in turns.overrides.items()))
    assert (changed.cluster.placement, changed.staleness.in_flight) == ("turns", "recompute")
    as_it_is = config_of("staleness.in_flight=off")
    [turns] = [c for c in candidates(as_it_is, calibration(as_it_is), num_cores=2) if "turns" in c.overrides.values()]
    assert "staleness.in_flight" not in turns.overrides


def fewer_versions(*overrides: str, publish_s: float) -> list[Candidate]:
    small = ("stages.async_rl.train.groups_per_step=8", "staleness.reorder_window=1", "rollout.pull_every=1")
    config = config_of(*small, *overrides)
    found = candidates(config, replace(calibration(config), publish_s=publish_s), num_cores=2)
    return [candidate for candidate in found if tuning.PUBLISH_EVERY in candidate.overrides]


def test_fewer_versions_are_tried_where_one_costs_a_share_of_a_step_and_the_bound_allows_it() -> None:
    [candidate] = fewer_versions("staleness.max_policy_lag=4", publish_s=0.2)
    every = candidate.overrides[tuning.PUBLISH_EVERY]
    assert every in (2, 3)
    assert candidate.expected_s is not None
    assert candidate.expected_s > 0
    config_of("staleness.max_policy_lag=4", f"{tuning.PUBLISH_EVERY}={every}")
    assert fewer_versions("staleness.max_policy_lag=4", publish_s=0.0) == []
    assert fewer_versions("staleness.max_policy_lag=0", publish_s=0.2) == [], "each step waits for its version"
    [held_out] = fewer_versions("staleness.max_policy_lag=4", "eval.every=4", publish_s=0.2)
    assert held_out.overrides == {tuning.PUBLISH_EVERY: 2}, "only published versions are evaluated"
    [again] = fewer_versions("staleness.max_policy_lag=6", "param_server.publish_every=2", publish_s=0.6)
    assert again.overrides[tuning.PUBLISH_EVERY] in (4, 6)
    [pulled] = fewer_versions("staleness.max_policy_lag=6", "rollout.pull_every=2", publish_s=0.6)
    assert pulled.overrides[tuning.PUBLISH_EVERY] in (4, 6)
    each = config_of("staleness.max_policy_lag=4", "rollout.pull_every=1")
    found, _ = tuned(Machine({"publish_every": 0.8}), each, publish_s=1.0)
    assert "within the same lag bound" in found.in_words()


def test_the_most_versions_that_save_enough_and_leave_every_schedule_possible_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(
        "stages.async_rl.train.groups_per_step=8",
        "staleness.reorder_window=1",
        "staleness.max_policy_lag=2",
        "rollout.pull_every=1",
    )
    times = {1: 1.0, 2: 0.9625, 3: 0.95}

    def publications(*schedules: Candidate) -> list[dict[str, Any]]:
        found = tuning._publications(config, calibration(config), schedules)
        return [dict(candidate.overrides) for candidate in found]

    predicted = lambda _, settings, **__: SimpleNamespace(step_s=times[settings.publish_every])  # noqa: E731
    monkeypatch.setattr(tuning, "predict", predicted)
    assert publications() == [{tuning.PUBLISH_EVERY: 3}], "two save less than a twentieth"
    times[2] = 0.949
    assert publications() == [{tuning.PUBLISH_EVERY: 2}], "as good as three"
    times[2], times[3] = 0.94, 0.8
    assert publications() == [{tuning.PUBLISH_EVERY: 3}]
    wider = Candidate({"staleness.reorder_window": 8}, "may be found before")
    assert publications(wider) == [{tuning.PUBLISH_EVERY: 2}], "three and that window are refused"


def test_steps_that_differ_by_turns_count_alike() -> None:
    """Every second one pays for a version."""
    rows = [{"step/total_s": s} for s in (9.0, 9.0, 9.0, 9.0, *([1.0, 2.0] * 4), 1.0)]
    assert step_seconds(rows) == 1.0
    assert step_seconds(rows, period=2) == 1.5
    assert step_seconds([*rows[:6], *([{"step/total_s": 9.0}]), *rows[7:]], period=2) == 1.5, "one that took long"
    assert step_seconds(rows, period=5) == pytest.approx(13 / 9), "too few of each"
    assert step_seconds(rows[:4], period=2) is None


def test_only_settled_steps_count() -> None:
    rows = [{"step/total_s": s} for s in (9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0)]
    assert step_seconds([*rows, {"eval/reward": 1.0}]) == 2.0
    assert step_seconds(rows[:4]) is None
    assert Candidate({}, "").expected_s is None


def test_the_command_runs_earlier_stages_once_and_trials_from_their_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, str, list[str]]] = []

    def runner(config: str, folder: Path, timeout_s: float) -> command.Run:
        def run(recipe: str, name: str, overrides: Sequence[str]) -> Path:
            asked.append((recipe, name, list(overrides)))
            if recipe == "async_rl":
                raise RuntimeError("enough of it")
            return tmp_path / "before"

        return run

    monkeypatch.setattr(command, "runner", runner)
    done = CliRunner().invoke(app, ["tune", "quickstart", "--out", str(tmp_path)])
    assert isinstance(done.exception, ConfigError)
    assert [(recipe, name) for recipe, name, _ in asked] == [("sft", "before"), ("async_rl", "trial-0")]
    given = asked[1][2]
    assert {f"model.path={tmp_path / 'before'}", "model.init=null", "stages.sft=null"} <= set(given)
    [alone] = plan_run("quickstart", "async_rl", given)
    assert (alone.config.train.steps, alone.config.eval.at_start) == (20, False)


@pytest.mark.parametrize(
    ("overrides", "published"),
    [
        (["eval.every=10", "rollout.pull_every=4"], ["param_server.publish_every=1"]),
        (["eval.every=8", "rollout.pull_every=4"], []),
        (["eval.every=10", "rollout.pull_every=4", "param_server.publish_every=2"], ["param_server.publish_every=2"]),
    ],
)
def test_trials_publish_as_often_as_the_run_will_though_they_evaluate_nothing(
    overrides: list[str], published: list[str]
) -> None:
    given = ["stages.sft=null", "model.path=.", "model.init=null", "staleness.max_policy_lag=12", *overrides]
    own = load_config("quickstart", given, recipe="async_rl")
    told = command.unwatched(own)
    assert [each for each in told if each.startswith("param_server")] == published
    trial = load_config("quickstart", [*given, *told], recipe="async_rl")
    assert derive(trial).publish_every == derive(own).publish_every


def test_mistakes_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "runner", lambda *_: pytest.fail("something ran"))
    for arguments in (["--steps", "5"], ["--trials", "0"], ["cluster.placement=turns"]):
        done = CliRunner().invoke(app, ["tune", "quickstart", *arguments])
        assert isinstance(done.exception, ConfigError), arguments


def test_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = tuned(Machine({"max_policy_lag": 0.7}), config_of(*LOCKSTEP))
    said = json.loads(json.dumps(found.as_dict()))
    assert said["step_s_after"] == pytest.approx(0.7)
    assert said["trials"][0] == {"overrides": {}, "step_s": 1.0, "expected_s": None}
