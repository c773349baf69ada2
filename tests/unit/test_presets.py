"""`algorithm.name` fills in what the user left out, and names nothing that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from leeway.algorithms.aggregation import AGGREGATIONS
from leeway.algorithms.kl import KL_ESTIMATORS
from leeway.algorithms.losses import GSPO
from leeway.algorithms.presets import ADVANTAGES, CORRECTIONS, POLICY_LOSSES, PRESETS
from leeway.algorithms.trial import try_pieces
from leeway.config import Config, ConfigError, derive, find_recipe, load_config
from leeway.config.algorithm import AlgorithmConfig
from leeway.config.load import to_yaml
from leeway.config.objective import objective_of
from leeway.config.tree import settings_in

from ..tiers import slow_but_for

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


def test_the_aggregations_of_the_config_are_those_of_the_function() -> None:
    assert set(get_args(AlgorithmConfig.model_fields["aggregation"].annotation)) == set(AGGREGATIONS)


@pytest.mark.parametrize("known", [ADVANTAGES, POLICY_LOSSES, CORRECTIONS, KL_ESTIMATORS])
def test_every_part_is_immutable_has_a_formula_in_its_docstring_and_describes_its_options(known: Any) -> None:
    for name, cls in known.items():
        piece = cls()
        assert piece.name == name
        assert cls.__doc__, name
        assert all(field.description for option, field in cls.model_fields.items() if option != "name"), name
        with pytest.raises(ValidationError):
            piece.name = "other"


NEEDS = {
    "on_policy_distill": ["algorithm.reference_path=org/teacher"],
    "jsd": ["algorithm.reference_path=org/teacher"],
    "mix": ["replay.buffers.experts.path=experts.jsonl"],
    "rloo": ["staleness.max_policy_lag=0"],
    "remax": ["staleness.max_policy_lag=0"],
}


@pytest.mark.parametrize("name", slow_but_for(["grpo", "rloo", "ppo", "remax"], PRESETS))
def test_every_preset_loads_and_makes_an_objective(minimal: str, name: str, tmp_path: Path) -> None:
    config = load_config(minimal, [f"algorithm.name={name}", *NEEDS.get(name, [])])
    dumped = config.model_dump()
    for override in settings_in(PRESETS[name], ""):
        assert override in list(settings_in(dumped, "")), "what a preset picks is what the config holds"
    a = config.algorithm.made()
    try_pieces(a.advantage, a.loss, a.correction, a.estimator)
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
    file.write_text(MINIMAL + "algorithm: {loss: {clip_high: 0.5}}\nstages: {async_rl: {algorithm: {name: gspo}}}\n")
    assert load_config(str(file)).algorithm.loss == GSPO(clip_low=3e-4, clip_high=0.5)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["algorithm.name=grop"], ["algorithm.name: got 'grop'"]),
        (["algorithm.loss.name=clp"], ["algorithm.loss.name: got 'clp'", "did you mean ppo_clip?"]),
        (["algorithm.loss=sapo"], ["algorithm.loss: got 'sapo'", "write algorithm.loss.name=sapo"]),
        (["algorithm.advantage.name=no_such_pkg.mod:f"], ["algorithm.advantage.name", "no_such_pkg.mod"]),
        (
            ["algorithm.name=sapo", "algorithm.loss.tau_poss=1"],
            ["algorithm.loss.tau_poss", "did you mean tau_pos?"],
        ),
        (["algorithm.advantage.tau=1"], ["algorithm.advantage.tau: got 1", "an option of grpo (eps)"]),
        (["algorithm.correction.cap=1"], ["algorithm.correction.cap: got 1", "an option of none (mask_divergence)"]),
        (["algorithm.correction.name=mis", "algorithm.correction.cap=1"], ["algorithm.correction.cap", "of mis ("]),
        (["algorithm.correction=tis"], ["algorithm.correction: got 'tis'", "write algorithm.correction.name=tis"]),
        (["algorithm.name=rloo", "algorithm.group_size=1"], ["algorithm.group_size: got 1", "advantage rloo"]),
        (
            ["algorithm.name=reinforce_pp", "algorithm.group_size=1", "replay.operators=[filter_zero_variance]"],
            ["replay.operators", "group of one"],
        ),
        (
            ["algorithm.name=rloo"],
            ["staleness.max_policy_lag: got 2", "0, or a correction", "algorithm.correction.name=tis"],
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
        (["algorithm.loss.name=reinforce"], ["staleness.max_policy_lag: got 2", "advantage grpo has no ratio"]),
        (["algorithm.name=asymre", "algorithm.advantage.delta=0"], ["delta: got 0", "less than 0"]),
        (["algorithm.name=asymre", "algorithm.advantage.delta=much"], ["delta: got 'much'", "a number"]),
        (
            ["algorithm.kl.coef=0.1", "algorithm.kl.estimator.name=k1"],
            ["algorithm.kl.where: got 'loss'", "zero on average"],
        ),
        (["algorithm.kl.target=0.1"], ["algorithm.kl.coef: got 0", "algorithm.kl.target"]),
        (["algorithm.name=on_policy_distill"], ["algorithm.reference_path: got null", "a teacher"]),
        (["algorithm.name=jsd"], ["algorithm.reference_path: got null", "a teacher"]),
        (["algorithm.kl.estimator.name=jsd", "algorithm.kl.coef=0.1"], ["algorithm.kl.where: got 'loss'", "token"]),
        (["algorithm.name=gigpo", "algorithm.group_size=1"], ["algorithm.group_size: got 1", "advantage gigpo"]),
        (["algorithm.name=mix"], ["replay.buffers.experts.path: got null", "expected a value"]),
        (["algorithm.reference_path=org/teacher"], ["algorithm.kl.coef: got 0", "reference policy"]),
        (["algorithm.loss.dual_clip=1"], ["algorithm.loss.dual_clip: got 1", "greater than 1"]),
        (
            ["algorithm.correction.name=m2po", "algorithm.correction.proximal=interpolate"],
            ["algorithm.correction.proximal", "an option of m2po"],
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(minimal: str, overrides: list[str], parts: list[str]) -> None:
    text = refused(minimal, *overrides)
    assert all(part in text for part in parts), text


def test_a_group_of_one_is_enough_where_no_group_is_needed(minimal: str) -> None:
    assert load_config(minimal, ["algorithm.name=reinforce_pp", "algorithm.group_size=1"]).algorithm.group_size == 1


@pytest.mark.parametrize(
    ("override", "skips"),
    [
        ("algorithm.name=grpo", True),
        ("algorithm.kl.coef=0.01", False),
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
        (["algorithm.correction.name=decoupled"], True),
        (["algorithm.correction.name=decoupled", "algorithm.correction.proximal=interpolate"], False),
    ],
)
def test_a_batch_is_scored_only_where_its_policy_is_asked_for(minimal: str, overrides, scores: bool) -> None:
    config = load_config(minimal, overrides)
    assert derive(config).scores_proximal is scores
    assert objective_of(config, find_recipe("async_rl")).needs_proximal is scores


def test_the_page_explains_every_name() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/algorithms.md").read_text(encoding="utf-8")
    assert [name for name in PRESETS if f"\n| `{name}` |" not in page] == []
    names = [*ADVANTAGES, *POLICY_LOSSES, *AGGREGATIONS, *CORRECTIONS, *KL_ESTIMATORS]
    assert [name for name in names if f"`{name}`" not in page] == []
    example = (Path(__file__).resolve().parents[2] / "examples/my_loss.py").read_text(encoding="utf-8")
    assert page.split("```python\n")[1].split("```")[0].strip() in example


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.name=rloo", "algorithm.correction.name=tis"],
        ["algorithm.name=rloo", "staleness.max_policy_lag=0"],
        ["algorithm.name=asymre"],
        ["algorithm.name=raft"],
        ["algorithm.name=reinforce_pp", "algorithm.kl.coef=0.1"],
    ],
)
def test_what_is_made_for_it_is_not_refused(minimal: str, overrides: list[str]) -> None:
    load_config(minimal, overrides)
