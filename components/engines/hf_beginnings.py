"""What prompts begin with alike, such as a system prompt: read once under each version, and copied from then on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ..shared_rows import num_same
from .hf_cache import BLOCK, Row

LEAST_TOKENS = 8
"""That are worth a copy."""
MOST_PROMPTS = 8
"""That are kept."""

_Prompt = tuple[int | None, tuple[int, ...]]
"""A version, and tokens."""


class Beginnings:
    """Prompts of late, with rows that hold them. `most_blocks`: of all of these rows."""

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self._kept: OrderedDict[_Prompt, Row] = OrderedDict()  # the one that was used last comes last
        self.num_blocks = 0

    def longest(self, tokens: tuple[int, ...], version: int | None) -> tuple[Row | None, int]:
        """The row that holds most of what `tokens` begin with, and how many of them; (None, 0) if there is none."""
        found, most = None, LEAST_TOKENS - 1
        for prompt in self._kept:
            if prompt[0] == version and (same := num_same(prompt[1], tokens)) > most:
                found, most = prompt, same
        if found is None:
            return None, 0
        self._kept.move_to_end(found)
        return self._kept[found], most

    def wanted(self, num_tokens: int, num_known: int) -> int:
        """How many tokens of a prompt to keep, of which `num_known` are kept: 0 where that is half of it."""
        kept = min(num_tokens, self._most_blocks * BLOCK)
        return 0 if kept < LEAST_TOKENS or 2 * num_known >= kept else kept

    def keep(self, tokens: tuple[int, ...], version: int | None, row: Row) -> list[Row]:
        """`row` holds these tokens, and is nobody else's. Returns rows that nobody needs any more."""
        prompt = version, tokens
        gone = self._dropped([prompt]) if prompt in self._kept else []
        self._kept[prompt] = row
        self.num_blocks += len(row.blocks)
        while self.num_blocks > self._most_blocks or len(self._kept) > MOST_PROMPTS:
            gone += self._dropped([next(iter(self._kept))])
        return gone

    def drop(self, version: int | None) -> list[Row]:
        """Forget those of this version."""
        return self._dropped([prompt for prompt in self._kept if prompt[0] == version])

    def clear(self) -> None:
        """There are no rows any more."""
        self._kept.clear()
        self.num_blocks = 0

    def _dropped(self, prompts: Sequence[_Prompt]) -> list[Row]:
        rows = [self._kept.pop(prompt) for prompt in prompts]
        self.num_blocks -= sum(len(row.blocks) for row in rows)
        return rows
