"""Checkpoints of a stage: which are written, which are kept, and that none is ever half there."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from leeway.config import Stage, find_recipe, load_config
from leeway.driver.checkpoints import (
    Checkpoints,
    check_same_settings,
    check_same_tasks,
    check_whole,
    learned_settings,
    newest_state,
    resume_point,
    saved_position,
    saved_steps,
)
from leeway.driver.checks import check_resume
from leeway.driver.context import StageContext, StageResult, finished_stage, mark_finished
from leeway.failures import PartFailed
from leeway.integrity import read_sealed
from leeway.runtime.supervisor import Supervisor
from leeway.tasks.taskset import TaskSet
from leeway.trainer.checkpoint import CheckpointError, read_about
from leeway.types import Task

from ..fakes import FakeRank


def config_of(tmp_path: Path, *overrides: str) -> Any:
    options = [f"output_dir={tmp_path}", "model.init=null", "model.path=org/m", *overrides]
    return load_config("quickstart", options, recipe="sft")


def checkpoints_of(tmp_path: Path, rank: FakeRank, *overrides: str, **options: Any) -> Checkpoints:
    config = config_of(tmp_path, *overrides)
    return Checkpoints(tmp_path / "saved", config=config, trainers=[rank], supervisor=Supervisor(), **options)


def run(checkpoints: Checkpoints, rank: FakeRank, steps: int) -> None:
    async def steps_() -> None:
        for rank.step in range(1, steps + 1):
            await checkpoints.after_step(rank.step)
        await checkpoints._finish()

    asyncio.run(steps_())


def contents(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


@pytest.mark.parametrize(
    ("save_hf", "mid", "end"),
    [
        ("last", {"state.json", "trainer"}, {"hf", "state.json", "trainer"}),
        ("always", {"hf", "state.json", "trainer"}, {"hf", "state.json", "trainer"}),
        ("never", {"state.json", "trainer"}, {"state.json", "trainer"}),
    ],
)
def test_what_is_written_in_mid_run_and_at_the_end(tmp_path, save_hf, mid, end):
    rank = FakeRank()
    checkpoints = checkpoints_of(tmp_path, rank, "checkpoint.every=2", f"checkpoint.save_hf={save_hf}")
    run(checkpoints, rank, 4)
    assert saved_steps(tmp_path / "saved") == [2, 4]
    assert contents(tmp_path / "saved/step-000002") == mid
    folder = asyncio.run(checkpoints.at_end())  # of a step that has a checkpoint already
    assert contents(tmp_path / "saved/step-000004") == end
    assert folder == (tmp_path / "saved/step-000004/hf" if save_hf != "never" else None)
    assert contents(tmp_path / "saved") == {"step-000002", "step-000004", "latest.json"}


def test_a_run_that_saves_only_at_its_end_can_be_gone_on_from(tmp_path):
    rank = FakeRank()
    checkpoints = checkpoints_of(tmp_path, rank)
    run(checkpoints, rank, 3)
    assert saved_steps(tmp_path / "saved") == []
    assert asyncio.run(checkpoints.at_end()) == tmp_path / "saved/step-000003/hf"
    assert contents(tmp_path / "saved/step-000003") == {"hf", "state.json", "trainer"}
    assert newest_state(tmp_path / "saved") == tmp_path / "saved/step-000003"


def test_a_run_that_was_told_to_save_no_state_leaves_weights_and_an_interrupted_one_its_state(tmp_path):
    rank = FakeRank()
    checkpoints = checkpoints_of(tmp_path, rank, "checkpoint.save_state=never")
    run(checkpoints, rank, 3)
    assert asyncio.run(checkpoints.at_end()) == tmp_path / "saved/step-000003/hf"
    assert contents(tmp_path / "saved/step-000003") == {"hf", "state.json"}
    asyncio.run(checkpoints.at_end(interrupted=True))
    assert contents(tmp_path / "saved/step-000003") == {"hf", "state.json", "trainer"}


@pytest.mark.parametrize("at_the_end", [False, True], ids=["in mid-run", "in the final save"])
def test_an_interrupt_while_ranks_copy_what_they_hold_ends_with_a_whole_checkpoint(tmp_path, at_the_end):
    """The ranks go on with what they were asked for, so nobody may forget it and ask for another."""

    async def scenario() -> None:
        rank = FakeRank()
        checkpoints = checkpoints_of(tmp_path, rank, "checkpoint.every=2", "checkpoint.keep_last=9")
        rank.step, rank.copies = 2, True
        saving = asyncio.ensure_future(checkpoints.at_end() if at_the_end else checkpoints.after_step(2))
        await asyncio.sleep(0.02)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        ending = asyncio.ensure_future(checkpoints.at_end(interrupted=True))
        await asyncio.sleep(0.02)
        rank.copied.set()
        assert await asyncio.wait_for(ending, 200) == tmp_path / "saved/step-000002/hf"
        assert contents(tmp_path / "saved") == {"step-000002", "latest.json"}, "nothing half-written is left"
        assert contents(tmp_path / "saved/step-000002") == {"hf", "state.json", "trainer"}

    asyncio.run(scenario())


def test_the_newest_are_kept_and_those_of_every_so_many_steps(tmp_path):
    rank = FakeRank()
    overrides = ["checkpoint.every=1", "checkpoint.keep_last=2", "checkpoint.keep_every=4"]
    run(checkpoints_of(tmp_path, rank, *overrides), rank, 11)
    assert saved_steps(tmp_path / "saved") == [4, 8, 10, 11]
    assert read_sealed(tmp_path / "saved/latest.json").items() >= {"step": 11, "path": "step-000011"}.items()


def test_steps_that_come_in_strides_are_saved_at_the_first_one_after_each_mark(tmp_path):
    rank = FakeRank()
    checkpoints = checkpoints_of(tmp_path, rank, "checkpoint.every=5", "checkpoint.keep_last=9")

    async def strides() -> None:
        for rank.step in (3, 6, 9, 12, 15):
            await checkpoints.after_step(rank.step)
        await checkpoints._finish()

    asyncio.run(strides())
    assert saved_steps(tmp_path / "saved") == [6, 12, 15]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["state", "hf"])
def test_a_full_disk_leaves_the_checkpoint_before_it_and_nothing_with_a_name(tmp_path, fault):
    rank = FakeRank()
    checkpoints = checkpoints_of(tmp_path, rank, "checkpoint.every=1", "checkpoint.save_hf=always")
    run(checkpoints, rank, 2)
    rank.step, rank.fault = 3, fault

    async def fails_beside_the_next_step() -> None:
        await checkpoints.after_step(3)
        rank.step = 4
        await checkpoints.after_step(4)

    with pytest.raises(PartFailed, match=r"checkpoint .*step-000003: the driver could not write it: .*No space left"):
        asyncio.run(fails_beside_the_next_step())
    assert contents(tmp_path / "saved") == {"step-000001", "step-000002", "latest.json"}, "the half is gone: room"
    assert json.loads((tmp_path / "saved/latest.json").read_text())["step"] == 2
    assert newest_state(tmp_path / "saved") == tmp_path / "saved/step-000002"


def test_training_goes_on_while_one_checkpoint_is_written_and_the_end_waits_for_it(tmp_path):
    async def scenario() -> None:
        rank = FakeRank(slow=True)
        checkpoints = checkpoints_of(tmp_path, rank, "checkpoint.every=2", "checkpoint.keep_last=9")
        rank.step = 2
        assert await checkpoints.after_step(2) == {"checkpoint/copy_s": 0.25}
        rank.step = 3
        assert await checkpoints.after_step(3) == {}, "nobody waits for the disk"
        assert saved_steps(tmp_path / "saved") == []
        rank.step = 4
        second = asyncio.ensure_future(checkpoints.after_step(4))
        await asyncio.sleep(0.05)
        assert not second.done(), "one at a time"
        rank.go_on.set()
        assert await second == {"checkpoint/copy_s": 0.25, "checkpoint/write_s": 2.0}
        rank.go_on.clear()
        assert json.loads((tmp_path / "saved/step-000002/trainer/state.json").read_text())["policy_version"] == 2
        rank.step = 5
        end = asyncio.ensure_future(checkpoints.at_end())
        await asyncio.sleep(0.05)
        assert not end.done()
        rank.go_on.set()
        assert await end == tmp_path / "saved/step-000005/hf"
        assert saved_steps(tmp_path / "saved") == [2, 4, 5]

    asyncio.run(scenario())


def test_an_interrupt_while_a_checkpoint_is_written_loses_neither_it_nor_the_last_one(tmp_path):
    async def scenario() -> None:
        rank = FakeRank(slow=True)
        checkpoints = checkpoints_of(tmp_path, rank, "checkpoint.every=2", "checkpoint.keep_last=9")
        rank.step = 2
        await checkpoints.after_step(2)
        rank.step = 4
        waiting = asyncio.ensure_future(checkpoints.after_step(4))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        rank.go_on.set()
        await checkpoints.at_end(interrupted=True)
        assert saved_steps(tmp_path / "saved") == [2, 4]

    asyncio.run(scenario())


def test_what_a_killed_run_left_half_written_is_removed_by_the_next(tmp_path):
    left = tmp_path / "saved/step-000007.0badcafe.partial/trainer"
    left.mkdir(parents=True)
    checkpoints_of(tmp_path, FakeRank())
    assert not left.parent.exists()


@pytest.mark.slow
def test_a_damaged_later_checkpoint_pushes_nothing_out_and_is_replaced_when_the_run_has_come_as_far(tmp_path):
    rank, saved = FakeRank(), tmp_path / "saved"
    run(checkpoints_of(tmp_path, rank, "checkpoint.every=1", "checkpoint.keep_last=3"), rank, 4)
    (saved / "step-000004/trainer/shard-00000.safetensors").write_bytes(b"other")
    overrides = ["checkpoint.every=2", "checkpoint.keep_last=1", "checkpoint.resume=auto"]
    resumed = resume_point(saved, config_of(tmp_path, *overrides))
    assert resumed == saved / "step-000003"
    again = checkpoints_of(tmp_path, rank, *overrides, resumed=resumed)

    async def interrupted_where_it_began() -> None:
        rank.step = 3
        await again.at_end(interrupted=True)

    asyncio.run(interrupted_where_it_began())
    assert newest_state(saved) == saved / "step-000003", "a damaged one counts for nothing"

    async def one_step_more() -> None:
        rank.step = 4
        await again.after_step(4)
        await again._finish()

    asyncio.run(one_step_more())
    assert newest_state(saved) == saved / "step-000004"
    assert saved_steps(saved) == [4]


def test_weights_that_are_added_at_the_end_leave_the_state_as_it_is(tmp_path):
    async def position(version: int) -> dict[str, int]:
        return {"next_draw": version * 10}

    rank, saved = FakeRank(), tmp_path / "saved"
    checkpoints = checkpoints_of(tmp_path, rank, "checkpoint.every=1", position=position)
    run(checkpoints, rank, 1)
    before = (saved / "step-000001/trainer/state.json").stat()
    asyncio.run(checkpoints.at_end())
    assert contents(saved / "step-000001") == {"hf", "state.json", "trainer"}
    after = (saved / "step-000001/trainer/state.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert saved_position(saved / "step-000001") == {"next_draw": 10}


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    rank = FakeRank()
    run(checkpoints_of(tmp_path, rank, "checkpoint.every=1"), rank, 2)
    config = config_of(tmp_path, "checkpoint.resume=auto")
    assert resume_point(tmp_path / "saved", config) == tmp_path / "saved/step-000002"
    (tmp_path / "saved/step-000002/trainer/shard-00000.safetensors").write_bytes(b"other")
    assert resume_point(tmp_path / "saved", config) == tmp_path / "saved/step-000001"
    shutil.rmtree(tmp_path / "saved/step-000001")
    assert resume_point(tmp_path / "saved", config) is None
    with pytest.raises(CheckpointError, match=r"5 bytes, \d+ were written"):
        resume_point(tmp_path, config_of(tmp_path, f"checkpoint.resume={tmp_path}/saved/step-000002"))


@pytest.mark.slow
def test_other_settings_are_refused_with_the_difference_and_other_machines_are_not(tmp_path):
    rank = FakeRank()
    run(checkpoints_of(tmp_path, rank, "checkpoint.every=1"), rank, 1)
    saved, resume = tmp_path / "saved", "checkpoint.resume=auto"
    for same in ("train.num_ranks=2", "stages.sft.train.steps=9", "eval.every=0", "model.path=org/elsewhere"):
        assert resume_point(saved, config_of(tmp_path, resume, same)) == saved / "step-000001"
    assert resume_point(saved, config_of(tmp_path)) is None
    with pytest.raises(CheckpointError, match=r"optimizer\.lr was 0\.001, is 0\.002; seed was 0, is 7"):
        resume_point(saved, config_of(tmp_path, resume, "stages.sft.optimizer.lr=0.002", "seed=7"))


@pytest.mark.slow
def test_other_settings_and_other_tasks_are_refused_before_anything_starts(tmp_path):
    def stage(*overrides: str) -> Stage:
        config = config_of(tmp_path, "task.limit=20", "checkpoint.resume=auto", *overrides)
        return Stage(name="sft", recipe=find_recipe("sft"), config=config, dir=tmp_path)

    tasks = TaskSet([Task(task_id="a", prompt="1")], seed=0)

    async def position(version: int) -> dict[str, Any]:
        return {"stream": {"taskset": tasks.state_dict()}}

    rank = FakeRank()
    checkpoints = checkpoints_of(tmp_path, rank, "task.limit=20", "checkpoint.every=1", position=position)
    checkpoints._directory = tmp_path / "checkpoints"
    run(checkpoints, rank, 1)
    with pytest.raises(ValueError, match=r"checkpoint.resume: got auto, but .* seed was 0, is 7"):
        check_resume(stage("seed=7"))
    with pytest.raises(ValueError, match=r"checkpoint.resume: got auto, but .* different tasks: train had fingerprint"):
        check_resume(stage())
    check_same_tasks(tmp_path / "checkpoints/step-000001", tasks)


def test_a_run_that_built_its_own_model_can_be_resumed(tmp_path):
    """A stage trains from the folder that was built; the settings of a resumed run say how to build it."""
    settings = load_config("quickstart", [f"output_dir={tmp_path}", "checkpoint.every=1"], recipe="sft")
    assert settings.model.init is not None
    trained = settings.with_model_path(tmp_path / "model")
    rank = FakeRank()
    run(Checkpoints(tmp_path / "saved", config=trained, trainers=[rank], supervisor=Supervisor()), rank, 1)
    check_same_settings(tmp_path / "saved/step-000001", settings)


def test_what_is_on_record_changes_nothing_for_a_run_that_resumes_under_another_tolerance(tmp_path):
    rank, held_to = FakeRank(), {"param_server/served_tolerance/mean": 0.12}
    run(checkpoints_of(tmp_path, rank, "checkpoint.every=1", on_record=lambda: held_to), rank, 1)
    folder = tmp_path / "saved/step-000001"
    assert read_about(folder)["param_server/served_tolerance/mean"] == 0.12
    check_whole(folder)
    narrow, wide = (load_config("quickstart", [f"param_server.served_tolerance={most}"]) for most in (0.1, 0.5))
    assert learned_settings(narrow) == learned_settings(wide)


def test_a_position_of_another_version_is_refused_by_name(tmp_path):
    async def position(version: int) -> dict[str, Any]:
        return {"next_draw": 3, "next_group_id": 3}

    rank = FakeRank()
    run(checkpoints_of(tmp_path, rank, "checkpoint.every=1", position=position), rank, 1)
    with pytest.raises(CheckpointError, match=r"another version of Leeway: got a position with next_group_id"):
        check_same_tasks(tmp_path / "saved/step-000001", TaskSet([Task(task_id="a", prompt="1")], seed=0))


@pytest.mark.slow
def test_in_the_middle_of_a_batch_only_weights_are_saved(tmp_path):
    rank = FakeRank()

    async def position(version: int) -> dict[str, int] | None:
        return {"next_draw": version * 10} if version % 2 == 0 else None

    checkpoints = checkpoints_of(tmp_path, rank, position=position)
    rank.step = 2
    asyncio.run(checkpoints.at_end(interrupted=True))
    assert saved_position(tmp_path / "saved/step-000002") == {"next_draw": 20}
    rank.step = 3
    asyncio.run(checkpoints.at_end(interrupted=True))
    assert contents(tmp_path / "saved/step-000003") == {"hf", "state.json"}
    assert newest_state(tmp_path / "saved") == tmp_path / "saved/step-000002"


def test_the_last_checkpoint_that_can_be_gone_on_from_is_kept_whatever_came_after_it(tmp_path):
    rank = FakeRank()

    async def position(version: int) -> dict[str, int] | None:
        return {"next_draw": 0} if version == 2 else None

    checkpoints = checkpoints_of(tmp_path, rank, "checkpoint.keep_last=1", position=position)
    for rank.step in (2, 3):  # the second interrupt came in the middle of a batch: weights only
        asyncio.run(checkpoints.at_end(interrupted=True))
    assert saved_steps(tmp_path / "saved") == [2, 3]
    assert newest_state(tmp_path / "saved") == tmp_path / "saved/step-000002"


def test_a_finished_stage_is_not_run_again(tmp_path):
    def context(*overrides: str) -> StageContext:
        config = config_of(tmp_path, *overrides)
        return StageContext(name="sft", recipe=find_recipe("sft"), config=config, dir=tmp_path)

    (tmp_path / "hf").mkdir()
    result = StageResult(summary={"steps": 3}, model_path=str(tmp_path / "hf"))
    mark_finished(context(), result)
    assert finished_stage(context("checkpoint.resume=auto")) == result
    (tmp_path / "hf").rmdir()
    assert finished_stage(context("checkpoint.resume=auto")) is None, "its weights are gone"
    (tmp_path / "hf").mkdir()
    assert finished_stage(context()) is None
    assert finished_stage(context("checkpoint.resume=auto")) is None, "a run from the start takes the note away"
