"""The built-in environments and the adapters: what they say, what they pay, what they refuse."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from leeway.config.inputs import EnvConfig
from leeway.envs import build_environment
from leeway.envs.calculator import calculate
from leeway.envs.corpus import Corpus
from leeway.envs.frozen_lake import _has_a_way, make_lake
from leeway.envs.tools import ToolError, check_arguments, parse_calls
from leeway.tasks import Prompter
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.types import Completion, Task

PROMPTER = Prompter(build_tokenizer(["12 + 34 = 46"]))
TASK = Task(task_id="t", prompt="12 + 34 =", answer="46")


class ScriptedPolicy:
    """Answers with given texts, turn by turn, the same in every conversation."""

    def __init__(self, *texts: str, group_size: int = 1, index: int = 0) -> None:
        self.texts, self.group_size, self.prompter, self.max_model_len = list(texts), group_size, PROMPTER, 4000
        self.prompts: list[str] = []

    def encode(self, prompt):
        return PROMPTER.encode(prompt)

    def conversation(self, index):
        return self if self.group_size == 1 else ScriptedPolicy(*self.texts)

    async def generate(self, prompt, *, n=None, max_tokens=None):
        self.prompts.append(PROMPTER.decode(prompt))
        text = self.texts.pop(0)
        tokens = PROMPTER.encode_example("x", text)[1]
        return [
            Completion(
                tokens=tokens,
                logprobs=[-0.5] * len(tokens),
                policy_versions=[7] * len(tokens),
                finish_reason="stop",
                text=text,
            )
        ]


def env_config(name, reward="exact_match", **options):
    return EnvConfig(name=name, options=options, reward=reward)


def play(env, *texts, task=TASK):
    policy = ScriptedPolicy(*texts)
    (trajectory,) = asyncio.run(env.rollout(task, policy))
    return policy, trajectory


def test_multi_turn_goes_on_until_it_is_right():
    env = build_environment(env_config("multi_turn", feedback="No:({reward}).", decay=0.5, max_turns=3))
    policy, t = play(env, "45", "46")
    assert (t.reward, t.metrics["env/turns"], t.metrics["exact_match"], t.metrics["env/first_try"]) == (0.5, 2, 1, 0)
    assert policy.prompts[1] == "12 + 34 =45No:(0)."
    _, t = play(env, "46")
    assert (t.reward, t.metrics["env/first_try"]) == (1.0, 1.0)
    _, t = play(env, "1", "2", "3")
    assert (t.reward, t.metrics["env/turns"], t.finish_reason) == (0.0, 3.0, "stop")


def test_a_bad_answer_never_costs_less_for_being_late(monkeypatch):
    monkeypatch.setattr("leeway.envs.answers.exact_match", lambda task, text: 0.5 - len(text))
    env = build_environment(env_config("multi_turn", decay=0.5, max_turns=3, solved=-1.0))
    assert [play(env, *texts)[1].reward for texts in (["4"], ["46", "4"], ["46"] * 3)] == [-0.5, -0.5, -1.5]


def test_an_answer_after_which_no_turn_fits_is_paid_as_the_last_one(monkeypatch):
    """Else a policy would write at length where its answers cost something."""
    monkeypatch.setattr("leeway.envs.answers.exact_match", lambda task, text: -1.0)
    env, policy = build_environment(env_config("multi_turn", max_turns=3, solved=1.0)), ScriptedPolicy("45", "46", "47")
    policy.max_model_len = len(PROMPTER.encode(TASK.prompt)) + 8
    (t,) = asyncio.run(env.rollout(TASK, policy))
    assert (t.reward, t.finish_reason, t.metrics["env/turns"]) == (-1.0, "length", 1.0)
    assert [turn.reward for turn in t.turns] == [-1.0]


def test_a_failed_call_costs_the_same_whether_or_not_an_answer_follows():
    env = build_environment(env_config("tool_use", tools=["calculator"], call_penalty=0.25, max_turns=2))
    failing = call("calculator", expression="1/0")
    assert play(env, failing, "46")[1].reward == 0.75
    assert play(env, failing, "45")[1].reward == -0.25
    assert play(env, failing, failing)[1].reward == -0.5


def test_feedback_of_the_users_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hints_of_mine.py").write_text("def hint(task, text):\n    return f'{text} is not {task.answer}'\n")
    policy, _ = play(build_environment(env_config("multi_turn", feedback="hints_of_mine:hint")), "1", "46")
    assert policy.prompts[1].endswith("1 is not 46")


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_tools_are_called_and_their_results_read(tmp_path):
    (tmp_path / "a.md").write_text("Ada was born in London.\n\nShe wrote programs.\n")
    env = build_environment(env_config("tool_use", tools=["calculator", "search"], corpus=str(tmp_path)))
    policy, t = play(env, call("calculator", expression="12+34") + call("search", query="born"), "46")
    assert "<tool_response>\n46\n</tool_response>\n<tool_response>\n[a] Ada was born in London." in policy.prompts[1]
    assert '"name": "calculator"' in policy.prompts[0]
    assert policy.prompts[0].endswith("12 + 34 =")
    assert (t.reward, t.metrics["env/tool_calls"], t.metrics["env/failed_calls"], t.metrics["env/answered"]) == (
        1,
        2,
        0,
        1,
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<tool_call>{", "error: not JSON"),
        ("<tool_call>[1]</tool_call>", "error: expected {"),
        (call("calc", expression="1"), "error: there is no tool 'calc'; there are calculator"),
        (call("calculator"), "error: argument 'expression' is missing"),
        (call("calculator", expression=3), "error: argument 'expression' must be of type string"),
        (call("calculator", expression="1", x=2), "error: there is no argument 'x'"),
        (call("calculator", expression="1/0"), "error: ZeroDivisionError"),
        (call("calculator", expression="__import__('os')"), "error: \"__import__('os')\" is not arithmetic"),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong(text, told):
    policy, t = play(build_environment(env_config("tool_use", call_penalty=0.25)), text, "46")
    assert told in policy.prompts[1]
    assert (t.reward, t.metrics["env/failed_calls"]) == (0.75, 1.0)


def test_only_calling_earns_nothing_and_long_results_are_cut():
    env = build_environment(env_config("tool_use", max_turns=2, max_result_chars=3))
    policy, t = play(env, call("calculator", expression="2**40"), call("calculator", expression="1"))
    assert "<tool_response>\n109\n</tool_response>" in policy.prompts[1]
    assert (t.reward, t.finish_reason, t.metrics["env/answered"]) == (0.0, "max_turns", 0.0)


def test_a_tool_of_the_users_own_that_raises_makes_the_rollout_fail(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tools_of_mine.py").write_text(
        "class Shout:\n    name = 'shout'\n    description = 'd'\n"
        "    parameters = {'type': 'object', 'properties': {'text': {'type': 'string'}}}\n"
        "    async def __call__(self, *, text):\n        return text.upper() if text else 1 / 0\n"
        "class Nameless:\n    description = 'd'\n    parameters = {}\n    def __call__(self): return ''\n"
    )
    env = build_environment(env_config("tool_use", tools=["tools_of_mine:Shout"]))
    policy, _ = play(env, call("shout", text="hey"), "46")
    assert "HEY" in policy.prompts[1]
    with pytest.raises(ZeroDivisionError):
        play(env, call("shout", text=""), "46")
    with pytest.raises(ValueError, match=r"tools_of_mine.py has no name \(str\)"):
        build_environment(env_config("tool_use", tools=["tools_of_mine:Nameless"]))


def test_schema_and_parsing():
    schema = {"properties": {"n": {"type": ["integer", "null"]}, "c": {"enum": ["a"]}}, "required": []}
    check_arguments({"n": 3, "c": "a"}, schema)
    check_arguments({"n": None}, schema)
    for wrong in ({"n": True}, {"n": 1.5}, {"c": "b"}):
        with pytest.raises(ToolError):
            check_arguments(wrong, schema)
    assert [c.name for c in parse_calls("a" + call("x") + "b" + call("y") + "c")] == ["x", "y"]
    assert parse_calls("none") == []


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", 14),
        ("-(2 ** 10) // 3", -342),
        ("max(1, sqrt(16)) + abs(-1)", 5.0),
        ("7 % 4 - 10 / 4", 0.5),
        ("2**-1", 0.5),
    ],
)
def test_calculator(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9**9**9",
        "10**100000",
        "(" * 150 + "1" + ")" * 149,
        "((((((2**4000)*(2**4000))))))",
        "().__class__",
        "open('x')",
        "'a' * 10",
        "[1] * 10**9",
        "x",
        "1 if 1 else 2",
        "lambda: 1",
        "(-8) ** 0.5",
        "sqrt(-1)",
        "exp(1000)",
        "max()",
        "abs(key=1)",
        "1" * 400,
        "",
        "1\0",
    ],
)
def test_calculator_refuses_quickly(expression):
    started = time.process_time()
    with pytest.raises(ValueError):
        calculate(expression)
    assert time.process_time() - started < 0.5


def test_search_ranks_rare_words_and_names_wrong_files(tmp_path):
    lines = [{"text": f"the lake number {i}"} for i in range(9)] + [{"text": "the swan on the lake", "title": "S"}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, lines)))
    corpus = Corpus.load(str(tmp_path / "c.jsonl"))
    assert corpus.best("The SWAN lake", 2)[0].title == "S"
    assert len(corpus.best("the", 3)) == 3
    assert corpus.best("zebra", 3) == []
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(ValueError, match=r"d\.jsonl:2"):
        Corpus.load(str(tmp_path / "d.jsonl"))
    with pytest.raises(ValueError, match=r"env\.options\.corpus"):
        build_environment(env_config("tool_use", tools=["search"], corpus=str(tmp_path / "none")))


def test_frozen_lake_pays_at_the_goal_and_ends_in_a_hole():
    env = build_environment(env_config("frozen_lake", size=3, holes_frac=0.0))
    policy, t = play(env, "I go right", "right.", "DOWN", "what?", "down")
    assert (t.reward, t.metrics["exact_match"], t.metrics["env/illegal"], t.metrics["env/turns"]) == (
        1.0,
        1.0,
        1.0,
        5.0,
    )
    assert policy.prompts[0].endswith("P..\n...\n..G")
    assert policy.prompts[1].endswith(".P.\n...\n..G")
    task = next(
        t
        for i in range(50)
        if (0, 1) in make_lake((t := Task(task_id=str(i), prompt="p")).task_id, size=3, holes_frac=0.3)
    )
    _, t = play(build_environment(env_config("frozen_lake", size=3, holes_frac=0.3)), "right", "right", task=task)
    assert (t.reward, t.metrics["env/turns"]) == (0.0, 1.0)


def test_every_lake_has_a_way_and_follows_from_its_name():
    lakes = [make_lake(str(i), size=5, holes_frac=0.5) for i in range(40)]
    assert all(_has_a_way(lake, 5) for lake in lakes)
    assert lakes == [make_lake(str(i), size=5, holes_frac=0.5) for i in range(40)]
    assert len(set(lakes)) > 30


TORCHRL = '''
import torch
from tensordict import TensorDict
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.llm import ChatEnv
from torchrl.data.llm import History
from torchrl.envs.transforms import Transform

class Guess(EnvBase):
    """Higher or lower, in text."""
    def __init__(self, number):
        super().__init__(batch_size=())
        self.number = number
        self.observation_spec = Composite(observation=NonTensor(shape=(), example_data="a"), shape=())
        self.action_spec = NonTensor(shape=(), example_data="a")
        self.reward_spec = Unbounded(shape=(1,))
    def _reset(self, td):
        return TensorDict(batch_size=()).set_non_tensor("observation", "guess: ")
    def _step(self, td):
        guess = int(td["action"])
        out = TensorDict(batch_size=()).set_non_tensor("observation", "higher: " if guess < self.number else "lower: ")
        right = guess == self.number
        return out.set("reward", torch.tensor([float(right)])).set("done", torch.tensor([right])).set(
            "terminated", torch.tensor([right]))
    def _set_seed(self, seed): pass

class Remark(ChatEnv):
    def _step(self, td):
        out = super()._step(td)
        history = out["history"].prompt
        text = history.content[0][-1]
        remark = History.from_chats([[{"role": "user", "content": text + "?"}]])
        out["history"].prompt = history.extend(remark, inplace=False, dim=-1)
        done = text == "46"
        for name in ("done", "terminated"):
            out.set(name, torch.tensor([[done]]))
        return out.set("reward", torch.tensor([[float(done)]]))

def guess(number=5): return Guess(number)
def chat(): return Remark(batch_size=(1,), system_prompt="Be brief.")
def wrong(): return 3
'''


@pytest.fixture
def torchrl_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "torchrl_of_mine.py").write_text(TORCHRL)
    sys.modules.pop("torchrl_of_mine", None)


def test_torchrl_environment_with_text(torchrl_module):
    env = build_environment(env_config("torchrl", make="torchrl_of_mine:guess", arguments={"number": 4}, max_turns=9))
    policy, t = play(env, "1", "9", "4")
    assert policy.prompts == ["guess: ", "guess: 1higher: ", "guess: 1higher: 9lower: "]
    assert (t.reward, t.metrics["env/turns"], t.finish_reason) == (1.0, 3.0, "stop")


def test_torchrl_chat_environment(torchrl_module):
    env = build_environment(env_config("torchrl", make="torchrl_of_mine:chat", max_turns=9))
    policy, t = play(env, "45", "46")
    assert policy.prompts == ["Be brief.\n12 + 34 =", "Be brief.\n12 + 34 =4545?"]
    assert (t.reward, t.metrics["env/turns"]) == (1.0, 2.0)


def test_torchrl_function_that_makes_something_else(torchrl_module):
    with pytest.raises(TypeError, match="torchrl_of_mine:wrong returned int; expected a torchrl EnvBase"):
        play(build_environment(env_config("torchrl", make="torchrl_of_mine:wrong")), "1")


def test_gymnasium(monkeypatch):
    class Walk:
        def __init__(self, length):
            self.length, self.closed = length, False
            made.append(self)

        def reset(self, *, seed):
            self.at, self.seed = 0, seed
            return self.at, {}

        def step(self, action):
            self.at += (-1, 1)[action]
            return self.at, float(self.at == self.length), self.at == self.length, False, {"at": self.at}

        def close(self):
            self.closed = True

    made: list = []
    module = ModuleType("gymnasium")
    module.make = lambda id, **arguments: Walk(**arguments)  # type: ignore[attr-defined]
    module.__spec__ = SimpleNamespace(name="gymnasium")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "gymnasium", module)
    env = build_environment(env_config("gymnasium", id="Walk", arguments={"length": 1}, actions=["left", "right"]))
    policy, t = play(env, "left", "hm", "right", "not left but right")
    assert policy.prompts[0] == "12 + 34 =\n0"
    assert policy.prompts[2].endswith("Expected one of: left, right.")
    assert (t.reward, t.metrics["env/illegal"], t.metrics["at"]) == (1.0, 1.0, 1.0)
    assert made[0].closed
    asyncio.run(env.rollout(TASK, ScriptedPolicy("right", group_size=3)))
    play(env, "right", task=replace(TASK, task_id="another"))
    seeds = [walk.seed for walk in made]
    assert len({*seeds[:4]}) == 1, "a group begins alike"
    assert seeds[4] != seeds[0]


def test_gymnasium_that_is_not_installed_is_said_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install gymnasium"):
        build_environment(env_config("gymnasium", id="X"))
