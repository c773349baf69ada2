"""Conversations token by token: what was sampled is what is trained on, whatever templates and observations do."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.collector.collector import derived_seed
from leeway.collector.policy import EnginePolicy
from leeway.envs import StepEnvironment, Transcript
from leeway.tasks import Prompter
from leeway.tasks.prompting import ASSISTANT_STANDS
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.types import NO_VERSION, Completion, Task

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Qwen3's way: an assistant's turn that nothing follows gets an empty thought, one in the middle does not.
LAST_TURN_THINKS = CHATML.replace(
    "'\\n' + m['content']",
    "'\\n' + ('<think></think>' if loop.last and m['role'] == 'assistant' else '') + m['content']",
)
# Writes the number of messages first, so that the beginning depends on what follows.
REWRITING = "{{ messages | length }}" + CHATML
TEMPLATES = {"none": None, "chatml": CHATML, "thinking": LAST_TURN_THINKS}


def make_prompter(template: str | None) -> Prompter:
    tokenizer = build_tokenizer(["user assistant tool guess the number higher lower 1 2 3 4 5"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return Prompter(tokenizer)


PROMPTERS = {name: make_prompter(template) for name, template in TEMPLATES.items()}


class FakeEngine:
    """Samples token ids at random, most of which no tokenizer would produce; remembers every request."""

    def __init__(self, prompter: Prompter, seed: int = 0) -> None:
        self._random, self._stops = random.Random(seed), prompter.stop_token_ids
        self.requests: list[list[int]] = []
        self.seeds: list[int | None] = []
        self.sampled: list[Any] = []

    async def generate(self, prompt_tokens, *, n, max_tokens, seed=None, **_):
        await asyncio.sleep(self._random.random() * 0.001)
        self.requests.append(list(prompt_tokens))
        self.seeds.append(seed)
        length = self._random.randint(0, max_tokens - 1)
        tokens = [self._random.randrange(2, 290) for _ in range(length)]
        cut = self._random.random() < 0.3 or not self._stops
        tokens = [t for t in tokens if t not in self._stops] + ([] if cut else [self._random.choice(self._stops)])
        tokens = tokens or [5]
        done = Completion(
            tokens=tokens,
            logprobs=[-self._random.random() for _ in tokens],
            policy_versions=sorted(self._random.choices(range(9), k=len(tokens))),
            finish_reason="length" if cut else "stop",
            text="",
        )
        self.sampled.append((list(prompt_tokens), done))
        return [done]


def make_policy(prompter: Prompter, engine: Any, *, group_size: int = 1, max_model_len: int = 4000, seed=None):
    return EnginePolicy(
        engine,
        prompter,
        group_size=group_size,
        temperature=1.0,
        max_prompt_tokens=1000,
        max_response_tokens=9,
        max_model_len=max_model_len,
        seed=seed,
        count_tokens=lambda count: None,
        generating=contextlib.nullcontext,
    )


words = st.text(alphabet="ab 1\n<|", min_size=1, max_size=12)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": words}), min_size=1, max_size=3
)
token_ids = st.lists(st.integers(2, 280), min_size=1, max_size=6)


class Says(StepEnvironment):
    """Says what it is given, one observation a turn."""

    def __init__(self, observations: list[Any]) -> None:
        self.max_turns = 99
        self._observations = observations

    async def reset(self, task):
        self._left = list(self._observations)
        return self._left.pop(0)

    async def step(self, completion):
        return (self._left.pop(0), 1.0, False, {}) if self._left else (None, 1.0, True, {"exact_match": True})


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    template=st.sampled_from(sorted(TEMPLATES)),
    observations=st.lists(st.one_of(words, messages, token_ids), min_size=1, max_size=6),
    first=st.one_of(words, messages),
    seed=st.integers(0, 10**6),
)
def test_nothing_is_lost_and_nothing_duplicated(template, observations, first, seed):
    prompter = PROMPTERS[template]
    engine = FakeEngine(prompter, seed)
    observations = [first, *observations]
    (t,) = asyncio.run(Says(observations).rollout(Task(task_id="t", prompt="?"), make_policy(prompter, engine)))

    # Each request is the last one, what was sampled, and what came between: nothing in front is ever changed.
    spans = []
    for (prompt, completion), following in zip(engine.sampled, [*engine.requests[1:], None], strict=True):
        spans.append((len(prompt), completion))
        if following is not None:
            assert following[: len(prompt) + len(completion.tokens)] == [*prompt, *completion.tokens]
    whole = [*t.prompt_tokens, *t.response_tokens]
    last_prompt, last = engine.sampled[-1]
    assert whole == [*last_prompt, *last.tokens]
    assert t.prompt_tokens == engine.requests[0] == prompter.encode(first)
    assert len(spans) == len(observations) == t.reward == t.metrics["env/turns"]

    # What was sampled stands where it was sampled, with its own logprobs and versions; all else is masked.
    mask = [False] * len(t.response_tokens)
    for start, completion in spans:
        here = slice(start - len(t.prompt_tokens), start - len(t.prompt_tokens) + len(completion.tokens))
        assert t.response_tokens[here] == completion.tokens
        assert t.behavior_logprobs[here] == completion.logprobs
        assert t.policy_versions[here] == completion.policy_versions
        mask[here] = [True] * len(completion.tokens)
    assert t.loss_mask == mask
    written = [(p, v) for p, v, m in zip(t.behavior_logprobs, t.policy_versions, mask, strict=True) if not m]
    assert set(written) <= {(0.0, NO_VERSION)}

    # With stand-ins for what was sampled, the conversation reads as the template writes it.
    if prompter.has_template and not any(isinstance(o[0], int) for o in observations):
        assert _with_stand_ins(prompter, t, spans) == _rendered(prompter, observations)


def _with_stand_ins(prompter, t, spans) -> str:
    """The text of a trajectory, each sampled turn read as the stand-in, up to the last one."""
    decode = prompter.tokenizer.decode
    text, position = decode(t.prompt_tokens), len(t.prompt_tokens)
    whole = [*t.prompt_tokens, *t.response_tokens]
    for start, completion in spans:
        text += decode(whole[position:start])
        end = completion.tokens[-1]
        text += ASSISTANT_STANDS + (decode([end]) if end == prompter._turn_end else "")
        position = start + len(completion.tokens)
    return text.removesuffix("<|im_end|>")


def _rendered(prompter, observations) -> str:
    conversation: list[dict[str, str]] = []
    for observation in observations:
        conversation += [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        text = prompter._render(conversation) + ASSISTANT_STANDS
        conversation.append({"role": "assistant", "content": ASSISTANT_STANDS})
    return text


def test_the_end_of_a_turn_is_written_once_whoever_wrote_it():
    prompter = PROMPTERS["chatml"]
    end = prompter.tokenizer.convert_tokens_to_ids("<|im_end|>")
    eos = prompter.tokenizer.eos_token_id
    assert {end, eos} <= set(prompter.stop_token_ids)
    for last, expected in ((end, 1), (7, 1), (eos, 1)):
        transcript = Transcript(prompter, "1")
        transcript.sampled(
            Completion(tokens=[7, last], logprobs=[0.0] * 2, policy_versions=[1] * 2, finish_reason="stop", text="")
        )
        before = len(transcript.tokens) - 2
        transcript.observed("2")
        new = transcript.tokens[before:]
        assert new[:2] == [7, last]
        assert new.count(end) == expected + 1  # and the end of the user's turn
        assert prompter.tokenizer.decode(new).endswith("user\n2<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_rewrites_earlier_turns_is_refused():
    prompter = make_prompter(REWRITING)
    with pytest.raises(ValueError, match="chat template: it rewrites earlier turns"):
        asyncio.run(
            Says(["1", "2"]).rollout(Task(task_id="t", prompt="?"), make_policy(prompter, FakeEngine(prompter)))
        )


def test_token_ids_first_and_text_later_needs_no_template_or_is_refused():
    prompter = PROMPTERS["none"]
    (t,) = asyncio.run(
        Says([[5, 6], "1"]).rollout(Task(task_id="t", prompt="?"), make_policy(prompter, FakeEngine(prompter)))
    )
    assert t.prompt_tokens == [5, 6]
    prompter = PROMPTERS["chatml"]
    with pytest.raises(TypeError, match="token ids"):
        asyncio.run(
            Says([[5, 6], "1"]).rollout(Task(task_id="t", prompt="?"), make_policy(prompter, FakeEngine(prompter)))
        )


class Counting(StepEnvironment):
    """Counts its own turns, pays one point for each, never ends by itself; `closed` is shared by all conversations."""

    def __init__(self, *, max_turns: int = 3, fails_at: int = -1) -> None:
        self.max_turns, self.fails_at, self.closed = max_turns, fails_at, []

    async def reset(self, task):
        self.turns = 0
        return "1"

    async def step(self, completion):
        self.turns += 1
        if self.turns == self.fails_at:
            raise RuntimeError("broken")
        return "2", float(self.turns), False, {"turn": self.turns, "note": "text", "odd": float("nan")}

    async def close(self):
        self.closed.append(self.turns)


def test_each_trajectory_is_a_conversation_of_its_own_and_they_run_together():
    prompter, env = PROMPTERS["chatml"], Counting()
    group = asyncio.run(
        env.rollout(Task(task_id="t", prompt="?"), make_policy(prompter, FakeEngine(prompter), group_size=5))
    )
    assert [t.reward for t in group] == [6.0] * 5
    assert [t.metrics for t in group] == [{"env/turns": 3.0, "turn": 3.0}] * 5
    assert {t.finish_reason for t in group} == {"max_turns"}
    assert all(t.loss_mask[-1] for t in group)
    assert env.closed == [3] * 5


def test_a_conversation_without_room_for_another_turn_ends_with_what_was_sampled():
    prompter = PROMPTERS["chatml"]
    policy = make_policy(prompter, FakeEngine(prompter), max_model_len=60)
    (t,) = asyncio.run(Counting(max_turns=99).rollout(Task(task_id="t", prompt="?"), policy))
    assert t.finish_reason == "length"
    assert len(t.prompt_tokens) + len(t.response_tokens) <= 60
    assert t.loss_mask[-1]


def test_a_failure_cancels_the_other_conversations_and_all_are_closed():
    prompter, env = PROMPTERS["chatml"], Counting(max_turns=50, fails_at=4)
    engine = FakeEngine(prompter)
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(env.rollout(Task(task_id="t", prompt="?"), make_policy(prompter, engine, group_size=4)))
    assert len(env.closed) == 4
    assert len(engine.requests) < 4 * 6


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (("2", 1.0, False), r"returned .*expected \(observation, reward, done, info\)"),
        (None, "returned None"),
        (("2", "much", False, {}), "gave reward 'much'"),
        (("2", float("nan"), False, {}), "gave reward nan; expected a finite number"),
        (("2", 1.0, False, [1]), "expected a dict"),
        (("", 1.0, False, {}), "gave the observation ''"),
        (([{"role": "user"}], 1.0, False, {}), "gave the observation"),
        ((3, 1.0, False, {}), "gave the observation 3"),
    ],
)
def test_wrong_returns_name_the_method_its_file_and_line(result, message):
    class Wrong(StepEnvironment):
        async def step(self, completion):
            return result

    prompter = PROMPTERS["chatml"]
    line = Wrong.step.__code__.co_firstlineno
    with pytest.raises(
        (TypeError, ValueError), match=rf"Wrong.step \(.*test_step_env.py:{line}\) .*{message}|{message}"
    ) as caught:
        asyncio.run(Wrong().rollout(Task(task_id="t", prompt="1"), make_policy(prompter, FakeEngine(prompter))))
    assert f"test_step_env.py:{line})" in str(caught.value)


def test_seeds_do_not_depend_on_how_conversations_interleave():
    def seeds(order_seed):
        prompter = PROMPTERS["none"]
        engine = FakeEngine(prompter, order_seed)
        asyncio.run(
            Counting().rollout(Task(task_id="t", prompt="?"), make_policy(prompter, engine, group_size=4, seed=11))
        )
        return engine.seeds

    assert sorted(seeds(1), key=str) == sorted(seeds(2), key=str)
    assert len(set(seeds(1))) == 12
    assert derived_seed(11, 0) not in seeds(1)
