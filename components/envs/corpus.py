"""Search over a small corpus in memory, by BM25 (Robertson and Zaragoza 2009)."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_PASSAGES = 100_000
MAX_QUERY_CHARS, MAX_QUERY_WORDS = 2000, 32
"""What is read of a query: each word may visit every passage."""
_K1, _B = 1.2, 0.75


@dataclass(frozen=True)
class Passage:
    title: str
    text: str


class Corpus:
    """Passages and where each word stands in them."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = list(passages)
        counts = [Counter(_words(f"{p.title} {p.text}")) for p in self._passages]
        self._lengths = [sum(c.values()) for c in counts]
        self._mean_length = sum(self._lengths) / max(1, len(self._lengths))
        self._places: dict[str, list[tuple[int, int]]] = {}
        for index, count in enumerate(counts):
            for word, times in count.items():
                self._places.setdefault(word, []).append((index, times))

    @classmethod
    def load(cls, path: str) -> Corpus:
        """Paragraphs of the .txt and .md files of a folder, or lines {"text": ..., "title": ...} of a .jsonl file.

        Raises ValueError naming the file (and line) for anything else.
        """
        place = Path(path).expanduser()
        if place.is_dir():
            files = sorted(f for f in place.rglob("*") if f.suffix in (".txt", ".md"))
            passages = [
                Passage(file.stem, " ".join(paragraph.split()))
                for file in files
                for paragraph in re.split(r"\n\s*\n", file.read_text(encoding="utf-8", errors="replace"))
                if paragraph.strip()
            ]
        elif place.is_file():
            passages = [_line(line, f"{place}:{i}") for i, line in enumerate(place.open(encoding="utf-8"), start=1)]
        else:
            passages = []
        if not 0 < len(passages) <= MAX_PASSAGES:
            raise ValueError(
                f"env.options.corpus: got {path} with {len(passages)} passages, expected 1 to {MAX_PASSAGES}: a folder "
                'with .txt or .md files, or a .jsonl file with {"text": ...} lines'
            )
        return cls(passages)

    def best(self, query: str, num: int) -> list[Passage]:
        """At most `num` passages that share words with the query, best first; equal ones in the corpus' order.

        Of a query the first MAX_QUERY_WORDS words count.
        """
        scores: dict[int, float] = {}
        for word in list(dict.fromkeys(_words(query[:MAX_QUERY_CHARS])))[:MAX_QUERY_WORDS]:
            places = self._places.get(word, [])
            rarity = math.log(1 + (len(self._passages) - len(places) + 0.5) / (len(places) + 0.5))
            for index, times in places:
                norm = _K1 * (1 - _B + _B * self._lengths[index] / self._mean_length)
                scores[index] = scores.get(index, 0.0) + rarity * times * (_K1 + 1) / (times + norm)
        return [self._passages[i] for i in sorted(scores, key=lambda i: (-scores[i], i))[:num]]


def _line(line: str, where: str) -> Passage:
    try:
        item = json.loads(line)
        return Passage(str(item.get("title", "")), item["text"])
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f'env.options.corpus: {where}: expected {{"text": ...}}, got {line[:60]!r}') from None


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
