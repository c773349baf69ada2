"""Conversations that may go on: their keys and values wait for the next turn, which then reads only what is new.

    turn 1   | prompt        | answer |
    turn 2   | prompt, answer, reply            | answer |
               ---- they are there ----  read,    generated a token at a time

Tokens that are read have keys and values that differ in their last bits from those that they had when they were
generated. So a seeded conversation that had to make room is computed again as it was: read where it was read, and a
token at a time where it was generated. Memory decides then how long a turn takes, and no number. For the same reason a
rollout goes on from its own conversations alone: whether another one has said the same by now is a matter of time.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .hf_cache import Row

Turn = tuple[int, int]
"""How many tokens a conversation had when an answer began, and when it ended: twice the same where a part ends that
was read.
"""
MOST_TOKENS = 2**24
"""That conversations are remembered with, four bytes each, whether their keys and values are there or not. One that had
to be forgotten is read as a whole.
"""
_TOKEN = array("i")
_Said = tuple[int | None, int, bytes]
"""A version, a rollout's identity, and tokens."""


@dataclass(eq=False)
class Conversation:
    """`row` has all of its tokens but the last (None: it had to make room). `rollout`: any object of its rollout."""

    turns: list[Turn]
    row: Row | None
    is_seeded: bool
    rollout: object = None


class Conversations:
    """Those whose last answer has ended, by what was said in them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[_Said, Conversation] = OrderedDict()  # the one that was kept first comes first
        self._with_rows: OrderedDict[_Said, Row] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._num_tokens = self._num_blocks = 0

    def keep(self, tokens: Sequence[int], conversation: Conversation, version: int | None) -> list[Row]:
        """Returns rows that nobody needs any more."""
        said = version, id(conversation.rollout), _packed(tokens)
        gone = self._dropped(said)
        self._kept[said] = conversation
        self._lengths[len(tokens)] += 1
        self._num_tokens += len(tokens)
        if conversation.row is not None:
            self._with_rows[said] = conversation.row
            self._num_blocks += len(conversation.row.blocks)
        while self._num_tokens > MOST_TOKENS:
            gone += self._dropped(next(iter(self._kept)))
        return gone

    def taken(self, prompt: Sequence[int], version: int | None, rollout: object = None) -> Conversation | None:
        """The rollout's longest one that `prompt` goes on from, with its row, which is the caller's from now on."""
        packed = _packed(prompt)
        for length in sorted(self._lengths, reverse=True):
            said = version, id(rollout), packed[: length * _TOKEN.itemsize]
            if length < len(prompt) and (found := self._kept.get(said)) is not None:
                taken = replace(found)
                self._row_of(said)
                if not found.is_seeded:
                    self._dropped(said)
                return taken
        return None

    def make_room(self, most_blocks: int) -> list[Row]:
        """The rows of those that have waited longest, so that the others have so many blocks at the most."""
        gone: list[Row] = []
        while self._with_rows and self._num_blocks > most_blocks:
            said = next(iter(self._with_rows))
            gone += self._row_of(said)
            if not self._kept[said].is_seeded:
                self._dropped(said)
        return gone

    def drop(self, version: int | None) -> list[Row]:
        """Forget those of this version."""
        return [row for said in [*self._kept] if said[0] == version for row in self._dropped(said)]

    def _dropped(self, said: _Said) -> list[Row]:
        if said not in self._kept:
            return []
        gone = self._row_of(said)
        del self._kept[said]
        length = len(said[2]) // _TOKEN.itemsize
        self._num_tokens -= length
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
        return gone

    def _row_of(self, said: _Said) -> list[Row]:
        """Its row, if it has one, which it does not have any more."""
        self._kept[said].row = None
        row = self._with_rows.pop(said, None)
        if row is None:
            return []
        self._num_blocks -= len(row.blocks)
        return [row]


def _packed(tokens: Sequence[int]) -> bytes:
    return array(_TOKEN.typecode, tokens).tobytes()
