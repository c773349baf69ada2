"""The text of a completion while it grows, token by token, up to a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"
"""What a tokenizer writes for a character of which tokens are still missing."""


class GrowingText:
    """`add` returns what may be shown, and `end` the rest; together they are the text of all tokens.

    What could be the beginning of a stop text, or of `hidden`, is held back until more is known. From `hidden` on
    (such as the mark of a tool call) nothing is shown. `is_stopped`: a stop text was found; the text ends before it.
    """

    def __init__(self, prompter: Any, *, stops: Sequence[str] = (), hidden: str = "") -> None:
        self._prompter = prompter
        self._stops = list(stops)
        self._marks = [*stops, *([hidden] if hidden else [])]
        self._hidden = hidden
        self._tokens: list[int] = []
        self._begun, self._read = 0, 0  # tokens from here on are decoded together; those up to there are in the text
        self.text = ""
        self._num_shown = 0
        self.is_stopped = False

    def add(self, token: int) -> str:
        self._tokens.append(token)
        before = self._prompter.decode(self._tokens[self._begun : self._read])
        now = self._prompter.decode(self._tokens[self._begun :])
        if now.endswith(_UNFINISHED):
            return ""
        self._begun, self._read = self._read, len(self._tokens)
        return self._grown(now[len(before) :])

    def end(self) -> str:
        """What was held back."""
        if not self.is_stopped:
            whole = self._prompter.decode(self._tokens)
            if whole.startswith(self.text):
                self._grown(whole[len(self.text) :])
        return self._shown(len(self.text))

    def _grown(self, new: str) -> str:
        searched = max(0, len(self.text) - max(map(len, self._stops), default=0))
        self.text += new
        found = [at for stop in self._stops if (at := self.text.find(stop, searched)) >= 0]
        if found:
            self.text, self.is_stopped = self.text[: min(found)], True
            return self._shown(len(self.text))
        held = max((_overlap(self.text, mark) for mark in self._marks), default=0)
        return self._shown(len(self.text) - held)

    def _shown(self, end: int) -> str:
        if self._hidden and (at := self.text.find(self._hidden)) >= 0:
            end = min(end, at)
        start, self._num_shown = self._num_shown, max(self._num_shown, end)
        return self.text[start : self._num_shown]


def _overlap(text: str, mark: str) -> int:
    """How much of the end of `text` is a beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
