"""What a served address answers: OpenAI's chat and text completions, feedback on them, and groups made of them.

request -> prompt's tokens -> Router: an engine -> Sampler: choices -> answer, or a stream of events
                                                              \\-> Conversations -> feedback -> commit: a Group
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..collector.checks import checked
from ..envs.openai_requests import said
from ..envs.recorder import chat_turn, rendered
from ..envs.server import Answer, Handler, Refusal
from ..envs.tools import describe_schemas
from ..envs.transcript import Transcript, with_system
from ..group import Group
from ..types import NO_VERSION
from .conversations import Answered, Conversations, check_group, choice_id, commit_name, messages_key
from .requests import Chat, Commit, Completion, Feedback, Sampling
from .router import Router
from .sampling import Choice, Sampler
from .text import GrowingText

T = TypeVar("T")
CALL_MARK = "<tool_call>"
LONG_TEXT = 20_000
"""Characters that are encoded beside the event loop: it takes milliseconds."""
LONG_ANSWER = 5_000
"""Tokens, prompts of all choices included, of an answer that is written down beside the event loop."""


@dataclass(frozen=True, kw_only=True)
class FrontSettings:
    """`temperature`: of requests that name none, and the one that groups may have been sampled at. `group_size`: of
    groups that are committed. `max_requests`: choices of one client that are sampled at a time. `masked`: the setting
    by which the run samples from some of the tokens alone, which answers here do not ("": none).
    """

    model: str
    max_model_len: int
    max_response_tokens: int
    temperature: float
    timeout_s: float
    keep_tokens: int
    group_size: int
    max_requests: int
    masked: str = ""


class Unanswered(Exception):
    """Whether a group was taken is not known; the same one may be given again."""


Give = Callable[[Group, str, str], Awaitable[None]]
"""`give(group, commit, prompt)` hands a group to the trainer: trained on once, however often it is given under this
name. Raises Refusal where it cannot be trained on, or not now, and `Unanswered`.
"""


class Front:
    """`give`: None where commits are refused. `newest_version`: that engines serve now."""

    def __init__(
        self,
        settings: FrontSettings,
        router: Router,
        prompter: Any,
        *,
        give: Give | None,
        newest_version: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._router = router
        self._prompter = prompter
        self._give = give
        self._newest_version = newest_version
        self._sampler = Sampler(router, deadline_s=settings.timeout_s)
        self._conversations = Conversations(max_tokens=settings.keep_tokens)
        self._num_sampled: Counter[str] = Counter()  # choices that are being sampled, of each client

    def forget(self) -> None:
        """All answers: the weights that gave them are no more."""
        self._conversations.clear()

    def health(self) -> Answer:
        """200 while an engine is up."""
        engines = [
            {"name": engine.name, "up": engine.is_up, "sequences": num} for engine, num in self._router.engines()
        ]
        is_up = any(engine["up"] for engine in engines)
        body = {"status": "ok" if is_up else "no engine is up", "policy_version": self._newest_version()}
        return Answer({**body, "engines": engines}, 200 if is_up else 503)

    def routes(self, owner: str) -> Mapping[tuple[str, str], Handler]:
        """For one client: it can continue, reward and commit what was answered to it, and nothing else."""

        def of_owner(handle: Callable[[str, Any], Awaitable[Answer]]) -> Handler:
            async def handler(body: Any) -> Answer:
                try:
                    return await handle(owner, body)
                except ValueError as error:
                    raise Refusal(400, said(error)) from None

            return handler

        return {
            ("GET", "/v1/models"): of_owner(self._models),
            ("POST", "/v1/chat/completions"): of_owner(self._chat),
            ("POST", "/v1/completions"): of_owner(self._complete),
            ("POST", "/v1/feedback"): of_owner(self._feedback),
            ("POST", "/v1/commit"): of_owner(self._commit),
        }

    async def _models(self, owner: str, body: Any) -> Answer:
        s = self._settings
        own = {"id": s.model, "object": "model", "owned_by": "leeway", "max_model_len": s.max_model_len}
        return Answer({"object": "list", "data": [{**own, "policy_version": self._newest_version()}]})

    async def _chat(self, owner: str, body: Any) -> Answer:
        asked = self._asked(Chat, body)
        tools = [tool["function"] for tool in body.get("tools") or []]  # as they came, with keys that only models read
        tools_text = describe_schemas(tools) if tools else None
        transcript, unfit = await _beside(asked.messages, self._begun, owner, body["messages"], tools_text)
        return await self._answer(_ChatForm(self, owner, body["messages"], tools_text), asked, transcript, unfit)

    async def _complete(self, owner: str, body: Any) -> Answer:
        asked = self._asked(Completion, body)
        transcript = await _beside(asked.one_prompt, self._begun_with, asked.one_prompt)
        return await self._answer(_TextForm(self, owner), asked, transcript, "")

    async def _feedback(self, owner: str, body: Any) -> Answer:
        given = Feedback.model_validate(body)
        (answered, *more) = self._conversations.choices(owner, given.id)
        if more:
            raise Refusal(400, f"id: got {given.id}, which has {len(more) + 1} choices; expected one, as ID/INDEX")
        if answered.is_committed:
            raise Refusal(409, f"id: {answered.id} was committed already; its reward is final", "conflict")
        answered.reward, answered.metrics = given.reward, dict(given.metrics)
        return Answer({"id": answered.id, "reward": given.reward})

    async def _commit(self, owner: str, body: Any) -> Answer:
        asked, s = Commit.model_validate(body), self._settings
        if self._give is None:
            raise Refusal(409, "commit: nothing is trained here; serve the folder of a running train job", "no_trainer")
        answers = [answered for name in asked.ids for answered in self._conversations.choices(owner, name)]
        check_group(answers, group_size=s.group_size)
        trajectories = [answered.trajectory() for answered in answers]
        versions = {v for t in trajectories for v in t.policy_versions if v != NO_VERSION}
        samples = checked(
            trajectories,
            group_size=s.group_size,
            temperature=s.temperature,
            max_model_len=s.max_model_len,
            versions=versions,
        )
        task_id = asked.task_id or answers[0].id.partition("/")[0]
        group = Group.of(trajectories, samples=samples, group_id=0, task_id=task_id)
        commit, prompt = commit_name(answers), self._prompter.tokenizer.decode(answers[0].transcript.prompt_tokens)
        for answered in answers:  # before anything is awaited: the same answers cannot be committed meanwhile
            answered.commit, answered.is_committed = commit, True
        try:
            await self._give(group, commit, prompt)
        except BaseException as error:
            for answered in answers:
                answered.is_committed = False
                if isinstance(error, Refusal):
                    answered.commit = ""
            if isinstance(error, Unanswered):
                text = "the train job did not answer; commit the same ids again, they are trained on once"
                raise Refusal(503, f"commit: {text}", "no_answer") from None
            raise
        oldest, newest = min(versions), max(versions)
        return Answer({"task_id": task_id, "policy_versions": [oldest, newest], "size": len(answers)})

    def _asked(self, kind: type[Any], body: Any) -> Any:
        asked = kind.model_validate(body)
        asked.refuse_what_is_not_served()
        if asked.model not in (None, self._settings.model):
            name = self._settings.model
            raise Refusal(404, f"model: got {asked.model[:80]}, expected {name}, which is served here", "not_found")
        return asked

    def _begun(self, owner: str, messages: list[dict[str, Any]], tools_text: str | None) -> tuple[Transcript, str]:
        """The conversation up to here; where it continues an answer of this address, with the tokens of that answer,
        and with why they cannot be trained on, if so.
        """
        try:
            answered, num_known = self._conversations.continued(owner, messages, tools_text)
        except KeyError:
            return Transcript(self._prompter, with_system(rendered(messages), tools_text)), ""
        transcript = answered.transcript.copy()
        if not transcript.observed(rendered(messages[num_known:]), max_len=self._settings.max_model_len):
            raise self._no_room(len(transcript.tokens))
        return transcript, answered.unfit

    def _begun_with(self, prompt: str | list[int]) -> Transcript:
        if isinstance(prompt, str):
            return Transcript(self._prompter, self._prompter.encode_text(prompt))
        if max(prompt) >= self._prompter.vocab_size:  # an engine would crash
            size = self._prompter.vocab_size
            raise ValueError(f"prompt: got the token id {max(prompt)}, expected ids from 0 to {size - 1}")
        return Transcript(self._prompter, prompt)

    async def _answer(self, form: _Form, asked: Any, transcript: Transcript, unfit: str) -> Answer:
        """`unfit`: why what came before cannot be trained on."""
        s, prompt_tokens = self._settings, transcript.tokens
        room = s.max_model_len - len(prompt_tokens)
        if room < 1:
            raise self._no_room(len(prompt_tokens))
        temperature = s.temperature if asked.temperature is None else asked.temperature
        top_p = 1.0 if asked.top_p is None else asked.top_p
        hidden = CALL_MARK if form.reads_calls else ""
        choices = [Choice(GrowingText(self._prompter, stops=asked.stops, hidden=hidden)) for _ in range(asked.n or 1)]
        growing = self._sampler.grow(
            prompt_tokens,
            choices,
            listens=bool(asked.stream or asked.stops),
            temperature=temperature,
            max_tokens=min(asked.longest or s.max_response_tokens, room),
            stop_token_ids=sorted({*self._prompter.stop_token_ids, *(asked.stop_token_ids or ())}),
            seed=asked.seed,
            **({} if top_p == 1.0 else {"top_p": top_p}),
        )
        growing = self._counted(form.owner, len(choices), growing)
        response = _Response(
            form,
            asked,
            transcript,
            choices,
            prompt_tokens,
            unfit=unfit or self._unfit(temperature, top_p),
            model=s.model,
        )
        if asked.stream:
            return Answer(None, events=response.events(growing))
        async for _ in growing:
            pass
        return Answer(await response.whole())

    async def _counted(self, owner: str, num: int, growing: AsyncGenerator[None]) -> AsyncGenerator[None]:
        """`growing`; `num` choices of it are the client's while it lasts. Raises Refusal where those are too many."""
        most, others = self._settings.max_requests, self._num_sampled[owner]
        if others + num > most:
            own = f"n: got {num}, and {others} choices of yours are being sampled"
            raise Refusal(429, f"{own}; expected at most {most} at a time (serve.max_requests)", "rate_limit_exceeded")
        self._num_sampled[owner] += num
        try:
            async for _ in growing:
                yield
        finally:
            self._num_sampled[owner] -= num
            await growing.aclose()

    def _unfit(self, temperature: float, top_p: float) -> str:
        if self._settings.masked:
            return f"it was sampled from all tokens, and the run has {self._settings.masked}"
        if top_p != 1.0:
            return f"it was sampled with top_p={top_p:g}"
        if temperature != self._settings.temperature:
            return f"it was sampled at temperature {temperature:g}, and the run's is {self._settings.temperature:g}"
        return ""

    def record(self, response_id: str, answers: Sequence[Answered]) -> None:
        self._conversations.add(response_id, answers)

    def token_text(self, token: int) -> str:
        return self._prompter.tokenizer.decode([token])

    def _no_room(self, num_tokens: int) -> Refusal:
        most = self._settings.max_model_len
        text = f"the conversation has {num_tokens} tokens; at most {most} fit with the answer"
        return Refusal(400, text, "context_length_exceeded")


class _Form:
    """How the choices of one kind of request are written down."""

    object, event, prefix, reads_calls = "", "", "", False

    def __init__(self, front: Front, owner: str) -> None:
        self.front = front
        self.owner = owner

    def whole(self, choice: Choice, number: int) -> tuple[dict[str, Any], str]:
        """(what the choice says, its finish reason)."""
        raise NotImplementedError

    def delta(self, choice: Choice, *, is_first: bool) -> dict[str, Any]:
        raise NotImplementedError

    def logprobs(self, choice: Choice, start: int) -> dict[str, Any]:
        raise NotImplementedError

    def continued_as(self, choice: Choice, number: int) -> bytes | None:
        return None


class _TextForm(_Form):
    object, event, prefix = "text_completion", "text_completion", "cmpl"

    def whole(self, choice: Choice, number: int) -> tuple[dict[str, Any], str]:
        return {"text": choice.text.text}, choice.finish_reason

    def delta(self, choice: Choice, *, is_first: bool) -> dict[str, Any]:
        return {"text": choice.new_text}

    def logprobs(self, choice: Choice, start: int) -> dict[str, Any]:
        tokens = [self.front.token_text(token) for token in choice.tokens[start:]]
        return {"tokens": tokens, "token_logprobs": choice.logprobs[start:], "top_logprobs": None, "text_offset": None}


class _ChatForm(_Form):
    object, event, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, front: Front, owner: str, messages: list[dict[str, Any]], tools_text: str | None) -> None:
        super().__init__(front, owner)
        self._messages = messages
        self._tools_text = tools_text
        self.reads_calls = tools_text is not None

    def whole(self, choice: Choice, number: int) -> tuple[dict[str, Any], str]:
        message = self._message(choice, number)
        return {"message": message}, "tool_calls" if "tool_calls" in message else choice.finish_reason

    def delta(self, choice: Choice, *, is_first: bool) -> dict[str, Any]:
        return {"delta": {**({"role": "assistant"} if is_first else {}), "content": choice.new_text}}

    def logprobs(self, choice: Choice, start: int) -> dict[str, Any]:
        content = []
        for token, logprob in zip(choice.tokens[start:], choice.logprobs[start:], strict=True):
            text = self.front.token_text(token)
            content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": content}

    def continued_as(self, choice: Choice, number: int) -> bytes | None:
        return messages_key(self.owner, [*self._messages, self._message(choice, number)], self._tools_text)

    def _message(self, choice: Choice, number: int) -> dict[str, Any]:
        if not self.reads_calls:
            return {"role": "assistant", "content": choice.text.text}
        turn = chat_turn(choice.completion(), 0, number=number)
        calls = {"tool_calls": turn.calls} if turn.calls else {}
        return {"role": "assistant", "content": turn.text, **calls}


class _Response:
    """One answer, whole or as events; recorded when it is complete."""

    def __init__(
        self,
        form: _Form,
        asked: Sampling,
        transcript: Transcript,
        choices: list[Choice],
        prompt_tokens: list[int],
        *,
        unfit: str,
        model: str,
    ) -> None:
        self._form = form
        self._asked = asked
        self._transcript = transcript
        self._choices = choices
        self._num_prompt_tokens = len(prompt_tokens)
        self._unfit = unfit
        self._id = f"{form.prefix}-{secrets.token_hex(12)}"
        self._head = {"id": self._id, "created": int(time.time()), "model": model}

    async def whole(self) -> bytes:
        """The answer as JSON."""
        await self._record()
        choices = await self._made(lambda: [self._written(i, choice) for i, choice in enumerate(self._choices)])
        around = {"object": self._form.object, **self._head, "usage": self._usage(), "choices": []}
        return json.dumps(around).encode().removesuffix(b"]}") + b", ".join(choices) + b"]}"

    def _written(self, index: int, choice: Choice) -> bytes:
        # Each choice by itself: nothing else runs in this process while one object is encoded.
        said_by, reason = self._form.whole(choice, index)
        logprobs = self._form.logprobs(choice, 0) if self._asked.wants_logprobs else None
        own = {"index": index, **said_by, "finish_reason": reason, "logprobs": logprobs}
        return json.dumps({**own, **self._token_ids(choice, 0)}).encode()

    async def events(self, growing: AsyncGenerator[None]) -> AsyncGenerator[dict[str, Any]]:
        head = {"object": self._form.event, **self._head}
        ended: set[int] = set()
        try:
            async for _ in growing:
                for i, choice in enumerate(self._choices):
                    if (event := self._event(choice, i)) is not None:
                        yield {**head, "choices": [event]}
                    if choice.finish_reason and i not in ended:
                        ended.add(i)
                        if len(ended) == len(self._choices):
                            await self._record()
                        yield {**head, "choices": [self._last_event(choice, i)]}
        finally:
            await growing.aclose()
        if self._asked.wants_usage:
            yield {**head, "choices": [], "usage": self._usage()}

    def _event(self, choice: Choice, index: int) -> dict[str, Any] | None:
        tells_tokens = self._asked.wants_logprobs or self._asked.return_token_ids
        start, is_first = choice.num_told, choice.num_told == 0
        if not choice.new_text and not (tells_tokens and len(choice.tokens) > start):
            return None
        own = {"index": index, **self._form.delta(choice, is_first=is_first), "finish_reason": None}
        if self._asked.wants_logprobs:
            own["logprobs"] = self._form.logprobs(choice, start)
        own |= self._token_ids(choice, start)
        choice.new_text, choice.num_told = "", len(choice.tokens)
        return own

    def _last_event(self, choice: Choice, index: int) -> dict[str, Any]:
        said_by, reason = self._form.whole(choice, index)
        last = self._form.delta(choice, is_first=choice.num_told == 0)
        if calls := said_by.get("message", {}).get("tool_calls"):
            last["delta"]["tool_calls"] = [{"index": k, **call} for k, call in enumerate(calls)]
        return {"index": index, **last, "finish_reason": reason}

    def _token_ids(self, choice: Choice, start: int) -> dict[str, Any]:
        if not self._asked.return_token_ids:
            return {}
        return {"token_ids": choice.tokens[start:], "policy_versions": choice.versions[start:]}

    def _usage(self) -> dict[str, int]:
        sampled = sum(len(choice.tokens) for choice in self._choices)
        prompt = self._num_prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    async def _record(self) -> None:
        self._form.front.record(self._id, await self._made(self._answered))

    def _answered(self) -> list[Answered]:
        answers = []
        for i, choice in enumerate(self._choices):
            transcript = self._transcript.copy()
            transcript.sampled(choice.completion())
            key = self._form.continued_as(choice, i)
            own = choice_id(self._id, i)
            answers.append(Answered(own, self._form.owner, transcript, self._unfit, continued_as=key))
        return answers

    async def _made(self, work: Callable[[], T]) -> T:
        """In a thread where it takes long: all choices have ended, and nothing changes them any more."""
        num = sum(self._num_prompt_tokens + len(choice.tokens) for choice in self._choices)
        return work() if num < LONG_ANSWER else await asyncio.to_thread(work)


async def _beside(content: Any, work: Callable[..., T], *args: Any) -> T:
    """Long texts are encoded in a thread."""
    length = len(content) if isinstance(content, str) else sum(len(getattr(part, "text", "")) for part in content)
    return work(*args) if length < LONG_TEXT else await asyncio.to_thread(work, *args)
