"""A recipe is a file: copied, changed, run by path or as a module; what it needs and its rules go with it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leeway.config import (
    ConfigError,
    Recipe,
    bundled_recipe_path,
    bundled_recipes,
    derive,
    find_recipe,
    load_config,
    plan_run,
    run_yaml,
)
from leeway.driver.resume import plan_resume
from leeway.driver.run_record import RunRecord
from leeway.runtime.cluster import ClusterError, check_room, user_module_paths

from .conftest import Done

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["model.init=null", "model.path=org/name"]
CHANGED = """
from leeway import ConfigError, Recipe
from leeway.config.rules import RL_RULES

async def run(context):
    return 3

def steps_are_even(config):
    if config.train.steps % 2:
        raise ConfigError("train.steps", expected="an even number", fix="add one")

RECIPE = Recipe(run=run, generates=True, trains_on="rollouts", rules=(*RL_RULES, steps_are_even))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
    sys.modules.pop("copied_package", None)


def copy(name: str, to: Path) -> str:
    to.parent.mkdir(exist_ok=True)
    to.write_text(bundled_recipe_path(name).read_text())
    return str(to)


@pytest.mark.parametrize("name", bundled_recipes())
def test_a_copy_needs_what_the_original_needs_and_has_its_rules(here: Path, name: str) -> None:
    original, copied = find_recipe(name), find_recipe(copy(name, here / f"copied_{name}.py"))
    assert copied.is_like(original)
    assert not copied.is_same(original)
    assert copied.rules == original.rules
    assert copied.run is not original.run
    assert copied.can_resume == original.can_resume
    assert copied.file == here / f"copied_{name}.py"


@pytest.mark.parametrize("given", ["./copied_rl.py", "copied_rl.py", "copied_package.rl"])
def test_a_copied_recipe_is_held_to_the_lag_rules(here: Path, given: str) -> None:
    copy("async_rl", here / "copied_rl.py")
    copy("async_rl", here / "copied_package/rl.py")
    sys.path.append(str(here))
    wrong = ["stages.async_rl.train.updates_per_batch=4", "staleness.max_policy_lag=0"]
    with pytest.raises(ConfigError, match=r"staleness\.max_policy_lag"):
        plan_run("quickstart", given, wrong)
    assert [s.recipe.name for s in plan_run("quickstart", given)] == ["sft", given]


def test_a_copy_takes_the_place_of_the_stage_that_needs_the_same(here: Path) -> None:
    copy("async_rl", here / "copied_rl.py")
    copy("sft", here / "copied_sft.py")
    names = [(s.name, s.recipe.name) for s in plan_run("quickstart", "./copied_rl.py")]
    assert names == [("sft", "sft"), ("async_rl", "./copied_rl.py")]
    assert [(s.name, s.recipe.name) for s in plan_run("quickstart", "./copied_sft.py")] == [("sft", "./copied_sft.py")]
    [alone] = plan_run("gsm8k_qwen2_5_1_5b", "./copied_rl.py")
    assert (alone.name, alone.dir) == ("copied_rl", alone.config.run_dir)
    original = plan_run("quickstart", "async_rl")[-1]
    assert plan_run("quickstart", "./copied_rl.py")[-1].config == original.config


def test_stages_name_files_and_modules(here: Path) -> None:
    copy("sft", here / "copied_sft.py")
    copy("async_rl", here / "copied_package/rl.py")
    sys.path.append(str(here))
    (here / "c.yaml").write_text(
        "stages:\n  first: {recipe: ./copied_sft.py, train: {steps: 4}}\n"
        "  second: {recipe: copied_package.rl, train: {steps: 8}}\n"
        "model: {path: org/name}\ntask: {path: tasks.jsonl}\n"
    )
    stages = plan_run("c.yaml", None)
    assert [(s.name, s.recipe.name, s.recipe.generates) for s in stages] == [
        ("first", "./copied_sft.py", False),
        ("second", "copied_package.rl", True),
    ]
    (here / "again.yaml").write_text(run_yaml(stages))
    assert plan_run("again.yaml", None) == stages
    assert [s.name for s in plan_run("c.yaml", "copied_package.rl")] == ["first", "second"]
    with pytest.raises(ConfigError, match=r"stages.first.recipe: got \./none.py \(no such file\)"):
        plan_run("c.yaml", None, ["stages.first.recipe=./none.py"])


def test_a_changed_copy_has_its_own_rules_and_the_originals(here: Path) -> None:
    (here / "changed_rl.py").write_text(CHANGED)
    with pytest.raises(ConfigError, match="got 7, expected an even number; add one"):
        load_config("quickstart", ["train.steps=7"], recipe="./changed_rl.py")
    with pytest.raises(ConfigError, match=r"train\.groups_per_step"):
        load_config("quickstart", ["stages.async_rl.train.updates_per_batch=5"], recipe="./changed_rl.py")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "(no such file)"),
        ("", "which defines no RECIPE"),
        ("RECIPE = 3", "whose RECIPE is of type int"),
        ("import nothing_of_this_name", "fails when it is imported: ModuleNotFoundError"),
        ("\n1 / 0", "ZeroDivisionError: division by zero in line 2"),
        ("def f(:", "fails when it is imported: SyntaxError"),
        ("raise SystemExit(3)", "fails when it is imported: SystemExit: 3"),
        ("from leeway import Recipe\nRECIPE = Recipe(run=print, generates=True)", "expected `async def run(context)`"),
        ("from leeway import Recipe\nasync def run(c): ...\nRECIPE = Recipe(run=run)", "TypeError"),
    ],
)
def test_what_is_no_recipe_is_refused_in_one_line(here: Path, text: str | None, says: str) -> None:
    file = here / f"wrong_{abs(hash(text))}.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as error:
        find_recipe(str(file))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("nowhere.at_all", "run leeway where that module is"),
        ("./my-recipe.py", "name the file like a module"),
        ("./random.py", "another module is called random"),
        ("mine", "did you mean ./mine.py?"),
        (3, "write recipe: async_rl"),
    ],
)
def test_a_name_that_cannot_be_imported_is_refused(here: Path, given: object, says: str) -> None:
    for name in ("my-recipe", "random", "mine"):
        (here / f"{name}.py").write_text("raise SystemExit")
    with pytest.raises(ConfigError, match=says):
        find_recipe(given)


def test_a_rule_that_fails_is_reported_in_one_line(here: Path) -> None:
    (here / "broken_rule.py").write_text(CHANGED.replace("config.train.steps % 2", "config.trian"))
    with pytest.raises(ConfigError, match=r"got \./broken_rule.py, whose rule steps_are_even fails: AttributeError"):
        load_config("quickstart", recipe="./broken_rule.py")


def test_a_recipe_and_what_is_beside_it_reach_every_worker(here: Path) -> None:
    (here / "a_helper_of_it.py").write_text("X = 1\n")
    (here / "with_helper.py").write_text("import a_helper_of_it\n" + CHANGED)
    stage = plan_run("quickstart", "./with_helper.py")[-1]
    assert {path.name for path in user_module_paths(stage.config, stage.recipe)} == {
        "a_helper_of_it.py",
        "with_helper.py",
    }
    assert user_module_paths(stage.config, find_recipe("async_rl")) == []


def test_a_recipe_may_have_an_objective_of_its_own(here: Path) -> None:
    from leeway.config.objective import objective_of

    config = load_config("quickstart")
    made = Recipe(
        run=find_recipe("sft").run, generates=False, trains_on="answers", objective=lambda config: config.seed
    )
    assert objective_of(config, made) == config.seed


@pytest.mark.slow
def test_resume_finds_the_file_of_the_run_from_anywhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy("async_rl", here / "to_resume.py")
    stages = plan_run("quickstart", "./to_resume.py", [f"output_dir={here}/runs", *QUICK])
    run_dir = stages[0].config.run_dir
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(run_yaml(stages))
    record = RunRecord(run_dir, recipes=[s.recipe for s in stages], argv=["leeway", "run"], goes_on=False)
    record.close("interrupted")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    with pytest.raises(ConfigError, match="no checkpoint in it"):  # it was found: what is missing is a state
        plan_resume(run_dir, [])
    (here / "to_resume.py").unlink()
    with pytest.raises(ConfigError, match=r"to_resume.py \(no such file\)"):
        plan_resume(run_dir, [])


@pytest.mark.parametrize(
    ("recipe", "key", "fits"),
    [("sft", "train.num_ranks", 4), ("evaluate", "rollout.num_generators", 4), ("async_rl", "train.num_ranks", 3)],
)
def test_a_joined_cluster_needs_what_each_recipe_needs(tmp_path: Path, recipe: str, key: str, fits: int) -> None:
    text = "model: {path: org/name}\ntask: {path: tasks.jsonl, holdout_frac: 0.1}\ncluster: {device: cuda}\n"
    (tmp_path / "c.yaml").write_text(text + "train: {steps: 4}\n")
    have = [{"GPU": 4.0, "CPU": 64.0}]
    check_room(plan_run(str(tmp_path / "c.yaml"), recipe, [f"{key}={fits}"]), have)
    with pytest.raises(ClusterError, match=rf"expected 5 and .* lower .*{key}"):
        check_room(plan_run(str(tmp_path / "c.yaml"), recipe, [f"{key}={fits + 1}"]), have)


def test_every_stage_must_fit_into_a_joined_cluster() -> None:
    stages = plan_run("quickstart", "async_rl", ["cluster.device=cuda", "stages.async_rl.train.num_ranks=4"])
    assert derive(stages[0].config, stages[0].recipe).gpus_needed == 1
    with pytest.raises(ClusterError, match=r"has 4 GPUs and 64 CPUs, expected 5 .* for the stage async_rl"):
        check_room(stages, [{"GPU": 4.0, "CPU": 64.0}])


def test_the_command_copies_a_recipe_and_validates_the_copy(leeway: Callable[..., Done], tmp_path: Path) -> None:
    done = leeway("cp", "async_rl", "my_own_rl.py")
    assert done.stdout.splitlines() == ["my_own_rl.py", "run it: leeway run ./my_own_rl.py --config quickstart"]
    assert (tmp_path / "my_own_rl.py").read_text() == bundled_recipe_path("async_rl").read_text()


def test_nothing_asks_a_recipes_name() -> None:
    """Comparisons of a recipe with a string, or with a list of names, anywhere in the source."""
    names = "|".join(bundled_recipes())
    asked = re.compile(rf"""recipe(\.name)?\s*(==|!=|in|not in)\s*[("\[]+({names})""")
    files = [p for folder in ("components", "recipes") for p in (ROOT / folder).rglob("*.py")]
    assert [f"{p}: {m[0]}" for p in files for m in asked.finditer(p.read_text())] == []
