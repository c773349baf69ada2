"""A model of transformers that reads prompts and generates many responses token by token.

The model is the trainer's own (`trainer.families.load_model`), with the attention that the trainer gives it. Here that
attention keeps each row's keys and values:

    rows of the cache   | k0 k1 k2 k3 .  .  |      lengths 4
                        | k0 k1 .  .  .  .  |              2     one pass of `step` adds a column to every row
                        | k0 k1 k2 k3 k4 .  |              5

Every row begins in column 0, widths are multiples of `BLOCK`, and each thread (`hf_threads`) has at least `LEAST_ROWS`
rows. In float32 on a CPU a row's numbers are then the same to the last bit, whatever else is in the pass: on one
thread, matrix products of a few rows and of many round alike, and so do sums that end with zeros.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn.functional as F

from ..failures import Refused
from ..trainer.families import ModelRefusedError, load_model, probe_tokens, short_windows
from ..trainer.scoring import ScoringModel, is_packed, pass_arguments
from .hf_threads import HeadInputs, PassThreads

if TYPE_CHECKING:
    from .hf_lora import Adapters

T = TypeVar("T")
Versions = Sequence[int | None]
"""Of each row, the adapter that it is computed under; () where the model has none."""
BLOCK = 32
LEAST_ROWS = 8
PREFILL_TOKENS = 4096
"""Most tokens, padding included, that prompts are read with at a time, by all threads together."""


def load_decoder(
    path: str,
    *,
    max_length: int,
    device: torch.device,
    dtype: torch.dtype,
    head_dtype: torch.dtype | None = None,
    threads: PassThreads,
) -> Decoder:
    """The model at `path`, proven to give responses token by token the logprobs that it gives them at once.

    Raises `Refused` in one line for a model that does not.
    """
    try:
        model = load_model(path, packing="shared", head_dtype=head_dtype, max_length=max_length, device=device)
    except ModelRefusedError as error:
        raise Refused(_refusal(path, str(error))) from None
    model.requires_grad_(False)
    _prove(model, path, max_length)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return Decoder(model, threads)


def _refusal(path: str, why: str) -> str:
    return f"rollout.engine.name: got hf for the model {path}, which it cannot compute exactly ({why}); use vllm"


class KeyValues:
    """Keys and values of every layer, [S, H_kv, W, D] each, for S rows of W columns; grows as it is asked to."""

    def __init__(self) -> None:
        self.num_rows = self.width = 0
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def has_layers(self) -> bool:
        """Whether a pass has been there, so that another one changes rows alone."""
        return bool(self._layers)

    @property
    def bytes_per_token(self) -> int:
        return sum(x.shape[1] * x.shape[3] * x.itemsize for layer in self._layers for x in layer)

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for layer in self._layers for x in layer)

    def reserve(self, num_rows: int, width: int) -> None:
        """Room for so many rows and columns; what is there stays."""
        if num_rows <= self.num_rows and width <= self.width:
            return
        if num_rows > self.num_rows:
            self.num_rows = max(num_rows, 2 * self.num_rows)
        self.width = max(width, self.width)
        for index, (keys, values) in enumerate(self._layers):  # in place: only one layer is there twice
            self._layers[index] = self._grown(keys), self._grown(values)
            del keys, values

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        # Zeros, because what is masked is multiplied by 0 all the same.
        new = old.new_zeros(self.num_rows, old.shape[1], self.width, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory of a layer, made for keys and values of this form when it is first met."""
        if index == len(self._layers):
            new = (x.new_zeros(self.num_rows, x.shape[1], self.width, x.shape[3]) for x in (key, value))
            self._layers.append(tuple(new))  # type: ignore[arg-type]
        return self._layers[index]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Rows `sources` to rows `targets`."""
        for layer in self._layers:
            for x in layer:
                x[list(targets)] = x[list(sources)]

    def clear(self, rows: Sequence[int]) -> None:
        """Forget these rows: what an earlier one left, were it not a number, would spoil what is masked too."""
        for layer in self._layers:
            for x in layer:
                x[list(rows)] = 0


@dataclass
class _Prompts:
    """The attention of a pass over prompts, which fills `rows` of the cache; all prompts are padded to one length."""

    cache: KeyValues
    rows: list[int]
    num_layers: int = 0

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query [R, H, T, D], key and value [R, H_kv, T, D] -> [R, T, H, D]."""
        for memory, new in zip(self.cache.layer(self.num_layers, key, value), (key, value), strict=True):
            memory[self.rows, :, : new.shape[2]] = new
        self.num_layers += 1
        at = torch.arange(query.shape[2], device=query.device)
        distance = at[:, None] - at
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        hidden = hidden.repeat(query.shape[1] // key.shape[1], 1)
        return _attention(query, key, value, hidden, scaling, softcap)


@dataclass
class _Next:
    """The attention of a pass over one more token of each of B rows from `first` on, at `positions` [B]."""

    cache: KeyValues
    first: int
    positions: torch.Tensor
    width: int
    num_layers: int = 0

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query [B, H, 1, D], key and value [B, H_kv, 1, D] -> [B, 1, H, D]."""
        num_rows = query.shape[0]
        memory = self.cache.layer(self.num_layers, key, value)
        self.num_layers += 1
        memory = [x[self.first : self.first + num_rows] for x in memory]
        rows = torch.arange(num_rows, device=query.device)
        for x, new in zip(memory, (key, value), strict=True):
            x[rows, :, self.positions] = new[:, :, 0]
        keys, values = (x[:, :, : self.width] for x in memory)
        distance = self.positions[:, None] - torch.arange(self.width, device=query.device)
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        return _attention(query, keys, values, hidden[:, None, None], scaling, softcap)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """query [B, H, T, D], key and value [B, H_kv, W, D], hidden [..., G T or 1, W] -> [B, T, H, D].

    The G heads that share keys lie below each other, as G T queries of one head, so that no keys are copied.
    """
    groups = query.shape[1] // key.shape[1]
    q = query.unflatten(1, (key.shape[1], groups)).flatten(2, 3)
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
    if softcap is None:
        out = F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scaling)
    else:
        scores = q @ key.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = softcap * torch.tanh(scores / softcap) + mask
        out = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value
    return out.unflatten(2, (groups, query.shape[2])).flatten(1, 2).transpose(1, 2)


class Decoder:
    """A model with a cache. Rows are numbered by the caller, who keeps them together: 0, 1, 2, ..."""

    def __init__(self, model: ScoringModel, threads: PassThreads, adapters: Adapters | None = None) -> None:
        assert is_packed(model.lm)
        self.model = model
        self.threads = threads
        self.adapters = adapters
        self.device = model.lm.device
        self.cache = KeyValues()
        self._heads = HeadInputs()

    def beside(self) -> Decoder:
        """Another one of the same model and threads, with a cache of its own."""
        return Decoder(self.model, self.threads, self.adapters)

    def forget(self) -> int:
        """Give the memory of the cache back; returns its bytes. Every row is to be read again."""
        num_bytes = self.cache.num_bytes
        self.cache = KeyValues()
        return num_bytes

    def prefill(self, rows: Sequence[int], sequences: Sequence[Sequence[int]], versions: Versions = ()) -> None:
        """Read these sequences into these rows of the cache, which hold nothing else afterwards."""
        if rows:
            self.cache.reserve(max(rows) + 1, _blocks(max(map(len, sequences))))
            self.cache.clear(rows)
        works = []
        for chunk in _chunks([len(s) for s in sequences], self.threads.number):
            own = [versions[i] for i in chunk] if versions else ()
            works.append(functools.partial(self._read, [rows[i] for i in chunk], [sequences[i] for i in chunk], own))
        self._run(works)

    def _read(self, rows: list[int], sequences: list[Sequence[int]], versions: Versions = ()) -> torch.Tensor:
        """Hidden states [R, T, D] of one pass over sequences that are padded to T tokens, for which there is room."""
        lengths = [len(s) for s in sequences]
        width = _blocks(max(lengths))
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        for row, sequence in zip(tokens, sequences, strict=True):
            row[: len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        # What pads stands at the last position, so that no position is beyond what the model knows.
        positions = torch.minimum(torch.arange(width), torch.tensor(lengths)[:, None] - 1)
        return self._pass(tokens, positions, _Prompts(self.cache, rows), versions)

    def step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        versions: Versions = (),
        *,
        then: Callable[[torch.Tensor, int], T],
    ) -> list[T]:
        """One more token at its position in each of the rows 0 to B - 1. Each thread gives the logits [b, V], float32,
        of its rows to `then`, with the first row's number; returns what that returns, in the order of the rows.
        """
        # So many rows for a thread that all but the last have whole steps of `LEAST_ROWS`.
        share = -(-len(tokens) // (LEAST_ROWS * self.threads.number)) * LEAST_ROWS
        self.cache.reserve(-(-len(tokens) // LEAST_ROWS) * LEAST_ROWS, _blocks(max(positions) + 1))
        works = []
        for first in range(0, len(tokens), share):
            own = slice(first, first + share)
            works.append(functools.partial(self._step, first, tokens[own], positions[own], versions[own], then))
        return self._run(works)

    def _step(
        self,
        first: int,
        tokens: Sequence[int],
        positions: Sequence[int],
        versions: Versions,
        then: Callable[[torch.Tensor, int], T],
    ) -> T:
        num_rows = len(tokens)
        padding = [0] * (-num_rows % LEAST_ROWS)
        at = torch.tensor([*positions, *padding])
        attention = _Next(self.cache, first, at.to(self.device), _blocks(max(positions) + 1))
        hidden = self._pass(torch.tensor([*tokens, *padding])[:, None], at[:, None], attention, versions)
        return then(self._logits(hidden[:, 0])[:num_rows], first)

    def _run(self, works: Sequence[Callable[[], T]]) -> list[T]:
        with self._heads.of(self.model.lm):
            if self.cache.has_layers:
                return self.threads.run(works)
            # The first pass makes the memory of the others.
            return [*self.threads.run(works[:1]), *self.threads.run(works[1:])]

    def score(self, sequences: Sequence[Sequence[int]], version: int | None = None) -> list[list[float]]:
        """The logprob of each token but the first, given those before it, at temperature 1. Uses the first rows."""
        if sequences:
            self.cache.reserve(len(sequences), _blocks(max(map(len, sequences))))
        return self._run([functools.partial(self._score, row, s, version) for row, s in enumerate(sequences)])

    def _score(self, row: int, sequence: Sequence[int], version: int | None) -> list[float]:
        hidden = self._read([row], [sequence], [version])[0, : len(sequence) - 1]
        targets = torch.tensor(sequence[1:], device=self.device)[:, None]
        logprobs = torch.log_softmax(self._logits(hidden) * self.model.transform.scale, dim=-1)
        return logprobs.gather(-1, targets)[:, 0].tolist()

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, D] -> [S, V], float32, capped but not yet scaled; see `LogitTransform`."""
        logits: torch.Tensor = self.model.logits(hidden).float()
        cap = self.model.transform.cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _pass(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: _Prompts | _Next, versions: Versions
    ) -> torch.Tensor:
        given = pass_arguments(self.model.lm, tokens.to(self.device), positions.to(self.device), attention, None)
        num_rows, width = tokens.shape
        adapted = nullcontext()
        if self.adapters is not None:
            adapted = self.adapters.applied(versions, num_rows=num_rows, width=width)
        with adapted:
            return self._heads.taken(functools.partial(self.model.lm, **given))


def _blocks(length: int) -> int:
    """The next multiple of `BLOCK`."""
    return -(-length // BLOCK) * BLOCK


def _chunks(lengths: list[int], num_threads: int) -> list[list[int]]:
    """Indices of sequences that are read in one pass: of similar lengths, and not too many tokens, so that each thread
    has some. Empty ones are not read.
    """
    chunks: list[list[int]] = []
    most = min(PREFILL_TOKENS, sum(_blocks(n) for n in lengths)) // num_threads
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not lengths[i]:
            break
        width = _blocks(lengths[chunks[-1][0]]) if chunks else 0
        if chunks and width == _blocks(lengths[i]) and width * (len(chunks[-1]) + 1) <= most:
            chunks[-1].append(i)
        else:
            chunks.append([i])
    return chunks


@torch.inference_mode()
def _prove(model: ScoringModel, path: str, max_length: int) -> None:
    """Three sequences that begin at different times: token by token, they have the logprobs of one pass over each."""
    tokens = probe_tokens(model.lm, 24)
    sequences = [tokens[:11], tokens[11:18], tokens[18:]]
    cut = min(max_length, len(sequences[0]))
    sequences = [s[:cut] for s in sequences]
    with short_windows(model.lm, max_length):
        expected = [_at_once(model, s) for s in sequences]
        decoder, scale = Decoder(model, PassThreads(1)), model.transform.scale
        got: list[list[float]] = [[], [], []]
        lengths = [min(4, cut - 1), min(1, cut - 1), 0]
        decoder.prefill([0, 1, 2], [s[:n] for s, n in zip(sequences, lengths, strict=True)])
        read = [expected[i][:n] for i, n in enumerate(lengths)]
        widest = 1.0
        while any(n < len(s) - 1 for s, n in zip(sequences, lengths, strict=True)):
            at = [min(n, len(s) - 2) for s, n in zip(sequences, lengths, strict=True)]
            tokens = [s[n] for s, n in zip(sequences, at, strict=True)]
            [logits] = decoder.step(tokens, at, then=lambda logits, _: logits * scale)
            widest = max(widest, float((logits - logits.mean(-1, keepdim=True)).abs().max()))
            logprobs = torch.log_softmax(logits, dim=-1)
            for i, (s, n) in enumerate(zip(sequences, lengths, strict=True)):
                if n < len(s) - 1:
                    got[i].append(float(logprobs[i, s[n + 1]]))
                    lengths[i] += 1
    pairs = itertools.chain(*(zip(e[len(r) :], g, strict=True) for e, r, g in zip(expected, read, got, strict=True)))
    gap = max((abs(e - g) for e, g in pairs), default=0.0)
    if not gap <= 2e-5 * widest:  # nan is not
        raise Refused(_refusal(path, f"token by token its logprobs differ by {gap:.2g} nats"))


def _at_once(model: ScoringModel, sequence: list[int]) -> list[float]:
    """As the trainer computes it."""
    tokens = torch.tensor([sequence], device=model.lm.device)
    rows = torch.arange(len(sequence) - 1, device=model.lm.device)
    return model(tokens, rows, tokens[0, 1:], 1.0)[0].tolist()
