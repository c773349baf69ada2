"""Which runs a lag study is made of, which are refused, and where it stands among the stages."""

from __future__ import annotations

import pytest

from leeway.cli.main import app
from leeway.config import ConfigError, derive, load_config, plan_run
from leeway.config.rules import RL_RULES, check_rules
from leeway.studies.lag_trials import ON_DEMAND, Trial, lag_trials

from ..tiers import slow_but_for

TWO_UPDATES = "stages.async_rl.train.updates_per_batch=2"


def trials_of(*overrides: str) -> list[Trial]:
    return lag_trials(load_config("quickstart", [TWO_UPDATES, *overrides], recipe="frontier"))


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config("quickstart", [TWO_UPDATES, *overrides], recipe="frontier")
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.slow
def test_one_run_per_seed_bound_and_correction_the_smallest_bound_first_within_a_seed() -> None:
    trials = trials_of("seed=7", "frontier.max_policy_lags=[8,lockstep,2]", "frontier.seeds=2")
    # Two updates of a batch: the second one's tokens are one step old at least, which is what lockstep means then.
    assert [(c.seed, c.max_policy_lag, c.correction) for c in trials] == [
        (seed, lag, correction) for seed in (7, 8) for lag in (1, 2, 8) for correction in ("none", "decoupled", "tis")
    ]
    assert trials[0].name == "lag-1-none-seed-7"
    assert len({c.name for c in trials}) == len(trials)
    assert {c.max_policy_lag for c in trials if c.lockstep} == {1}
    assert len(trials_of()) == 4 * 3 * 5


def test_each_runs_settings_are_what_its_name_says_and_pass_the_rules_of_the_recipe() -> None:
    of_the_run = ("staleness.max_policy_lag=6", "staleness.target_policy_lag=5", "staleness.reorder_window=48")
    for trial in trials_of("frontier.seeds=2", *of_the_run):
        config, numbers = trial.config, derive(trial.config)
        check_rules(config, RL_RULES)
        assert (config.seed, config.algorithm.correction.name) == (trial.seed, trial.correction)
        assert (numbers.max_policy_lag, numbers.target_policy_lag, numbers.reorder_window) == (
            trial.max_policy_lag,
        ) * 2 + (1,)
        assert numbers.lockstep == trial.lockstep
        assert config.rollout.pull_every == ON_DEMAND > (config.train.steps or 0)
        assert config.eval.at_start
        assert config.eval.at_end
        assert config.checkpoint.save_hf == "never"


def test_a_bound_that_is_lockstep_by_number_is_not_run_twice() -> None:
    trials = trials_of(
        "frontier.max_policy_lags=[1,lockstep,1]", "frontier.corrections=[tis,none,tis]", "frontier.seeds=1"
    )
    assert [c.name for c in trials] == ["lag-1-tis-seed-0", "lag-1-none-seed-0"]
    assert all(c.lockstep for c in trials)


@pytest.mark.parametrize("publish_every", [1, 3])
@pytest.mark.parametrize("steps", [6, 100, 180])
@pytest.mark.parametrize("evaluations", slow_but_for([3], [1, 2, 3, 7]))
def test_held_out_tasks_are_evaluated_no_more_often_than_asked_for(
    steps: int, evaluations: int, publish_every: int
) -> None:
    trial = trials_of(
        f"stages.async_rl.train.steps={steps}",
        f"frontier.evaluations={evaluations}",
        f"param_server.publish_every={publish_every}",
        "frontier.max_policy_lags=[lockstep]",
        "frontier.seeds=1",
    )[0]
    every = trial.config.eval.every
    in_mid_run = [v for v in range(1, steps) if every and v % every == 0]
    assert len(in_mid_run) + 1 <= evaluations  # and one at the end
    assert all(v % 2 == 0 and v % publish_every == 0 for v in in_mid_run)
    if (steps, evaluations) == (180, 3):
        assert in_mid_run == [60, 120]


def test_a_bound_below_what_the_batches_allow_is_refused_by_the_studys_own_name() -> None:
    text = refused("frontier.max_policy_lags=[lockstep,0,4]")
    assert text.startswith("frontier.max_policy_lags: got 0, expected at least")
    assert "= 1 with" in text
    assert "staleness." not in text


def test_a_study_without_held_out_tasks_is_refused() -> None:
    text = refused("task.holdout_frac=0")
    assert text.startswith("task.holdout_frac: got")
    assert "expected held-out tasks" in text


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("frontier.max_policy_lags=[]", "frontier.max_policy_lags"),
        ("frontier.max_policy_lags=[lock]", "frontier.max_policy_lags"),
        ("frontier.corrections=[tiss]", "frontier.corrections"),
        ("frontier.seeds=0", "frontier.seeds"),
        ("frontier.margin=0", "frontier.margin"),
    ],
)
def test_nonsense_is_refused_by_name(override: str, key: str) -> None:
    assert refused(override).startswith(key)


def test_a_study_takes_the_place_of_the_last_stage_that_it_runs() -> None:
    stages = plan_run("quickstart", "frontier", [TWO_UPDATES])
    assert [(s.name, s.recipe.name) for s in stages] == [("sft", "sft"), ("async_rl", "frontier")]
    training = plan_run("quickstart", "async_rl", [TWO_UPDATES])
    assert stages[-1].config == training[-1].config, "the stage's own settings hold for the study"
    assert [s.recipe.name for s in training] == ["sft", "async_rl"]


def test_of_several_such_stages_it_is_the_last_and_the_earlier_ones_train(tmp_path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        "model: {path: org/model}\n"
        "task: {path: tasks.jsonl, holdout_frac: 0.1}\n"
        "train: {steps: 12, groups_per_step: 4}\n"
        "stages:\n"
        "  one: {recipe: async_rl}\n"
        "  two: {recipe: async_rl, optimizer: {lr: 0.5}}\n"
        "  three: {recipe: sft}\n"
    )
    stages = plan_run(str(file), "frontier")
    assert [(s.name, s.recipe.name) for s in stages] == [("one", "async_rl"), ("two", "frontier")]
    assert stages[-1].config.optimizer.lr == 0.5


@pytest.mark.slow
def test_validate_speaks_of_the_study(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["validate", "quickstart", "--recipe", "frontier", TWO_UPDATES, "task.size=500"]
    app(command, standalone_mode=False)
    assert "frontier" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^frontier.max_policy_lags: got 0"):
        app([*command, "frontier.max_policy_lags=[0]"], standalone_mode=False)
