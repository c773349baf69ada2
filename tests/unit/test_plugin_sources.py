"""Three ways to plug in: a module beside the run, a folder of modules, an installed package's entry point."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from leeway.config import ConfigError, load_config
from leeway.driver.dry_run import check_plugins, dry_run
from leeway.envs import build_environment
from leeway.replay.operators import Pipeline
from leeway.runtime.cluster import user_module_paths
from leeway.tasks.taskset import build_taskset
from leeway.types import Task

ENV = "from leeway import StepEnvironment\nclass Env(StepEnvironment):\n async def step(self, completion):\n  "
RIGHT = ENV + "return None, 1.0, True, {}\n"
TASK = Task(task_id="t", prompt="1 + 1 =", answer="2")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("theirs"):
            del sys.modules[name]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package as pip leaves it: source and metadata with entry points, in a folder on sys.path."""
    place = tmp_path / "site-packages"
    package = place / "theirs_installed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "game.py").write_text(
        RIGHT + "def pays(task, text, *, much=1.0): return much\n"
        "def drop(group): return 'dropped'\n"
        "def rows(**_): yield {'question': 'q', 'answer': 'a'}\n"
    )
    about = place / "theirs_installed-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs-installed\nVersion: 1.0\n")
    lines = [("environments", "their_game", "Env"), ("rewards", "their_reward", "pays")]
    lines += [("operators", "their_operator", "drop"), ("tasks", "their_tasks", "rows")]
    (about / "entry_points.txt").write_text(
        "".join(f"[leeway.{group}]\n{name} = theirs_installed.game:{target}\n" for group, name, target in lines)
    )
    monkeypatch.syspath_prepend(str(place))
    return place


@pytest.mark.slow
def test_names_of_an_installed_package_stand_for_its_classes_and_functions(installed):
    config = load_config(
        "quickstart",
        [
            "env.name=their_game",
            "env.rewards={their_reward: 0.5, exact_match: 1}",
            "env.reward_options={their_reward: {much: 3}}",
            "replay.operators=[their_operator, dedupe]",
            "task.name=python",
            "task.dataset=null",
            "task.options={}",
            "task.path=their_tasks",
            "task.holdout_frac=0",
        ],
    )
    assert config.env.name == "theirs_installed.game:Env"
    assert config.env.rewards == {"theirs_installed.game:pays": 0.5, "exact_match": 1}
    check_plugins(config)
    dry_run(config, TASK)
    assert type(build_environment(config.env)).__module__ == "theirs_installed.game"
    assert len(Pipeline(config.replay.operators).counts()) == 4
    assert [t.answer for t in build_taskset(config.task, seed=0, split="train").tasks] == ["a"]
    assert user_module_paths(config) == [], "what is installed is installed on every machine"


@pytest.mark.slow
def test_one_taskset_of_a_mixture_may_name_an_installed_environment(installed):
    parts = "{a: {name: reasoning_gym, dataset: chain_sum}, b: {name: python, path: their_tasks}}"
    config = load_config(
        "quickstart",
        [
            "task.name=mix", "task.dataset=null", "task.options={}", f"task.mix={parts}",
            "env.by_taskset={b: {name: their_game}}",
        ],
    )  # fmt: skip
    assert config.env.by_taskset["b"].name == "theirs_installed.game:Env"
    assert config.task.mix["b"].path == "theirs_installed.game:rows"


def test_a_built_in_name_stays_built_in_and_unknown_ones_are_refused(installed):
    about = installed / "theirs_installed-1.0.dist-info/entry_points.txt"
    about.write_text("[leeway.environments]\nsingle_turn = theirs_installed.game:Env\n")
    assert load_config("quickstart").env.name == "single_turn"
    with pytest.raises(ConfigError, match=r"env\.name: got 'their_gane'"):
        load_config("quickstart", ["env.name=their_gane"])


def folder_of_plugins(tmp_path: Path, source: str = RIGHT) -> Path:
    folder = tmp_path / "plugins"
    (folder / "theirs_package").mkdir(parents=True)
    (folder / "theirs_package/__init__.py").write_text("")
    (folder / "theirs_env.py").write_text(source)
    (folder / "notes.txt").write_text("no module")
    return folder


def test_a_folder_of_plugins_is_found_and_all_of_it_is_sent(tmp_path, monkeypatch):
    folder = folder_of_plugins(tmp_path, "import theirs_package\n" + RIGHT)
    monkeypatch.chdir(tmp_path)
    config = load_config("quickstart", ["plugins=[plugins]", "env.name=theirs_env:Env"])
    check_plugins(config)
    dry_run(config, TASK)
    assert set(user_module_paths(config)) == {folder / "theirs_env.py", folder / "theirs_package"}
    with pytest.raises(ConfigError, match=r"plugins: got 'nowhere', expected a folder"):
        load_config("quickstart", ["plugins=[nowhere]"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (RIGHT.replace("StepEnv", "StepEnw", 1), r"theirs_env\.py:1 cannot be imported: .*StepEnw.*"),
        ("import no_such_package\n" + RIGHT, r"theirs_env\.py:1 cannot be imported: .*no_such_package.*install"),
        (RIGHT.replace("def step", "def stop"), r"theirs_env\.py:2: abstract methods are missing: step; expected"),
        (RIGHT.replace("async def", "def"), r"theirs_env\.py:2: its step is not async; expected"),
        (ENV + "return 1.0", r"Env\.step \(.*theirs_env\.py:3\) returned 1\.0; expected \(observation, reward"),
    ],
)
def test_mistakes_name_file_line_and_what_was_expected(tmp_path, source, message):
    folder = folder_of_plugins(tmp_path, source)
    config = load_config("quickstart", [f"plugins=[{folder}]", "env.name=theirs_env:Env"])
    with pytest.raises(ValueError, match=message) as caught:
        _check(config)
    assert "\n" not in str(caught.value)


def _check(config):
    check_plugins(config)
    dry_run(config, TASK)


def test_what_a_module_imports_from_beside_it_is_sent_along(tmp_path, monkeypatch):
    (tmp_path / "theirs_main.py").write_text("import theirs_helper\n" + RIGHT)
    (tmp_path / "theirs_helper.py").write_text("")
    (tmp_path / "theirs_unused.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config("quickstart", ["env.name=theirs_main:Env"])
    check_plugins(config)
    assert {path.name for path in user_module_paths(config)} == {"theirs_main.py", "theirs_helper.py"}
