"""The simulator against closed forms, the system's own rule classes and bounds; and the command that shows it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from leeway.config import plan_run
from leeway.planning import lengths
from leeway.planning.engine_model import Chunk, SimulatedEngine
from leeway.planning.lengths import Distribution
from leeway.planning.model import Calibration, Settings
from leeway.planning.predict import limit_s, predict
from leeway.planning.search import advise, best, best_split, fitting, splits_of, sweep, variants

FIXED = Distribution((101.0,))  # the first token comes with the prompt, 100 are decoded


def job(**changes: object) -> Calibration:
    """One engine that samples 1000 tokens/s in all, of 4 groups x 4 sequences x 100 tokens: 1.6 s. Training: 0.8 s."""
    settings = Settings(groups_per_step=4, group_size=4, max_policy_lag=0, target_policy_lag=0, in_flight="keep")
    plain = Calibration(
        settings=settings, lengths=FIXED, pass_s=0.0, token_s=1e-3, train_token_s=0.8 / 1616, max_sequences=10_000
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def step_s(calibration: Calibration, lag: int, **changes: object) -> float:
    """With all answers equally long, a step is like the one before: a tenth of the usual events says as much."""
    settings = replace(calibration.settings.with_lag(lag), **changes)  # type: ignore[arg-type]
    return predict(calibration, settings, events=4_000).step_s


# ---- closed forms ----------------------------------------------------------------------------------------------------


def test_in_lockstep_a_step_is_generation_and_training_and_the_weight_sync() -> None:
    parts = {"pause_s": 0.3, "canary_s": 0.05, "publish_s": 0.1, "upload_s": 0.07, "optim_s": 0.02, "overhead_s": 0.01}
    found = step_s(job(**parts, hand_off_s=0.04), 0)
    # The upload runs beside the overhead between two steps, the proof beside generation; all else one after the other.
    assert found == pytest.approx(1.6 + 0.8 + 0.3 + 0.1 + 0.07 + 0.02 + 0.04, rel=1e-6)
    slow_proof = step_s(job(**{**parts, "canary_s": 3.0}, hand_off_s=0.04), 0)
    assert slow_proof == pytest.approx(found + 3.0 + 2 * 16e-3 - 1.6), "and two passes beside it"


@pytest.mark.parametrize(("generate_s", "train_s"), [(1.6, 0.8), (1.6, 2.4), (1.6, 1.6)])
def test_with_a_large_lag_a_step_is_the_slower_side_alone(generate_s: float, train_s: float) -> None:
    found = step_s(job(token_s=generate_s / 1600, train_token_s=train_s / 1616), 8)
    assert found == pytest.approx(max(generate_s, train_s), rel=0.01)


def test_the_stop_for_weights_is_paid_by_generation_only() -> None:
    assert step_s(job(pause_s=0.2), 8) == pytest.approx(1.8, rel=0.01)
    assert step_s(job(pause_s=0.2, train_token_s=3.2 / 1616), 8) == pytest.approx(3.2, rel=0.01)


@pytest.mark.slow
def test_recomputing_what_is_in_flight_costs_a_prefill_of_it() -> None:
    kept, again = (step_s(job(), 8, in_flight=way) for way in ("keep", "recompute"))
    assert kept == pytest.approx(1.6, rel=0.01)
    assert again > 1.1 * kept


def test_prompts_are_prefilled_and_shared_blocks_once_per_group() -> None:
    alone = step_s(job(prompt_tokens=50.0, train_token_s=1e-9), 0)
    shared = step_s(job(prompt_tokens=50.0, shared_prompt_tokens=50.0, train_token_s=1e-9), 0)
    assert alone == pytest.approx(1.6 + 16 * 50e-3, rel=1e-3)
    assert shared == pytest.approx(1.6 + 4 * 50e-3, rel=1e-3)


def test_generation_beside_training_is_slower_by_the_slowdown_for_as_long_as_it_trains() -> None:
    # In 2 s of work a second passes beside each half second of training: 1.6 + (2 - 1) * 0.8 / 2.
    assert step_s(job(generate_slowdown=2.0), 8) == pytest.approx(1.6 + 0.8 / 2, rel=0.02)
    assert step_s(job(generate_slowdown=2.0), 0) == pytest.approx(2.4, rel=1e-6)


def test_training_beside_generation_is_slower_by_its_slowdown_for_as_long_as_it_is_generated() -> None:
    # 2.4 s of training, of which 1.6 / 2 are done beside the 1.6 s of generation, and the rest at full pace.
    slow = {"train_token_s": 2.4 / 1616, "train_slowdown": 2.0}
    assert step_s(job(**slow), 8) == pytest.approx(1.6 + (2.4 - 1.6 / 2), rel=0.02)
    assert step_s(job(**slow), 0) == pytest.approx(1.6 + 2.4, rel=1e-6)


@pytest.mark.slow
def test_time_in_the_environment_delays_without_using_the_engine() -> None:
    slow = job(environment_s=Distribution((2.0,)))
    assert step_s(slow, 0) == pytest.approx(1.6 + 2.0 + 0.8, rel=1e-3)
    assert step_s(slow, 8) == pytest.approx(1.6, rel=0.02)


def test_an_engine_has_room_for_so_many_sequences() -> None:
    """pass_s alone: n sequences advance as fast as one, so half the room takes twice the time."""

    def speed(room: int) -> Calibration:
        return job(pass_s=0.01, token_s=0.0, train_token_s=1e-9, max_sequences=room)

    assert step_s(speed(16), 0) == pytest.approx(1.01, rel=1e-3)
    assert step_s(speed(8), 0) == pytest.approx(2.01, rel=1e-2)


def test_more_generators_and_more_trainers_share_the_work() -> None:
    assert step_s(job(), 8, generators=2) == pytest.approx(0.8, rel=0.05)
    assert step_s(job(train_token_s=4e-3), 8, trainers=4) == pytest.approx(1.6, rel=0.05)


@pytest.mark.slow
def test_tokens_of_new_weights_are_withheld_until_their_canary_has_passed() -> None:
    """With slack between T and L nobody waits for a version, so this is all that a slow canary can delay."""
    settings = replace(job().settings.with_lag(8), target_policy_lag=1)
    quick, slow = (predict(job(canary_s=seconds), settings).step_s for seconds in (0.0, 3.0))
    assert quick == pytest.approx(1.6, rel=0.02)
    assert slow > 1.25 * quick


def test_updates_and_publications_are_counted_in_optimizer_steps() -> None:
    found = predict(
        job(train_token_s=3.2 / 1616, publish_s=0.4),
        replace(job().settings.with_lag(7), updates_per_batch=2, publish_every=2),
    )
    assert found.step_s == pytest.approx(1.6 + 0.2, rel=0.02)  # half a batch, and every second step pays for publishing
    assert found.samples_per_s == pytest.approx(16 / (2 * found.step_s))


# ---- the rule --------------------------------------------------------------------------------------------------------

LONG_TAIL = lengths.lognormal(400, 1.0, 4000)


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("in_flight", ["recompute", "keep", "off"])
def test_no_token_is_used_beyond_the_bound_and_the_bound_is_reached(lag: int, window: int, in_flight: str) -> None:
    base = Settings(groups_per_step=8, group_size=4, generators=3, reorder_window=window, in_flight=in_flight)
    settings = fitting(base.with_lag(lag))
    assert settings is not None
    calibration = job(settings=settings, lengths=LONG_TAIL, pass_s=0.01, token_s=1e-5, pause_s=0.5, canary_s=0.1)
    found = predict(calibration, settings, events=1500)
    assert found.lag_max <= lag
    if settings.reorder_window == 1 and in_flight != "off":
        assert found.lag_max == lag
    assert sum(found.lag_share.values()) == pytest.approx(1)


def test_prompts_that_wait_for_their_pass_do_not_hold_up_what_is_drained() -> None:
    """A queue longer than the prefill budget, and new weights that wait for the running sequences to finish."""
    settings = replace(job().settings.with_lag(2), in_flight="off")
    calibration = job(prompt_tokens=50.0, prefill_budget=200, lengths=LONG_TAIL, pass_s=0.01, pause_s=0.1)
    found = predict(calibration, settings, events=2000)
    assert 0 < found.step_s < 20 * job().settings.groups_per_step


@pytest.mark.slow
def test_a_larger_bound_is_never_slower() -> None:
    calibration = job(lengths=LONG_TAIL, pass_s=0.01, token_s=1e-5, train_token_s=1e-4)
    settings = replace(calibration.settings, groups_per_step=16, in_flight="keep")
    times = [predict(calibration, settings.with_lag(lag)).step_s for lag in (0, 1, 2, 4, 8)]
    assert all(later <= earlier * 1.01 for earlier, later in itertools.pairwise(times))
    assert times[0] > 2 * times[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("lag", "room"), [(0, 1.05), (1, 1.15), (3, 1.3)])
def test_long_tails_gain_what_the_limit_says(lag: int, room: float) -> None:
    """Where only the longest response decides, L + 1 steps share it: (Lmax + Tt + Ts) / (L + 1).

    Nothing is faster than that, and strict order comes near to it: a long response holds up those that overlap with it.
    """
    calibration = job(lengths=LONG_TAIL, pass_s=0.01, token_s=0.0, train_token_s=1e-4, pause_s=0.5)
    settings = replace(calibration.settings, groups_per_step=16, in_flight="keep").with_lag(lag)
    found = predict(calibration, settings, events=20_000)
    limit = limit_s(calibration, settings)
    assert 0.97 * limit <= found.step_s <= room * limit


@pytest.mark.slow
def test_a_wider_window_uses_finished_groups_while_they_are_fresh() -> None:
    rare = Distribution((*[10.0] * 199, 3000.0))
    calibration = job(lengths=rare, pass_s=0.01, token_s=0.0, train_token_s=1e-6)
    settings = replace(calibration.settings, groups_per_step=8, group_size=2).with_lag(8)
    strict, wide = (predict(calibration, replace(settings, reorder_window=w)) for w in (1, 17))
    assert wide.lag_mean < 0.9 * strict.lag_mean
    assert wide.step_s < 1.02 * strict.step_s


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 2, 4])
def test_a_wider_window_saves_no_time_at_the_same_bound(lag: int) -> None:
    """It does not give a slow group more steps, and holds back groups that could be under way."""
    calibration = job(lengths=LONG_TAIL, pass_s=0.01, token_s=0.0, train_token_s=1e-4)
    settings = replace(calibration.settings, groups_per_step=8, group_size=2).with_lag(lag)
    strict, batch = (predict(calibration, replace(settings, reorder_window=w), events=20_000) for w in (1, 8))
    assert batch.step_s >= 0.98 * strict.step_s
    assert batch.lag_mean < strict.lag_mean
    if lag == 1:  # one group is under way beside the batch that is trained on
        assert batch.step_s > 1.1 * strict.step_s


def test_tokens_belong_to_the_version_that_was_loaded_when_they_were_sampled() -> None:
    engine = SimulatedEngine(pass_s=0.1, token_s=0.0, max_sequences=8)
    chunk = Chunk(None, 1, 100.0, 0.0)
    engine.submit([chunk])
    engine.advance(3.0)
    engine.paused = True
    engine.advance(5.0)
    engine.load(4, recompute=False)
    engine.resume()
    assert engine.next_end() == pytest.approx(12.0)
    engine.advance(12.0)
    assert engine.finished() == [chunk]
    spans = engine.versions_of(chunk)
    assert spans[0] == (4, pytest.approx(70.0))
    assert sum(tokens for version, tokens in spans if version == 0) == pytest.approx(30.0)


def test_long_queues_of_prompts_are_prefilled_in_passes_of_the_budget() -> None:
    """Three prompts, two in a pass: the first two sample their second token while the third is prefilled."""
    engine = SimulatedEngine(pass_s=1.0, token_s=0.1, max_sequences=8, prefill_budget=20)
    chunks = [Chunk(None, 1, tokens, 10.0) for tokens in (2.0, 3.0, 3.0)]
    engine.submit(chunks)
    ends = []
    while engine.next_end() < float("inf"):
        engine.advance(engine.next_end())
        ends += [(round(engine.now, 6), chunks.index(chunk)) for chunk in engine.finished()]
    # Passes: 1 + 2.0; then 1 + 1.0 and two running 0.2; then two left 1.2; then one 1.1.
    assert ends == [(5.2, 0), (6.4, 1), (7.5, 2)]


# ---- lengths ---------------------------------------------------------------------------------------------------------


def test_distributions_have_the_mean_and_the_tail_that_were_asked_for() -> None:
    assert lengths.lognormal(1200, 0.8).mean == pytest.approx(1200, rel=0.01)
    assert lengths.parse("lognormal:1200,1,8192").largest == 8192
    assert lengths.parse("uniform:10,30").mean == pytest.approx(20)
    assert lengths.parse("7").quantiles == (7.0,)
    halves = Distribution((0.0, 1.0))
    assert halves.longest_of(1) == pytest.approx(0.5)
    assert halves.longest_of(3) == pytest.approx(7 / 8)


@pytest.mark.parametrize(
    "text", ["", "long", "lognormal:1200", "lognormal:a,b", "uniform:9,3", "lognormal:9,1,3", "nan"]
)
def test_distributions_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        lengths.parse(text, least=1.0)


def test_alike_ties_the_members_of_a_group_and_keeps_the_distribution() -> None:
    loose, tied = LONG_TAIL, replace(LONG_TAIL, alike=0.9)
    assert tied.longest_in_group(8) < 0.7 * loose.longest_in_group(8)
    assert tied.longest_in_group(8) > LONG_TAIL.mean


# ---- searching and advising ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_4096_devices_are_simulated_in_few_events() -> None:
    settings = Settings(groups_per_step=1024, group_size=16, generators=3072, trainers=1024).with_lag(2)
    calibration = job(settings=settings, lengths=LONG_TAIL, pass_s=0.01, token_s=1e-5, train_token_s=1e-4, pause_s=1.0)
    found = predict(calibration, settings, events=20_000)
    assert found.num_events < 100_000
    assert found.lag_max <= 2
    assert found.step_s >= 0.9 * found.limit_s


@pytest.mark.slow
def test_the_even_split_gives_both_sides_as_much_to_do() -> None:
    calibration = job(pass_s=0.0, token_s=3e-3, train_token_s=1e-3)
    settings = replace(calibration.settings, groups_per_step=64).with_lag(8)
    ((generators, trainers),) = splits_of(calibration, settings, 32)
    assert (generators, trainers) == (24, 8)
    (chosen, _) = best_split(calibration, settings, 32, events=4000)
    assert sum(chosen) == 32
    assert 6 <= chosen[1] <= 11
    with pytest.raises(ValueError, match="1 devices"):
        splits_of(calibration, settings, 1)


@pytest.mark.slow
def test_the_least_off_policy_of_equally_fast_settings_is_recommended() -> None:
    calibration = job(train_token_s=4e-3)  # the trainer decides: nothing beyond L = 1 is gained
    asked = variants(calibration.settings, lags=[0, 1, 2, 8], windows=[1, 4], splits=[(1, 1)])
    assert fitting(replace(calibration.settings, reorder_window=4)) in asked  # lag 0: window 1
    chosen = best(sweep(calibration, asked, events=4_000))
    assert chosen.settings.max_policy_lag == 1
    assert step_s(calibration, 8, reorder_window=1) == pytest.approx(chosen.step_s, rel=0.02)


@pytest.mark.slow
def test_advice_names_the_change_that_helps_or_that_none_does() -> None:
    lockstep = job(measured_step_s=3.0)
    assert advise(lockstep, events=2_000).startswith(
        "staleness.max_policy_lag=1 would cut the step from 3 s to 2 s (-33%)"
    )
    content = replace(lockstep, settings=lockstep.settings.with_lag(2), train_token_s=4e-3, measured_step_s=6.8)
    assert "at 95% of its limit, and no other" in advise(content, events=2_000)


@pytest.mark.slow
def test_advice_moves_devices_to_the_side_that_needs_them() -> None:
    settings = replace(job().settings, generators=2, trainers=6, groups_per_step=32).with_lag(4)
    assert advise(job(settings=settings), events=2_000).startswith("rollout.num_generators=")


@pytest.mark.parametrize("lag", [2, 3, 4, 6, 9])
@pytest.mark.parametrize("window", [1, 4, 30])
@pytest.mark.parametrize("updates", [1, 2])
def test_a_plan_publishes_as_a_run_with_its_bound_and_window_does(lag: int, window: int, updates: int) -> None:
    pulls = ["stages.sft=null", "rollout.pull_every=2", "stages.async_rl.train.groups_per_step=8"]
    pulls += [f"train.updates_per_batch={updates}"]
    [base] = plan_run("quickstart", "async_rl", [*pulls, "staleness.max_policy_lag=9"])
    for planned in variants(Settings.of(base.config), lags=[lag], windows=[window], splits=[(1, 1)]):
        own = [f"staleness.max_policy_lag={lag}", f"staleness.reorder_window={planned.reorder_window}"]
        [run] = plan_run("quickstart", "async_rl", [*pulls, *own])
        assert planned == Settings.of(run.config)
