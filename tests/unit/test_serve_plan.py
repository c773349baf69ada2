"""Which weights `leeway serve` serves, and under which settings: of a run, a stage, a checkpoint, a model."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from leeway.cli.main import main
from leeway.config import Config, load_config, resolve_stages, run_yaml
from leeway.config.load import config_path, read_tree
from leeway.config.running import ServeConfig
from leeway.driver.run_record import locked
from leeway.driver.saved_weights import SavedWeights
from leeway.driver.serve_plan import JOINING, plan_serving
from leeway.driver.serving import client_tokens
from leeway.failures import Refused
from leeway.jobs import folder
from leeway.jobs.fit import check_fit, must_be_equal
from leeway.jobs.folder import Meeting, write_json


def checkpoint(stage: Path, step: int, *, sharded: bool = False) -> Path:
    folder = stage / f"checkpoints/step-{step:06d}"
    file = folder / ("trainer/state.json" if sharded else "hf/config.json")
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of the quickstart: two stages, of which the last one has an engine, a temperature and shards of its own."""
    folder = tmp_path / "my_run"
    overrides = ["stages.async_rl.rollout.temperature=0.8", "rollout.engine.name=hf", f"output_dir={tmp_path}"]
    stages = resolve_stages(read_tree(config_path("quickstart")), None, overrides)
    folder.mkdir()
    (folder / "config.yaml").write_text(run_yaml(stages))
    checkpoint(folder / "stages/sft", 50)
    checkpoint(folder / "stages/async_rl", 4)
    checkpoint(folder / "stages/async_rl", 20)
    checkpoint(folder / "stages/async_rl", 12, sharded=True)
    return folder


def planned(target: Path | str, *overrides: str, step: int | None = None) -> tuple[int, Config]:
    stage = plan_serving(str(target), step, overrides, Path("/nowhere"))
    recipe, config = stage.recipe, stage.config
    return recipe.run.args[0], config  # type: ignore[attr-defined]


def test_a_runs_newest_weights_are_served_under_the_settings_of_their_stage(run: Path) -> None:
    version, config = planned(run, "rollout.num_generators=3", "serve.port=0")
    assert version == 20
    assert config.model.path == str(run / "stages/async_rl/checkpoints/step-000020/hf")
    assert config.model.init is None
    assert (config.rollout.temperature, config.rollout.engine_name) == (0.8, "hf")
    assert (config.rollout.num_generators, config.serve.port) == (3, 0)
    trained = load_config("quickstart", [])
    assert config.rollout.max_model_len == trained.rollout.max_model_len
    assert config.serve.model == "my_run"
    assert config.task.path is None, "it reads no tasks"


def test_a_stage_a_checkpoint_and_a_step_are_served_too(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(run, step=4)[0] == 4
    assert planned(run / "stages/sft")[0] == 50
    version, config = planned(run / "stages/async_rl/checkpoints/step-000004")
    assert (version, config.rollout.temperature) == (4, 0.8)
    exported = []

    def as_model(saved: SavedWeights, scratch: Path) -> Path:
        exported.append((saved.step.name, saved.exported, scratch))
        return run / "stages/sft/checkpoints/step-000050/hf"

    monkeypatch.setattr(SavedWeights, "as_model", as_model)
    version, config = planned(run, step=12)
    assert version == 12
    assert exported == [("step-000012", None, Path("/nowhere"))], "shards are exported, in the scratch folder"


def test_a_model_is_served_as_version_0(tmp_path: Path) -> None:
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen/config.json").write_text("{}")
    version, config = planned(tmp_path / "qwen", "cluster.device=cpu")
    assert (version, config.model.path, config.serve.model) == (0, str(tmp_path / "qwen"), "qwen")
    assert planned("some-org/on-the-hub")[1].model.path == "some-org/on-the-hub"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["RUN", "--step", "5"], "--step: got 5, expected a checkpoint of"),
        (["RUN", "train.steps=3"], "train.steps: got 3, expected nothing: it has an effect only in recipes that train"),
        (["RUN", "serve.prot=3"], "serve.prot"),
        (["RUN", "serve.port=70000"], "serve.port: got 70000, expected"),
        (["EMPTY"], "RUN: got "),
        (["MODEL", "--step", "5"], "--step: got 5, expected the folder of a run; leave it out for a model"),
        (["NOTHING", "cluster.device=cpu", "rollout.engine.name=hf"], "model.path: missing model path"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    args: list[str], said: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    places = {"RUN": run, "EMPTY": tmp_path / "empty", "MODEL": tmp_path / "model", "NOTHING": tmp_path / "none"}
    with pytest.raises(SystemExit) as ended:
        main(["serve", *(str(places.get(arg, arg)) for arg in args)])
    error = capsys.readouterr().err
    assert ended.value.code == 2, error
    assert error.startswith("leeway: refused: ")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("value", ["", "short", "a" * 20 + ",", "a" * 20 + "," + "a" * 20, "a" * 20 + ",ümlaut" * 4])
def test_tokens_that_are_no_secrets_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENS", value)
    with pytest.raises(Refused, match=r"serve\.token_variable: got TOKENS, expected a variable with different tokens"):
        client_tokens(ServeConfig(token_variable="TOKENS"))


def test_tokens_are_the_users_or_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENS", f"{'a' * 20}, {'b' * 20}")
    assert client_tokens(ServeConfig(token_variable="TOKENS")) == ["a" * 20, "b" * 20]
    (first,), (second,) = client_tokens(ServeConfig()), client_tokens(ServeConfig())
    assert first != second
    assert len(first) == 48


def test_a_train_job_that_is_running_is_joined_and_its_name_is_an_explorers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["stages.sft=null", "rollout.engine.name=hf", f"output_dir={tmp_path}", "rollout.temperature=0.7"]
    stages = resolve_stages(read_tree(config_path("quickstart")), "train", overrides)
    run = stages[0].config.run_dir
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(run_yaml(stages))
    meeting, beats = Meeting(run / "meeting"), itertools.count()
    meeting.folder.mkdir()
    monkeypatch.setattr(folder, "ALIVE_S", 0.05)
    write_json(meeting.train, {"state": "up", "beat": 0})
    with pytest.raises(ValueError, match=r"a run.s folder with checkpoints"):  # killed before it had saved anything
        planned(run)
    monkeypatch.setattr(folder, "read_json", lambda path: {"state": "up", "beat": next(beats), "model": None})
    monkeypatch.setattr(folder, "ALIVE_S", 100.0)
    stage = plan_serving(str(run), None, ["serve.port=0", "rollout.num_generators=2"], Path("/nowhere"))
    config = stage.config
    assert stage.recipe is JOINING
    assert stage.dir == run / "explorers/serve"
    assert config.model.path == str(run / "meeting/model")
    assert config.meeting_folder == run / "meeting"
    assert (config.rollout.temperature, config.rollout.num_generators) == (0.7, 2)
    assert config.serve.model == run.name
    check_fit(config, must_be_equal(stages[0].config))
    other = plan_serving(str(run), None, ["explorer.name=front"], Path("/nowhere"))
    assert other.dir == run / "explorers/front"


def test_of_a_run_that_nobody_can_join_the_newest_checkpoint_is_served_and_it_is_said(run: Path) -> None:
    assert plan_serving(str(run), None, (), Path("/nowhere")).notes == ()
    with locked(run):
        (note,) = plan_serving(str(run), None, (), Path("/nowhere")).notes
        assert plan_serving(str(run), 20, (), Path("/nowhere")).notes == ()
        shutil.rmtree(run / "stages")
        with pytest.raises(ValueError, match=r"with checkpoints.*nobody can join it.*start it with `leeway run train`"):
            plan_serving(str(run), None, (), Path("/nowhere"))
    assert "start it with `leeway run train`, then `leeway serve RUN`" in note
