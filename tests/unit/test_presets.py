"""`algorithm.name` fills in what the user left out, and names nothing that is not there."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import get_args

import pytest

from leeway.algorithms.advantages import ADVANTAGES
from leeway.algorithms.aggregation import AGGREGATIONS
from leeway.algorithms.build import objective_of
from leeway.algorithms.corrections import CORRECTIONS
from leeway.algorithms.kl import KL_ESTIMATORS
from leeway.algorithms.pieces import GIVEN_TO_ADVANTAGES, GIVEN_TO_LOSSES, POLICY_LOSSES, check_pieces
from leeway.algorithms.turns import TURN_ADVANTAGES
from leeway.config import Config, ConfigError, derive, find_recipe, load_config
from leeway.config.learning import AlgorithmConfig, AlgorithmName
from leeway.config.load import to_yaml
from leeway.config.presets import ADVANTAGE_OPTIONS, NEED_NO_GROUP, POLICY_LOSS_OPTIONS, PRESETS

MINIMAL = "model: {path: org/model}\ntask: {path: t.jsonl}\ntrain: {steps: 12}\n"


@pytest.fixture
def minimal(tmp_path: Path) -> str:
    file = tmp_path / "c.yaml"
    file.write_text(MINIMAL)
    return str(file)


def refused(file: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(file, overrides)
    text = str(error.value)
    assert "\n" not in text
    return text


def options_of(function, given: tuple[str, ...]) -> set[str]:
    parameters = inspect.signature(getattr(function, "of_group", function)).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - set(given)


def test_names_and_options_in_the_config_are_those_of_the_functions() -> None:
    assert set(PRESETS) == set(get_args(AlgorithmName))
    assert {n: set(o) for n, o in ADVANTAGE_OPTIONS.items()} == {
        n: options_of(f, GIVEN_TO_ADVANTAGES) for n, f in (ADVANTAGES | TURN_ADVANTAGES).items()
    }
    assert {n: set(o) for n, o in POLICY_LOSS_OPTIONS.items()} == {
        n: options_of(f, GIVEN_TO_LOSSES) for n, f in POLICY_LOSSES.items()
    }
    for field, names in (("aggregation", AGGREGATIONS), ("correction", CORRECTIONS), ("kl_estimator", KL_ESTIMATORS)):
        assert set(get_args(AlgorithmConfig.model_fields[field].annotation)) == set(names)


NEEDS = {
    "on_policy_distill": ["algorithm.reference_path=org/teacher"],
    "jsd": ["algorithm.reference_path=org/teacher"],
    "mix": ["algorithm.expert_path=experts.jsonl"],
    "rloo": ["staleness.max_policy_lag=0"],
    "remax": ["staleness.max_policy_lag=0"],
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_and_makes_an_objective(minimal: str, name: str, tmp_path: Path) -> None:
    config = load_config(minimal, [f"algorithm.name={name}", *NEEDS.get(name, [])])
    for section, values in PRESETS[name].items():
        assert {key: getattr(getattr(config, section), key) for key in values} == values
    check_pieces(config.algorithm)
    objective = objective_of(config, find_recipe("async_rl"))
    assert objective.needs_reference is (name in ("on_policy_distill", "jsd"))
    assert not objective.needs_proximal
    # What is written down loads again as the same settings.
    copy = tmp_path / "copy.yaml"
    copy.write_text(to_yaml(config))
    assert load_config(str(copy)) == config


def test_what_the_user_sets_wins(minimal: str) -> None:
    plain = load_config(minimal, ["algorithm.name=dapo"])
    assert (plain.algorithm.aggregation, plain.replay.operators) == ("token_mean", ["filter_zero_variance"])
    own = load_config(
        minimal,
        ["algorithm.name=dapo", "algorithm.aggregation=fixed_length", "replay.operators=[]"],
    )
    assert (own.algorithm.aggregation, own.replay.operators) == ("fixed_length", [])
    assert own.algorithm.overlong_buffer_frac == plain.algorithm.overlong_buffer_frac


def test_the_default_is_grpo(minimal: str) -> None:
    assert load_config(minimal).algorithm == AlgorithmConfig()
    assert Config().algorithm.name == "grpo"


def test_a_stage_may_have_a_preset_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(MINIMAL + "algorithm: {clip_high: 0.5}\nstages: {async_rl: {algorithm: {name: gspo}}}\n")
    algorithm = load_config(str(file)).algorithm
    assert (algorithm.policy_loss, algorithm.clip_low, algorithm.clip_high) == ("gspo", 3e-4, 0.5)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["algorithm.name=grop"], ["algorithm.name: got 'grop'"]),
        (["algorithm.policy_loss=clp"], ["algorithm.policy_loss: got 'clp'", "did you mean clip?"]),
        (["algorithm.advantage=no_such_pkg.mod:f"], ["algorithm.advantage", "no_such_pkg.mod"]),
        (
            ["algorithm.name=sapo", "algorithm.policy_loss_options.tau_poss=1"],
            ["algorithm.policy_loss_options.tau_poss", "did you mean tau_pos?"],
        ),
        (["algorithm.advantage_options.tau=1"], ["an option of grpo (it has none)"]),
        (["algorithm.name=rloo", "algorithm.group_size=1"], ["algorithm.group_size: got 1", "advantage rloo"]),
        (
            ["algorithm.name=reinforce_pp", "algorithm.group_size=1", "replay.operators=[filter_zero_variance]"],
            ["replay.operators", "group of one"],
        ),
        (
            ["algorithm.name=rloo"],
            ["staleness.max_policy_lag: got 2", "0, or a correction", "algorithm.correction=tis"],
        ),
        (["algorithm.name=remax"], ["staleness.max_policy_lag: got 2", "advantage reward has no ratio"]),
        (
            [
                "algorithm.name=rloo",
                "staleness.max_policy_lag=1",
                "train.updates_per_batch=2",
                "train.groups_per_step=4",
            ],
            ["staleness.max_policy_lag: got 1", "train.updates_per_batch=1"],
        ),
        (["algorithm.policy_loss=reinforce"], ["staleness.max_policy_lag: got 2", "advantage grpo has no ratio"]),
        (["algorithm.name=asymre", "algorithm.advantage_options.delta=0"], ["delta: got 0", "a number below 0"]),
        (["algorithm.name=asymre", "algorithm.advantage_options.delta=much"], ["delta: got 'much'", "below 0"]),
        (
            ["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"],
            ["algorithm.kl_estimator: got 'k1'", "zero on average"],
        ),
        (["algorithm.kl_target=0.1"], ["algorithm.kl_coef: got 0", "algorithm.kl_target"]),
        (["algorithm.name=on_policy_distill"], ["algorithm.reference_path: got null", "a teacher"]),
        (["algorithm.name=jsd"], ["algorithm.reference_path: got null", "a teacher"]),
        (["algorithm.kl_estimator=jsd", "algorithm.kl_coef=0.1"], ["algorithm.kl_where: got 'loss'", "token"]),
        (["algorithm.name=gigpo", "algorithm.group_size=1"], ["algorithm.group_size: got 1", "advantage gigpo"]),
        (["algorithm.name=mix"], ["algorithm.expert_path: got null", "expert answers"]),
        (["algorithm.reference_path=org/teacher"], ["algorithm.kl_coef: got 0", "reference policy"]),
        (["algorithm.dual_clip=1"], ["algorithm.dual_clip: got 1", "greater than 1"]),
        (
            ["algorithm.correction=m2po", "algorithm.correction_proximal=interpolate"],
            ["algorithm.correction_proximal", "m2po"],
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(minimal: str, overrides: list[str], parts: list[str]) -> None:
    text = refused(minimal, *overrides)
    assert all(part in text for part in parts), text


def test_a_group_of_one_is_enough_where_no_group_is_needed(minimal: str) -> None:
    assert load_config(minimal, ["algorithm.name=reinforce_pp", "algorithm.group_size=1"]).algorithm.group_size == 1
    assert set(NEED_NO_GROUP) <= set(ADVANTAGES)


@pytest.mark.parametrize(
    ("override", "skips"),
    [
        ("algorithm.name=grpo", True),
        ("algorithm.kl_coef=0.01", False),
        ("algorithm.entropy_coef=0.01", False),
        ("algorithm.name=opmd_kimi", False),
        ("train.skip_zero_advantage=false", False),
    ],
)
def test_trajectories_without_advantage_are_skipped_only_where_they_move_nothing(
    minimal: str, override: str, skips: bool
) -> None:
    assert derive(load_config(minimal, [override])).skip_zero_advantage is skips


@pytest.mark.parametrize(
    ("overrides", "scores"),
    [
        ([], False),
        (["algorithm.correction=decoupled"], True),
        (["algorithm.correction=decoupled", "algorithm.correction_proximal=interpolate"], False),
    ],
)
def test_a_take_is_scored_only_where_its_policy_is_asked_for(minimal: str, overrides, scores: bool) -> None:
    config = load_config(minimal, overrides)
    assert derive(config).scores_proximal is scores
    assert objective_of(config, find_recipe("async_rl")).needs_proximal is scores


def test_the_page_explains_every_name() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/algorithms.md").read_text(encoding="utf-8")
    assert [name for name in PRESETS if f"\n| `{name}` |" not in page] == []
    names = [*ADVANTAGES, *TURN_ADVANTAGES, *POLICY_LOSSES, *AGGREGATIONS, *CORRECTIONS, *KL_ESTIMATORS]
    assert [name for name in names if f"`{name}`" not in page] == []
    example = (Path(__file__).resolve().parents[2] / "examples/my_loss.py").read_text(encoding="utf-8")
    assert page.split("```python\n")[1].split("```")[0].strip() in example


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.name=rloo", "algorithm.correction=tis"],
        ["algorithm.name=rloo", "staleness.max_policy_lag=0"],
        ["algorithm.name=asymre"],
        ["algorithm.name=raft"],
        ["algorithm.name=reinforce_pp", "algorithm.kl_coef=0.1"],
    ],
)
def test_what_is_made_for_it_is_not_refused(minimal: str, overrides: list[str]) -> None:
    load_config(minimal, overrides)
