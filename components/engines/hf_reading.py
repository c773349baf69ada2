"""Which of the sequences under way share a row, and what is read into rows before a pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from .hf_beginnings import LEAST_TOKENS, Beginnings
from .hf_cache import Row
from .hf_decode import Decoder
from .hf_sequences import Generation, rows_of


class Reader:
    """Gives sequences their rows. What they have alike is read once, and is one row until they differ."""

    def __init__(self, decoder: Decoder, beginnings: Beginnings) -> None:
        self._decoder = decoder
        self._beginnings = beginnings

    def read(self, running: Sequence[Generation]) -> None:
        """All that is to be read before the next pass, which reads one token of each sequence.

        What several have alike up to the end of a part is read once, and so is what prompts begin with.
        """
        waiting = self._begin(running, may_wait=True)
        while waiting or any(s.num_held < s.read_end for s in running):
            shared = self.parted(running, lambda s: tuple(s.tokens[s.num_held : s.read_end]))
            reading = [own for own in shared if own[0].num_held < own[0].read_end]
            firsts = [own[0] for own in reading]
            starts, ends = [s.num_held for s in firsts], [s.read_end for s in firsts]
            self._decoder.read(
                rows_of(firsts),
                [s.tokens[:end] for s, end in zip(firsts, ends, strict=True)],
                starts,
                [s.request.version for s in firsts],
            )
            for own, end in zip(reading, ends, strict=True):
                for s in own:
                    s.num_held = end
            self._keep_beginnings(firsts, starts)
            waiting = waiting and self._begin(running, may_wait=False)

    def _begin(self, running: Sequence[Generation], *, may_wait: bool) -> bool:
        """Rows for the sequences that have none, with what they begin with if it is there.

        Of several that it is not there for, and that may begin alike, all but one may have to wait until that one was
        read. Returns whether some do.
        """
        new: dict[tuple[int | None, tuple[int, ...]], list[Generation]] = {}
        for s in running:
            if s.row is None:
                new.setdefault((s.request.version, tuple(s.tokens[: s.read_end])), []).append(s)
        alike, empty, waiting = set(), [], False
        going_on: list[tuple[list[Generation], Row, int]] = []
        for (version, tokens), same in new.items():
            source, num_same = self._beginnings.longest(tokens, version)
            first = version, tokens[:LEAST_TOKENS]
            if source is not None:
                going_on.append((same, source, num_same))
            elif may_wait and first in alike:
                waiting = True
            else:
                empty.append(same)
                if self._beginnings.wanted(len(tokens), 0):
                    alike.add(first)
        sources, lengths = [source for _, source, _ in going_on], [num_same for _, _, num_same in going_on]
        copies = self._decoder.copy(sources, lengths)
        for (same, _, num_same), row in zip(going_on, copies, strict=True):
            for s in same:
                s.row, s.num_held = row, num_same
        for same, row in zip(empty, self._decoder.rows(len(empty)), strict=True):
            for s in same:
                s.row = row
        return waiting

    def _keep_beginnings(self, sequences: Sequence[Generation], starts: Sequence[int]) -> None:
        """Of the prompts that were read from `starts` on."""
        wanted = [
            (s, kept)
            for s, start in zip(sequences, starts, strict=True)
            if not s.is_mixed and (kept := self._beginnings.wanted(min(s.num_held, len(s.request.prompt)), start))
        ]
        copies = self._decoder.copy_aside(rows_of(s for s, _ in wanted), [kept for _, kept in wanted])
        for (s, kept), row in zip(wanted, copies, strict=True):
            self._decoder.free(self._beginnings.keep(tuple(s.tokens[:kept]), s.request.version, row))

    def parted(self, running: Sequence[Generation], coming: Callable[[Generation], Hashable]) -> list[list[Generation]]:
        """The running sequences by their rows, after those for whom something else is coming have got their own."""
        by_row: dict[Row, dict[Hashable, list[Generation]]] = {}
        for s in running:
            if s.row is not None:
                by_row.setdefault(s.row, {}).setdefault(coming(s), []).append(s)
        parting = [same for parts in by_row.values() for same in list(parts.values())[1:]]
        for same, row in zip(parting, self._decoder.copy(rows_of(part[0] for part in parting)), strict=True):
            for s in same:
                s.row = row
        return [same for parts in by_row.values() for same in parts.values()]
