"""`leeway plan` as users run it, and its calibration on a run whose speeds are known."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from leeway.config import derive, plan_run, run_yaml
from leeway.config.errors import ConfigError
from leeway.planning.advice import advice_after
from leeway.planning.calibration import calibrate, open_run
from leeway.planning.predict import predict
from leeway.planning.search import advise

from .conftest import Done

SRC = Path(__file__).resolve().parents[2] / "src"
NUMBERS = ("--generate-tokens-per-s", "8000", "--train-tokens-per-s", "12000", "--length", "lognormal:300,1,2000")

# The run below: 48 groups x 8 of 5 tokens after prompts of 10. A pass takes 10 ms and 50 us for each token in it; the
# first token of a response comes with its prompt, of which a pass takes 2048 tokens.
PASS_S, TOKEN_S = 0.010, 50e-6
LATENCY_S = 0.02
FIRST_S, FURTHER_S = LATENCY_S + PASS_S + 8 * 10 * TOKEN_S, PASS_S + 8 * TOKEN_S
GROUPS_AT_ONCE = 96  # twice a batch
MANY_S = (
    LATENCY_S + (GROUPS_AT_ONCE * 8 * 4 / 256 + GROUPS_AT_ONCE * 80 / 2048) * PASS_S + GROUPS_AT_ONCE * 8 * 14 * TOKEN_S
)
GENERATE_S = MANY_S / 2  # of one batch
TRAIN_S, PAUSE_S, STEP_S = 0.6, 0.07, 0.65
# In the run a batch's 384 sequences are 256 and then 128.
GENERATING_S = LATENCY_S + 2 * 5 * PASS_S + 48 * 8 * 14 * TOKEN_S


@pytest.fixture
def plan(leeway: Callable[..., Done]) -> Callable[..., Done]:
    return functools.partial(leeway, "plan")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a run of the quickstart's second stage leaves behind, with the speeds above."""
    folder = tmp_path / "run"
    overrides = ["stages.sft=null", "model.init=null", "model.path=some/model", "staleness.in_flight=recompute"]
    overrides += ["rollout.pull_every=1", "stages.async_rl.train.steps=40", "stages.async_rl.train.groups_per_step=48"]
    stages = plan_run("quickstart", "async_rl", overrides)
    stage = folder / "stages" / "async_rl"
    (stage / "rollouts").mkdir(parents=True)
    text = run_yaml(stages)
    assert "name: single_turn" in text
    # Planned far from the user's own environment.
    (folder / "config.yaml").write_text(text.replace("name: single_turn", "name: my_env:MyEnv"))
    rows: list[dict] = [{"step": 0, "role": "collector", "collector/pause_s": PAUSE_S, "collector/generate_frac": 0.0}]
    for step in range(1, 41):
        rows += [
            {
                "step": step,
                "role": "trainer",
                "limit/generate_s": GENERATE_S,
                "limit/train_s": TRAIN_S,
                "limit/first_token_s": FIRST_S,
                "limit/token_s": FURTHER_S,
                "limit/step_s": TRAIN_S,
                "step/forward_backward_s": TRAIN_S - 0.01,
                "step/optim_s": 0.01,
                "step/publish_s": 0.02,
                "step/wait_for_batch_s": 0.01,
                "step/total_s": STEP_S,
                "train/response_tokens/total": 48 * 8 * 5.0,
                "train/response_tokens/mean": 5.0,
                "train/response_tokens/max": 5.0,
                "train/tokens_in_pass": 48 * 8 * 15.0,
            },
            {
                "step": step,
                "role": "collector",
                "collector/pause_s": PAUSE_S,
                "collector/generate_frac": GENERATING_S / STEP_S,
                "param_server/proof_s": 0.03,
            },
            {"step": step, "role": "driver", "param_server/publish_s": 0.03, "replay/groups_taken": 48.0 * step}
            | {"replay/filtered": 0.0, "replay/failed": 0.0},
        ]
    (stage / "metrics.jsonl").write_text("".join(json.dumps(row | {"time": 0.0}) + "\n" for row in rows))
    rollout = {"prompt_tokens": [1] * 10, "response_tokens": [2] * 5}
    (stage / "rollouts" / "step-000001.jsonl").write_text((json.dumps(rollout) + "\n") * 16)
    return folder


@pytest.mark.slow
def test_the_speeds_of_a_run_are_found_again(run: Path) -> None:
    found = calibrate(open_run(run))
    assert found.pass_s == pytest.approx(PASS_S, rel=0.02)
    assert found.token_s == pytest.approx(TOKEN_S, rel=0.02)
    assert found.latency_s == pytest.approx(LATENCY_S, rel=0.05)
    assert found.train_token_s == pytest.approx((TRAIN_S - 0.01) / (48 * 8 * 15))
    assert (found.pause_s, found.canary_s, found.upload_s) == pytest.approx((PAUSE_S, 0.03, 0.03))
    assert found.overhead_s == pytest.approx(STEP_S - TRAIN_S - 0.03)
    assert (found.prompt_tokens, found.lengths.mean, found.kept_frac) == (10, 5, 1)
    assert found.measured_step_s == pytest.approx(STEP_S)
    # It generated no longer than alone, so neither side slows the other down.
    assert 0.9 < found.generate_slowdown < 1.1


@pytest.mark.slow
def test_the_cost_of_a_version_is_found_whichever_steps_pay_for_it(run: Path) -> None:
    config, metrics = run / "config.yaml", run / "stages/async_rl/metrics.jsonl"
    assert calibrate(open_run(run)).publish_s == pytest.approx(0.02)
    text = config.read_text()
    assert "publish_every: null" in text
    config.write_text(text.replace("publish_every: null", "publish_every: 2"))
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows:  # the copy in the step before it, the canary in the one behind
        if "step/publish_s" in row:
            row["step/publish_s"] = 0.01 if row["step"] % 2 == 0 else 0.03
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert calibrate(open_run(run)).publish_s == pytest.approx(0.04)


@pytest.mark.slow
def test_moments_without_any_generator_say_nothing_of_its_speed(run: Path) -> None:
    metrics = run / "stages/async_rl/metrics.jsonl"
    replaced = {"step": 3, "role": "collector", "collector/restarts": 1.0, "collector/interval_s": 20.0, "time": 0.0}
    before = calibrate(open_run(run))
    metrics.write_text(metrics.read_text() + json.dumps(replaced) + "\n")
    assert calibrate(open_run(run)) == before


@pytest.mark.slow
def test_the_speeds_of_a_run_with_long_answers_are_found_again(run: Path) -> None:
    """Of those only the first tokens are measured, of one wave that fills the engine: 32 groups, all equally long."""
    config, stage = run / "config.yaml", run / "stages/async_rl"
    text = config.read_text().replace("max_response_tokens: 8", "max_response_tokens: 1000")
    config.write_text(text.replace("max_model_len: 64", "max_model_len: 2048"))
    wave_first_s = LATENCY_S + 32 * 80 / 2048 * PASS_S + 32 * 80 * TOKEN_S
    further_s = PASS_S / 256 + TOKEN_S
    lengths = [100, 300, 500, 700, 900]
    rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if "limit/generate_s" in row:
            row["limit/generate_s"] = wave_first_s / 256 * 384 + further_s * 384 * 499
            row["train/response_tokens/total"] = 384 * 500.0
    (stage / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = [{"prompt_tokens": [1] * 10, "response_tokens": [2] * n} for n in lengths]
    (stage / "rollouts/step-000001.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers * 4))
    found = calibrate(open_run(run))
    # The rows of collectors are of short answers: the fit takes that for engines twice as fast, the most it knows.
    assert found.pass_s == pytest.approx(PASS_S / 2, rel=0.03)
    assert found.token_s == pytest.approx(TOKEN_S / 2, rel=0.03)


@pytest.mark.slow
def test_generation_that_takes_longer_beside_training_is_seen(run: Path) -> None:
    file = run / "stages/async_rl/metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row.get("collector/generate_frac"):
            row["collector/generate_frac"] *= 1.3
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert calibrate(open_run(run)).generate_slowdown > 1.15


@pytest.mark.slow
def test_advice_after_a_run_is_one_line_and_none_after_a_short_one(run: Path) -> None:
    stage, config = run / "stages/async_rl", open_run(run).config
    line = advice_after(config, stage)
    assert line is not None
    assert line.startswith("the step of 0.65 s is at 9")  # the trainer decides, and is busy
    assert "\n" not in line
    file = stage / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:20]))
    assert advice_after(config, stage) is None


@pytest.mark.slow
def test_what_groups_spend_in_the_environment_is_planned_with(run: Path) -> None:
    """One group of sixteen is slow: every step of lockstep waits for such a one, and a larger bound hides it."""
    stage = run / "stages/async_rl"
    row = {"prompt_tokens": [1] * 10, "response_tokens": [2] * 5}
    rows = [row | {"group_id": i, "environment_s": 8.0 if i == 3 else 0.5} for i in range(16) for _ in range(2)]
    (stage / "rollouts" / "step-000001.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    lockstep = ["staleness.max_policy_lag=0", "staleness.reorder_window=1"]
    found = calibrate(open_run(run, lockstep))
    assert found.environment_s is not None
    assert found.environment_s.mean == pytest.approx((15 * 0.5 + 8.0) / 16)
    assert 8.0 < predict(found, found.settings).step_s < 10.0
    # Waiting is no work of the engine: it is found as fast as without.
    at_once = calibrate(open_run(run)).pass_s
    for row in rows:
        row["environment_s"] = 0.0
    (stage / "rollouts" / "step-000001.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert at_once == calibrate(open_run(run)).pass_s == pytest.approx(PASS_S, rel=0.02)
    line = advise(found)
    assert "staleness.max_policy_lag=" in line, line


def test_a_run_that_is_too_short_or_none_is_refused(run: Path, tmp_path: Path) -> None:
    file = run / "stages/async_rl/metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:20]))
    with pytest.raises(ConfigError, match="at least 10"):
        calibrate(open_run(run))
    file.unlink()
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl"):
        open_run(run)
    with pytest.raises(ConfigError, match="nothing there"):
        open_run(tmp_path / "elsewhere")


@pytest.mark.slow
def test_plan_of_a_run_prints_a_table_a_recommendation_and_draws(run: Path, plan: Callable[..., Done]) -> None:
    done = plan("--from", "run", "-L", "0,1,2", "--reorder-window", "1,48")
    assert done.returncode == 0, done.stderr
    assert "of limit" in done.stdout
    assert "the run itself: 0.65 s a step measured" in done.stdout
    assert "recommended: " in done.stdout
    header = (run / "plan.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    assert width > 1000
    assert height > 300
    assert (run / "plan.png").stat().st_size > 20_000


@pytest.mark.slow
def test_settings_of_the_run_can_be_changed(run: Path, plan: Callable[..., Done]) -> None:
    plain, changed = (
        json.loads(plan("--from", "run", "-L", "2", "--json", *more).stdout)
        for more in ((), ("stages.async_rl.train.groups_per_step=96", "rollout.num_generators=2"))
    )
    assert plain["as_it_is"]["settings"]["groups_per_step"] == 48
    assert plain["as_it_is"]["step_s"] == pytest.approx(STEP_S, rel=0.1)
    assert changed["as_it_is"]["settings"]["generators"] == 2
    assert changed["as_it_is"]["step_s"] == pytest.approx(2 * plain["as_it_is"]["step_s"], rel=0.15)
    assert not (run / "plan.png").exists()  # --json draws nothing


@pytest.mark.slow
def test_plan_of_numbers_tries_splits_of_the_devices(plan: Callable[..., Done], tmp_path: Path) -> None:
    done = plan(*NUMBERS, "--gpus", "16", "-L", "1,2", "--json", "--out", "plans")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["predictions"]
    assert {p["settings"]["generators"] + p["settings"]["trainers"] for p in found} == {16}
    assert {p["settings"]["max_policy_lag"] for p in found} == {1, 2}
    assert len({p["settings"]["generators"] for p in found}) >= 2
    assert (tmp_path / "plans/plan.png").exists()


@pytest.mark.slow
def test_plan_of_a_bundled_config_takes_its_settings_and_bounds_that_they_allow(plan: Callable[..., Done]) -> None:
    done = plan("--config", "gsm8k_qwen2_5_1_5b", *NUMBERS, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    settings = said["as_it_is"]["settings"]
    assert {p["settings"]["max_policy_lag"] for p in said["predictions"]} == {0, 10, 20, 40, 80}
    config = plan_run("gsm8k_qwen2_5_1_5b", "async_rl")[-1].config
    assert settings["groups_per_step"] == config.train.groups_per_step
    assert settings["publish_every"] == derive(config).publish_every == 10
    assert {p["settings"]["publish_every"] for p in said["predictions"] if p["settings"]["max_policy_lag"] < 20} == {1}
    assert {p["settings"]["publish_every"] for p in said["predictions"] if p["settings"]["max_policy_lag"] > 19} == {10}


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ((), "--generate-tokens-per-s: got nothing"),
        (("--from", "nowhere"), "nothing there"),
        (("--from", "nowhere", "--config", "quickstart"), "one of the two"),
        ((*NUMBERS, "-L", "1,x"), "--max-policy-lag: got '1,x'"),
        ((*NUMBERS, "-L", "-1"), "whole numbers of 0 or more"),
        ((*NUMBERS, "--generators", "0"), "--generators"),
        ((*NUMBERS, "--length", "long"), "--length: got 'long'"),
        ((*NUMBERS, "--gpus", "1"), "more devices"),
        ((*NUMBERS, "--gpus", "8", "--trainers", "2"), "--gpus tries several splits itself"),
        ((*NUMBERS, "--generator-speed", "0"), "--generator-speed: got 0"),
        ((*NUMBERS, "--sequence-tokens-per-s", "9000"), "--sequence-tokens-per-s"),
        ((*NUMBERS, "train.steps=3"), "--from or --config"),
        (("--config", "quickstart", *NUMBERS, "staleness.max_lag=1"), "staleness.max_policy_lag"),
    ],
)
def test_wrong_input_exits_2_with_one_line(
    args: tuple[str, ...], word: str, plan: Callable[..., Done], tmp_path: Path
) -> None:
    done = plan(*args)
    assert done.returncode == 2
    assert word in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
