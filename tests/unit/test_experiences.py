"""Stored experiences: what is read of a run's groups and of rows, in which order, and what is refused."""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from leeway.algorithms.objective import PolicyObjective
from leeway.config import ConfigError, find_recipe, load_config
from leeway.config.objective import objective_of
from leeway.driver.experiences import assembled, check_experiences, load_experiences, whole_set
from leeway.experiences.sets import lacks_logprobs, with_logprobs
from leeway.experiences.stored import stored_below
from leeway.jobs.group_bytes import group_at, laid_out
from leeway.jobs.store import GroupStore
from leeway.tasks.batches import Batches
from leeway.types import NO_VERSION, Group
from leeway.versions import buffer_version

from ..trainers import one_rank_trainer, random_trajectories


def groups(number: int, *, seed: int = 0) -> list[Group]:
    """Of three answers each: rewards 0, 1 and 0.5."""
    made = []
    for i in range(number):
        own = random_trajectories(seed + i, 3)
        own = [type(t)(**{**vars(t), "reward": reward}) for t, reward in zip(own, (0.0, 1.0, 0.5), strict=True)]
        made.append(Group.of(own, group_id=i, task_id=f"task-{i}"))
    return made


def store(folder: Path, kept: list[Group]) -> Path:
    writer = GroupStore(folder / "groups")
    for start in range(0, len(kept), 4):
        own = kept[start : start + 4]
        writer.add(own)
        writer.trained([("", group.group_id) for group in own], batch=start // 4)
    writer.close()
    return folder


def settings(tmp_path: Path, model: Path, task: str, *overrides: str) -> Any:
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: {model}, dtype: float32}}\ntask: {task}\ncluster: {{device: cpu}}\n"
        "train: {epochs: 1, groups_per_step: 4}\n"
    )
    return load_config(str(tmp_path / "c.yaml"), list(overrides), recipe="offline_rl")


def of_store(tmp_path: Path, model: Path, kept: list[Group], *overrides: str) -> Any:
    return settings(tmp_path, model, f"{{name: store, path: {store(tmp_path, kept)}}}", *overrides)


def test_every_group_comes_once_an_epoch_and_a_cut_goes_on_exactly(tmp_path: Path, model_path: Path) -> None:
    kept = groups(10)
    config = of_store(tmp_path, model_path, kept)

    def batches(start: Any = None) -> Batches[list[Group]]:
        train, _ = load_experiences(config)
        return Batches(train, make=train.group, size=4, collate=list, most=20, start=start)

    whole = batches()
    seen = [next(whole) for _ in range(5)]
    with pytest.raises(StopIteration):
        next(whole)
    names = [group.task_id.partition("@")[0] for batch in seen for group in batch]
    assert Counter(names[:10]) == Counter(names[10:]) == Counter(f"task-{i}" for i in range(10))
    assert names[:10] != names[10:], "each epoch has its own order"
    first = batches()
    head = [next(first) for _ in range(2)]
    rest = batches(json.loads(json.dumps(first.state_dict())))
    assert [g.task_id for b in [*head, *(next(rest) for _ in range(3))] for g in b] == [
        g.task_id for b in seen for g in b
    ]
    by_name = {group.task_id: group for group in kept}
    for group in seen[0]:
        own = by_name[group.task_id.partition("@")[0]]
        assert group.rewards == own.rewards
        torch.testing.assert_close(group.samples["behavior_logprobs"], own.samples["behavior_logprobs"])
        mask = own.samples["loss_mask"]
        assert set(group.samples["policy_versions"][mask].tolist()) == {buffer_version(0)}
        assert set(group.samples["policy_versions"][~mask].tolist()) <= {NO_VERSION}


def test_what_is_held_out_is_never_trained_on(tmp_path: Path, model_path: Path) -> None:
    config = of_store(tmp_path, model_path, groups(20), "task.holdout_frac=0.4")
    train, held_out = load_experiences(config)
    assert len(held_out) > 0
    assert len(train) + len(held_out) == 20
    assert not {t.task_id for t in train.tasks} & {t.task_id for t in held_out.tasks}
    [share] = whole_set(config, held_out)
    assert int(share.num_sequences) == 3 * len(held_out)


def test_one_group_of_a_file_is_read_and_damage_is_named(tmp_path: Path) -> None:
    kept = groups(3)
    file = tmp_path / "x.groups"
    file.write_bytes(laid_out(kept))
    assert [group_at(file, place) for place in range(3)] == kept
    for place in (3, 10**6):
        with pytest.raises(ValueError, match=r"x\.groups: no group at place"):
            group_at(file, place)
    file.write_bytes(laid_out(kept)[:-5])
    assert group_at(file, 1) == kept[1]
    with pytest.raises(ValueError, match="no group at place 2"):
        group_at(file, 2)
    file.write_bytes((2**62).to_bytes(8, "little") + b"x")  # nothing of that length is asked for
    with pytest.raises(ValueError, match="no group at place 0"):
        group_at(file, 0)


@pytest.mark.parametrize("file", ["../secret.groups", "/etc/passwd", "a/../../secret.groups", "link.groups", ""])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, file: str) -> None:
    run = store(tmp_path / "run", groups(4))
    secret = tmp_path / "run/secret.groups"
    secret.write_bytes(laid_out(groups(1, seed=50)))
    os.symlink(secret, tmp_path / "run/groups/link.groups")
    found = stored_below(str(run), key="task.path")
    assert len(list(found.listed())) == 4
    with pytest.raises(ValueError, match=r"expected a file below|no file|Too many levels"):
        found.read(file, 0)


def test_an_index_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"task.path: got .*replay.keep_groups=true"):
        stored_below(str(tmp_path), key="task.path")
    (tmp_path / "index.sqlite").write_bytes(b"nothing of that kind")
    with pytest.raises(ValueError, match="no index of groups"):
        list(stored_below(str(tmp_path), key="task.path").listed())
    (tmp_path / "index.sqlite").unlink()
    database = sqlite3.connect(tmp_path / "index.sqlite")
    database.execute("CREATE VIEW groups AS SELECT load_extension('x') AS file, 0 AS place, '' AS state, 0 AS row")
    database.commit()
    database.close()
    with pytest.raises(ValueError, match="no index of groups"):
        list(stored_below(str(tmp_path), key="task.path").listed())
    for stage in ("a", "b"):
        store(tmp_path / "two/stages" / stage, groups(1))
    with pytest.raises(ValueError, match="name one of them"):
        stored_below(str(tmp_path / "two"), key="task.path")


def test_tokens_that_the_model_does_not_have_and_too_many_of_them_are_refused(tmp_path: Path, model_path: Path) -> None:
    of_store(tmp_path, model_path, groups(4))
    with (tmp_path / "c.yaml").open("a") as file:
        file.write("rollout: {max_model_len: 8, max_prompt_tokens: 4, max_response_tokens: 4}\n")
    config = load_config(str(tmp_path / "c.yaml"), recipe="offline_rl")
    train, _ = load_experiences(config)
    with pytest.raises(ValueError, match=r"at most rollout\.max_model_len 8; raise it"):
        [train.group(task) for task in train.tasks]
    bad = groups(1)[0]
    bad.samples["response_tokens"][0] = 64
    (tmp_path / "b").mkdir()
    again = of_store(tmp_path / "b", model_path, [bad])
    other, _ = load_experiences(again)
    with pytest.raises(ValueError, match=r"got token ids \d+ to 64, expected 0 to 63; set model.path"):
        check_experiences(other, again)


def rows(tmp_path: Path, *lines: dict[str, Any]) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_rows_are_grouped_and_know_which_logprobs_nobody_wrote(tmp_path: Path, model_path: Path) -> None:
    file = rows(
        tmp_path,
        {"question": "1+2=", "answer": "3", "score": 1.0},
        {"question": "4+4=", "answer": "8", "score": 1},
        {"question": "1+2=", "answer": "4", "score": 0.0, "behavior_logprobs": [-0.5, -0.25]},
        {"question": "4+4=", "answer": "9", "score": 0.25},
    )
    config = settings(tmp_path, model_path, f"{{path: {file}, reward_key: score, order: sequential}}")
    train, _ = load_experiences(config)
    check_experiences(train, config)
    first, second = (train.group(task) for task in train.tasks)
    assert (first.rewards, second.rewards) == ([1.0, 0.0], [1.0, 0.25])
    assert first.texts == ["3", "4"]
    own = first.samples["behavior_logprobs"].tolist()
    assert [math.isnan(value) for value in own] == [True, True, False, False]
    assert own[2:] == [-0.5, -0.25]
    assert lacks_logprobs(first)
    filled = with_logprobs(first, torch.tensor([-1.0, -2.0, -3.0, -4.0]))
    assert filled.samples["behavior_logprobs"].tolist() == [-1.0, -2.0, -0.5, -0.25]
    assert not lacks_logprobs(filled)
    assert train.tasks[1].info["difficulty"] == 1 - 0.625


def test_rows_may_be_tokens_as_a_runs_rollouts_are(tmp_path: Path, model_path: Path) -> None:
    about = {"question": "q", "answer": "", "group_id": 7, "loss_mask": [True, False], "behavior_logprobs": [-1.0, 0.0]}
    file = rows(
        tmp_path,
        {**about, "prompt_tokens": [1, 2], "response_tokens": [3, 4], "reward": 1.0},
        {**about, "question": "r", "prompt_tokens": [1, 2], "response_tokens": [3, 5], "reward": 0.0},
    )
    config = settings(tmp_path, model_path, f"{{path: {file}, group_key: group_id}}")
    train, _ = load_experiences(config)
    [task] = train.tasks
    group = train.group(task)
    assert group.samples["response_tokens"].tolist() == [3, 4, 3, 5]
    assert group.samples["loss_mask"].tolist() == [True, False] * 2
    assert not lacks_logprobs(group)


@pytest.mark.parametrize(
    ("line", "task", "says"),
    [
        ({}, "", "task.reward_key: row .* has None under 'reward', expected a finite number"),
        ({"reward": "good"}, "", "task.reward_key: row .* has 'good'"),
        ({"reward": 1.0}, "group_key: g, ", "task.group_key: row .* has nothing under 'g'"),
        ({"reward": 1.0}, "", "task.group_key: got one answer in each of 1 groups"),
        ({"reward": 1.0, "behavior_logprobs": [-1.0] * 9}, "", "got 9 behavior_logprobs, expected 2"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(
    tmp_path: Path, model_path: Path, line: dict[str, Any], task: str, says: str
) -> None:
    file = rows(tmp_path, {"question": "1+2=", "answer": "3", **line})
    config = settings(tmp_path, model_path, f"{{{task}path: {file}}}")
    with pytest.raises(ValueError, match=says) as error:
        check_experiences(load_experiences(config)[0], config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algorithm.name=ppo"], "algorithm.advantage.name"),
        (["algorithm.name=reinforce_pp", "algorithm.loss.name=reinforce"], "algorithm.loss.name"),
        (["algorithm.correction={name: tis, proximal: interpolate}"], "algorithm.correction.proximal"),
        (["replay.max_uses=2"], "only in recipes that train on rollouts"),
        (["eval.path=x.jsonl"], "eval.path"),
        (["task.order=adaptive"], "task.order"),
        (["staleness.max_policy_lag=3"], "only in recipes that train on rollouts"),
        (["train.updates_per_batch=2"], "only in recipes that train on rollouts"),
        (["train.batch_size=2"], "train.groups_per_step"),
        (["model.path=null", "model.init.architecture=qwen2"], "model.path"),
        (["task.name=reasoning_gym"], "task.name"),
    ],
)
def test_what_cannot_work_offline_is_refused(tmp_path: Path, model_path: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        of_store(tmp_path, model_path, groups(1), *overrides)
    assert "\n" not in str(error.value)


def test_a_store_is_no_source_of_tasks(tmp_path: Path, model_path: Path) -> None:
    of_store(tmp_path, model_path, groups(1))
    for recipe in ("async_rl", "sft"):
        with pytest.raises(ConfigError, match="stored experiences are for the recipe offline_rl"):
            load_config(str(tmp_path / "c.yaml"), ["train.epochs=null", "train.steps=1"], recipe=recipe)


@pytest.mark.slow
def test_training_on_them_makes_good_answers_likelier_than_bad_ones(tmp_path: Path, model_path: Path) -> None:
    config = of_store(tmp_path, model_path, groups(8), "train.groups_per_step=8")
    train, _ = load_experiences(config)
    objective = objective_of(config, find_recipe("offline_rl"))
    assert isinstance(objective, PolicyObjective)
    trainer = one_rank_trainer(model_path, objective=objective, max_policy_lag=None, lr=3e-3, eps=1e-8)
    kept = [train.group(task) for task in train.tasks]
    [share] = assembled(config, kept).steps[0]
    whole = whole_set(config, train)[0]
    own = trainer.token_logprobs(share)
    share.behavior_logprobs = torch.where(share.loss_mask, own, 0.0)  # random tokens: as if it had sampled them
    worth = [float((trainer.token_logprobs(share) * share.advantages)[share.loss_mask].mean())]
    for _ in range(3):
        metrics = trainer.forward_backward(share)
        trainer.optim_step()
        worth.append(float((trainer.token_logprobs(share) * share.advantages)[share.loss_mask].mean()))
    assert worth == sorted(worth)
    assert worth[-1] > worth[0] + 0.01
    assert not [name for name in metrics if "policy_lag" in name], "no version of this run sampled them"
    assert int(whole.num_sequences) == 24, "nothing is left out of what is measured"
    assert int(share.num_sequences) == 24
    assert len(share.prompt_lengths) == 16, "the middle answer of each group has no advantage"
