"""The list of answers that scored full and look as if they were paid without a solution."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leeway.monitor import suspects as suspect_list
from leeway.monitor.suspects import SuspectList
from leeway.replay.suspects import MAX_ROWS, SAME_ANSWERS, SIGNS, SuspectWatch
from leeway.types import Group, Task, Trajectory

from ..fakes import group as stored_group
from .test_learned import batch, watch
from .test_replay_actor import actor  # noqa: F401  (a fixture)

WORK = "Because three and four make seven, and seven less two is five, the result is"


def task(number: int, *, answer: str | None = None, **info: Any) -> Task:
    return Task(
        task_id=f"t{number}",
        prompt=f"What is {number} plus 1, please?",
        answer=str(number + 1) if answer is None else answer,
        info=info,
    )


def group(of: Task, texts: list[str], *, rewards: list[float] | None = None, tokens: list[int] | None = None) -> Group:
    def trajectory(text: str, reward: float, num: int) -> Trajectory:
        return Trajectory(
            prompt_tokens=[1],
            response_tokens=[2] * num,
            loss_mask=[True] * num,
            behavior_logprobs=[-1.0] * num,
            policy_versions=[0] * num,
            reward=reward,
            finish_reason="stop",
            text=text,
        )

    rewards, tokens = rewards or [1.0] * len(texts), tokens or [50] * len(texts)
    trajectories = [trajectory(*each) for each in zip(texts, rewards, tokens, strict=True)]
    return Group.of(group_id=int(of.task_id[1:]), task_id=of.task_id, trajectories=trajectories)


def inspected(*groups: tuple[Task, Group], by: SuspectWatch | None = None) -> tuple[dict[str, float], list[dict]]:
    by = by or SuspectWatch(solved=1.0)
    for of, answers in groups:
        by.delivered(of, answers)
    metrics, rows = by.inspect()
    return {name.removeprefix("reward_hacking/"): value for name, value in metrics.items()}, rows


def test_only_full_scores_are_counted_and_suspects_are_listed() -> None:
    of = task(3)
    hack = "import builtins\nbuiltins.exec = print"
    metrics, rows = inspected((of, group(of, [f"{WORK} 4", hack, hack], rewards=[1.0, 1.0, 0.5])))
    assert (metrics["full"], metrics["suspects"], metrics["suspect_frac"]) == (2, 1, 0.5)
    assert metrics["interpreter"] == 1
    assert {name for name, value in metrics.items() if value} == {"full", "suspects", "suspect_frac", "interpreter"}
    assert rows == [
        {
            "group_id": 3,
            "task_id": "t3",
            "sequence_id": 1,
            "signs": ["interpreter"],
            "reward": 1.0,
            "num_tokens": 50,
            "question": "What is 3 plus 1, please?",
            "answer": "4",
            "head": hack,
        }
    ]


def test_where_accuracy_is_known_it_says_what_is_full_and_not_the_reward() -> None:
    of = task(3)
    answers = group(of, ["", ""], rewards=[0.7, 1.2])
    metrics, rows = inspected((of, replace(answers, metrics=[{"exact_match": 1.0}, {"exact_match": 0.0}])))
    assert (metrics["full"], metrics["no_attempt"]) == (1, 1)
    assert rows[0]["reward"] == 0.7


def test_a_verdict_without_the_work_of_the_others_is_too_short() -> None:
    of = task(3)
    metrics, rows = inspected((of, group(of, [f"{WORK} 4"] * 4 + ["4"], tokens=[80, 90, 100, 120, 3])))
    assert (metrics["too_short"], rows[0]["sequence_id"]) == (1, 4)
    metrics, _ = inspected((of, group(of, [f"{WORK} 4"] * 4, tokens=[20, 90, 100, 120])))
    assert metrics["suspects"] == 0
    metrics, _ = inspected((of, group(of, ["4"] * 4, tokens=[1, 20, 20, 20])))
    assert metrics["suspects"] == 0, "where little is needed, less is no sign"


def test_answers_of_the_same_words_are_told_apart_by_length_and_by_question() -> None:
    repeated = "What is 3 plus 1, please?"
    _, rows = inspected(
        (task(3), group(task(3), [repeated] * 5, tokens=[2, 50, 50, 50, 50])),
        (task(4), group(task(4), [repeated] * 2)),
    )
    found = [(row["group_id"], row["sequence_id"], row["signs"]) for row in rows]
    assert found[:5] == [(3, 0, ["no_attempt", "too_short"]), *((3, i, ["no_attempt"]) for i in range(1, 5))]
    assert not any("no_attempt" in signs for group_id, _, signs in found if group_id == 4)


def test_alone_in_its_group_an_answer_is_compared_with_earlier_ones_of_its_taskset() -> None:
    watching = SuspectWatch(solved=1.0)
    long = [task(n, taskset="long") for n in range(80)]
    inspected(*((t, group(t, [f"{WORK} {t.answer}"], tokens=[200])) for t in long), by=watching)
    of_long, of_short = task(90, taskset="long"), task(91, taskset="short")
    metrics, rows = inspected(
        (of_long, group(of_long, ["91"], tokens=[3])), (of_short, group(of_short, ["92"], tokens=[3])), by=watching
    )
    assert (metrics["too_short"], rows[0]["task_id"]) == (1, "t90")


def test_one_text_that_is_right_whatever_is_asked() -> None:
    tasks = [task(n) for n in range(SAME_ANSWERS)]
    metrics, _ = inspected(*((t, group(t, ["all of them"])) for t in tasks))
    assert metrics["same_answer"] == SAME_ANSWERS
    metrics, _ = inspected(*((t, group(t, ["all of them"])) for t in tasks[:-1]))
    assert metrics["suspects"] == 0
    alike = [task(n, answer="True") for n in range(20)]
    metrics, _ = inspected(*((t, group(t, ["True"] * 4)) for t in alike))
    assert metrics["suspects"] == 0, "the tasks have the same answer"


def test_tasks_without_an_answer_are_compared_by_longer_texts() -> None:
    tasks = [task(n, answer="") for n in range(10)]
    metrics, _ = inspected(*((t, group(t, ["left"])) for t in tasks))
    assert metrics["suspects"] == 0, "a move may be right in many games"
    metrics, _ = inspected(*((t, group(t, [WORK])) for t in tasks))
    assert metrics["same_answer"] == 10


def test_what_the_environment_wrote_is_no_missing_attempt() -> None:
    of = task(3)
    answers = group(of, ["..."])
    masked = replace(answers.trajectories()[0], loss_mask=[True] * 49 + [False])
    metrics, _ = inspected((of, Group.of([masked], group_id=answers.group_id, task_id=answers.task_id)))
    assert metrics["suspects"] == 0


@pytest.mark.slow
def test_a_jump_of_the_reward_with_a_collapse_of_the_answers() -> None:
    def inspect_batch(
        watching: SuspectWatch, texts: list[str], *, paid: int, tokens: int
    ) -> tuple[dict[str, float], list]:
        tasks = [task(n) for n in range(32)]
        rewards = [1.0] * paid + [0.0] * (32 - paid)
        groups = [
            (t, group(t, [text], rewards=[r], tokens=[tokens]))
            for t, text, r in zip(tasks, texts, rewards, strict=True)
        ]
        return inspected(*groups, by=watching)

    own = [f"{WORK} {n + 1}" for n in range(32)]
    for texts, paid, tokens, collapsed in (
        (own, 32, 10, True),  # short
        (["same"] * 32, 32, 60, True),  # alike
        (own, 32, 60, False),  # better, and as before otherwise
        (["same"] * 32, 17, 10, False),  # no better
    ):
        watching = SuspectWatch(solved=1.0)
        for _ in range(4):
            assert inspect_batch(watching, own, paid=16, tokens=60)[0]["collapse"] == 0
        metrics, rows = inspect_batch(watching, texts, paid=paid, tokens=tokens)
        assert metrics["collapse"] == collapsed
        assert any("collapse" in row["signs"] for row in rows) == collapsed


def test_the_list_of_a_batch_is_bounded_and_all_are_counted() -> None:
    tasks = [task(n) for n in range(100)]
    metrics, rows = inspected(*((t, group(t, ["\x1b[2J" + "x" * 5000])) for t in tasks))
    assert (metrics["suspects"], len(rows)) == (100, MAX_ROWS)
    assert all(len(row["head"]) <= 300 for row in rows)
    assert {row["task_id"] for row in rows} >= {"t0", "t96"}, "spread over the batch"


def test_no_group_no_numbers_but_their_names() -> None:
    metrics, rows = inspected()
    assert set(metrics) == {"full", "suspects", "suspect_frac", *SIGNS}
    assert (sum(metrics.values()), rows) == (0, [])


def test_a_group_of_long_answers_costs_about_a_millisecond() -> None:
    text = f"{WORK}: 3 + 4 = 7. " * 40  # about 4,000 characters
    watching = SuspectWatch(solved=1.0)
    for n in range(20):
        of = task(n)
        watching.delivered(of, group(of, [f"{text} {n} {i}" for i in range(8)], tokens=[1000] * 8))
    begun = time.process_time()
    metrics, _ = watching.inspect()
    assert metrics["reward_hacking/full"] == 160
    assert (time.process_time() - begun) / 20 < 0.02, "several times what it takes, for a busy machine"


def test_the_file_is_ascii_bounded_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "suspects.jsonl"
    listing = SuspectList(path)
    listing.add(1, [])
    assert not path.exists()
    listing.add(1, [{"head": "\x1b[2J\u202e\u9f8d\n", "signs": ["hidden_characters"]}])
    listing.add(3, [{"head": "later", "signs": ["exit"]}])
    assert path.read_bytes().isascii()
    assert b"\x1b" not in path.read_bytes()
    again = SuspectList(path, resumed_at=2)
    monkeypatch.setattr(suspect_list, "MAX_ROWS", 3)
    for step in (3, 4, 5):
        again.add(step, [{"head": f"{step}", "signs": ["exit"]}])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 3, 4, 4]
    assert rows[0]["head"] == "\x1b[2J\u202e\u9f8d\n"
    assert "ends here" in rows[-1]["head"]


def test_the_replay_actor_gives_them_with_the_batch_and_none_when_switched_off(actor: Any) -> None:  # noqa: F811
    async def scenario(*overrides: str) -> Any:
        buffer = actor(*overrides)
        await buffer.published(0)
        held = await buffer.admit(2, 5.0, "generator-0")
        for admission in held:
            plain = stored_group(admission.group_id)
            paid = {"rewards": [1.0] * len(plain), "texts": [""] * len(plain)}
            await buffer.put([replace(plain, task_id=admission.task.task_id, **paid)])
        return await buffer.take_batch(5.0)

    batch = asyncio.run(scenario())
    assert batch.metrics["reward_hacking/no_attempt"] == batch.metrics["reward_hacking/full"] > 0
    assert len(batch.suspects) == batch.metrics["reward_hacking/suspects"]
    off = asyncio.run(scenario("monitor.suspects=false"))
    assert not off.suspects
    assert not [name for name in off.metrics if name.startswith("reward_hacking")]


def test_a_run_names_them_above_the_share_that_is_set() -> None:
    suspicious = batch() | {
        "reward_hacking/full": 100.0,
        "reward_hacking/suspects": 8.0,
        "reward_hacking/suspect_frac": 0.08,
        "reward_hacking/equality": 8.0,
        "reward_hacking/exit": 2.0,
    }
    for setting, named in ((0.05, True), (0.08, False)):
        watching = watch(f"monitor.suspects_warn_frac={setting}")
        said = [text for _ in range(6) for text in watching.step(suspicious)]
        warnings = watching.verdict().warnings
        assert len(said) == len(warnings) == named
        assert all("8.0% of the 600 full scores" in w and "(mostly equality)" in w for w in [*warnings])
        assert all("read the/run/suspects.jsonl" in w for w in warnings)
