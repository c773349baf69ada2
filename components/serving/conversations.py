"""The answers that an address gave lately, token by token: to be continued, rewarded, and made into groups."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..envs.recorder import seen_message
from ..envs.server import Refusal
from ..envs.transcript import Transcript
from ..types import Trajectory


@dataclass(eq=False)
class Answered:
    """One choice of a response, with the whole conversation up to it.

    `unfit`: why the trainer could not reproduce its log-probabilities ("": it could). `continued_as`: the messages of
    the conversation with this answer, as the next request will show them. `commit`: the name of the group that it is
    in; without `is_committed`, it was sent and nobody knows whether it arrived.
    """

    id: str
    owner: str
    transcript: Transcript
    unfit: str
    continued_as: bytes | None = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    commit: str = ""
    is_committed: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.transcript.prompt_tokens) + self.transcript.num_response_tokens

    def trajectory(self) -> Trajectory:
        assert self.reward is not None
        return self.transcript.trajectory(reward=self.reward, metrics=self.metrics)


class Conversations:
    """Those with at most `max_tokens` tokens together, each of its client. Where there are more, the oldest of the
    client with the most tokens are forgotten.
    """

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens: Counter[str] = Counter()  # of each client
        self._answers: dict[str, Answered] = {}
        self._in_order: defaultdict[str, deque[str]] = defaultdict(deque)  # ids of each client, oldest first
        self._choices: dict[str, int] = {}  # of each response, how many are still known
        self._by_messages: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, response_id: str, answers: Sequence[Answered]) -> None:
        """All choices of one response."""
        self._choices[response_id] = len(answers)
        for answered in answers:
            self._answers[answered.id] = answered
            self._in_order[answered.owner].append(answered.id)
            self._num_tokens[answered.owner] += answered.num_tokens
            if answered.continued_as is not None:
                self._by_messages[answered.continued_as] = answered.id
        while self._num_tokens.total() > self._max_tokens:
            self._forget_oldest(self._num_tokens.most_common(1)[0][0])

    def continued(self, owner: str, messages: Sequence[dict[str, Any]], tools: str | None) -> tuple[Answered, int]:
        """The answer that these messages continue, and how many of them stand before what is new.

        Raises KeyError where there is none: then the conversation begins with this request.
        """
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1) + 1
        if last == len(messages):
            raise KeyError("the last message is the assistant's own")
        return self._answers[self._by_messages[messages_key(owner, messages[:last], tools)]], last

    def choices(self, owner: str, name: str) -> list[Answered]:
        """The choice ID/INDEX, or all choices of the response ID. Raises Refusal: another client's are unknown too."""
        known = self._choices.get(name)
        ids = [name] if known is None else [choice_id(name, i) for i in range(known)]
        found = [self._answers.get(one) for one in ids]
        if not all(answered is not None and answered.owner == owner for answered in found):
            raise Refusal(404, f"id: got {name}, expected that of an answer of yours that is still kept", "not_found")
        return [answered for answered in found if answered is not None]

    def clear(self) -> None:
        self.__init__(max_tokens=self._max_tokens)

    def _forget_oldest(self, owner: str) -> None:
        name = self._in_order[owner].popleft()
        answered = self._answers.pop(name)
        self._num_tokens[owner] -= answered.num_tokens
        self._choices.pop(name.partition("/")[0], None)
        if answered.continued_as is not None and self._by_messages.get(answered.continued_as) == name:
            del self._by_messages[answered.continued_as]


def choice_id(response_id: str, index: int) -> str:
    return f"{response_id}/{index}"


def messages_key(owner: str, messages: Sequence[dict[str, Any]], tools: str | None) -> bytes:
    """Equal for equal conversations of one client. Raises ValueError for a message that is not text."""
    seen = [owner, tools, [seen_message(m) for m in messages]]
    return hashlib.sha256(json.dumps(seen).encode(errors="surrogatepass")).digest()


def commit_name(answers: Sequence[Answered]) -> str:
    return hashlib.sha256(" ".join(sorted(a.id for a in answers)).encode()).hexdigest()


def check_group(answers: Sequence[Answered], *, group_size: int) -> None:
    """Raise Refusal unless these can be trained on together: all rewarded, to the same prompt."""
    if len(answers) != group_size:
        raise Refusal(400, f"ids: got {len(answers)} answers, expected algorithm.group_size {group_size} for a group")
    if len({a.id for a in answers}) < len(answers):
        raise Refusal(400, "ids: got the same answer twice, expected each once")
    for a in answers:
        if a.is_committed or a.commit not in ("", commit_name(answers)):
            raise Refusal(409, f"ids: {a.id} was committed already, expected each answer once", "conflict")
        if a.unfit:
            raise Refusal(400, f"ids: {a.id} cannot be trained on: {a.unfit}")
        if a.reward is None:
            raise Refusal(400, f"ids: {a.id} has no reward yet; POST /v1/feedback first")
        if a.transcript.prompt_tokens != answers[0].transcript.prompt_tokens:
            raise Refusal(400, f"ids: {a.id} answers another prompt than {answers[0].id}; a group has one prompt")
