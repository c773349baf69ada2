"""The reward for code: which tests it takes, and what it says of those that it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from leeway.envs.code_tests import code_tests, last_block
from leeway.envs.jail import NoJailError, why_not
from leeway.envs.rewards import resolve_reward
from leeway.types import Task

needs_jail = pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")
RIGHT = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


def task(*tests: Any) -> Task:
    return Task(task_id="t", prompt="p", info={"tests": list(tests)})


@pytest.mark.slow
@needs_jail
def test_code_is_scored_by_its_tests() -> None:
    assert code_tests(task("assert add(1, 2) == 3", "assert add(0, 0) == 0"), RIGHT) == 1.0
    half = task("assert add(1, 2) == 3", "assert add(1, 2) == 4")
    assert (code_tests(half, RIGHT), code_tests(half, RIGHT, partial=True)) == (0.0, 0.5)
    assert code_tests(half, "no code") == 0.0


@needs_jail
def test_code_is_scored_by_what_it_prints() -> None:
    talk = task({"input": "3 4\n", "output": "7 \n"})
    assert code_tests(talk, "```\na, b = map(int, input().split())\nprint(a + b)\n```") == 1.0
    assert code_tests(talk, "```\nprint(8)\n```") == 0.0
    assert code_tests(talk, "```\nprint(7)\nimport sys; sys.exit(1)\n```") == 0.0


@needs_jail
@pytest.mark.parametrize(
    ("returned", "expected", "reward"),
    [
        ("3", 3, 1.0), ("3.0", 3, 1.0), ("'3'", 3, 0.0), ("True", 1, 0.0), ("1", True, 0.0), ("None", None, 1.0),
        ("(1, [2])", [1, [2]], 1.0), ("[1, 3]", [1, 2], 0.0), ("{1}", [1], 0.0), ("{'a': 1}", {"a": 1}, 1.0),
        ("{'a': True}", {"a": 1}, 0.0), ("float('nan')", float("nan"), 1.0),
        ("object()", None, 0.0), ("b'a'", "a", 0.0),
    ],
)  # fmt: skip
def test_returned_values_are_compared_by_type(returned: str, expected: object, reward: float) -> None:
    call = task({"fn_name": "f", "input": [1], "output": expected})
    assert code_tests(call, f"```\ndef f(x): return {returned}\n```") == reward
    assert code_tests(call, f"```\nclass Solution:\n  def f(self, x): return {returned}\n```") == reward


@needs_jail
@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("assert 1 == 1", "uses no name that the program could define"),
        ("assert f(", r"is no Python: SyntaxError"),
        ({"input": "a"}, r"got the keys \['input'\], expected"),
        ({"fn_name": "f", "input": 3, "output": 3}, r"got the keys .*, expected"),
        (3, "got a int, expected statements or a dict"),
    ],
)
def test_tests_that_no_program_could_pass_are_refused(test: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^env\.reward: code_tests cannot score task t: tests\[0\]: .*{message}"):
        code_tests(task(test), RIGHT)


def test_a_task_without_tests_is_refused() -> None:
    with pytest.raises(ValueError, match="no list"):
        code_tests(Task(task_id="t", prompt="p"), RIGHT)


def test_blocks() -> None:
    assert last_block("```python\na\n```\n```py\nb\n```") == "b\n"
    assert last_block("```\nunclosed") == "unclosed"
    assert last_block("```javascript\nx\n```") is None


def test_a_system_without_a_jail_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise NoJailError("no jail for code on this system: unshare is refused")

    monkeypatch.setattr("leeway.envs.jail.Jail._living", refuse)
    monkeypatch.setattr(code_tests, "why_not", why_not.__wrapped__)
    with pytest.raises(ValueError, match=r"env\.reward: code_tests: no jail.*unshare is refused"):
        resolve_reward("code_tests")
