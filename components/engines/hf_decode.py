"""A model of transformers that reads prompts and generates many responses token by token.

The model is the trainer's own (`trainer.families.load_model`), with the attention that the trainer gives it. Here that
attention keeps each row's keys and values (`hf_cache`); a pass is computed by as many threads as it has work for, each
with rows of its own (`hf_threads`), at least `LEAST_ROWS`, padding included. In float32 on a CPU a row's numbers are
then the same to the last bit, whatever else is in the pass: on one thread, products by oneDNN round alike for a few
rows and for many (those of MKL do not, on Intel's processors), and so do sums that end with zeros.
The router and the experts of a mixture are no linear layers: what they ask of `F.linear` is sent to oneDNN too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..failures import Refused
from ..trainer.families import ModelRefusedError, load_model, probe_tokens, short_windows
from ..trainer.linear import OneDnnProducts, linear, use_onednn
from ..trainer.scoring import ScoringModel, is_packed, output_head, pass_arguments
from .hf_cache import BLOCK, AllWasRead, BlockPool, ReadAttention, Row, TokenAttention
from .hf_threads import HeadInputs, PassThreads

if TYPE_CHECKING:
    from .hf_lora import Adapters

T = TypeVar("T")
Versions = Sequence[int | None]
"""Of each row, the adapter that it is computed under; () where the model has none."""
LEAST_ROWS = 8
LEAST_WORK = 40e6
"""Multiplications in each layer that a thread is worth: threads that call small operations wait for each other."""
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
    use_onednn(model.lm)
    if has_experts(model.lm):
        model.lm.set_experts_implementation("eager")  # asks `F.linear` for each product
    _prove(model, path, max_length)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return Decoder(model, threads)


def _refusal(path: str, why: str) -> str:
    return f"rollout.engine.name: got hf for the model {path}, which it cannot compute exactly ({why}); use vllm"


class Decoder:
    """A model with a cache: a pool of blocks for each thread."""

    def __init__(self, model: ScoringModel, threads: PassThreads, adapters: Adapters | None = None) -> None:
        assert is_packed(model.lm)
        self.model = model
        self.threads = threads
        self.adapters = adapters
        self.device = model.lm.device
        self._pools = [BlockPool() for _ in range(threads.number)]
        self._waiting = BlockPool()
        self._weights_per_layer = _weights_per_layer(model)
        self._has_experts = has_experts(model.lm)
        self._num_layers: int | None = None  # that attend; known once a pass went through all of them
        self._heads = HeadInputs()
        self._converted_head = _ConvertedHead()

    @property
    def bytes_per_token(self) -> int:
        """Of the cache; known once something was read."""
        return max(pool.bytes_per_token for pool in self._pools)

    def beside(self) -> Decoder:
        """Another one of the same model and threads, with a cache of its own."""
        other = Decoder(self.model, self.threads, self.adapters)
        # The same head, so that what a canary scores is what generates.
        other._num_layers, other._converted_head = self._num_layers, self._converted_head
        return other

    def forget(self) -> int:
        """Give the memory of the cache back; returns its bytes. There are no rows any more."""
        num_bytes = sum(pool.num_bytes for pool in (*self._pools, self._waiting))
        self._pools, self._waiting = [BlockPool() for _ in self._pools], BlockPool()
        self._converted_head.forget()
        return num_bytes

    def clear(self) -> None:
        """There are no rows any more; the memory stays."""
        for pool in (*self._pools, self._waiting):
            pool.clear()

    def prefill(self, sequences: Sequence[Sequence[int]], versions: Versions = ()) -> list[Row]:
        """New rows in which these sequences were read."""
        rows = self.rows(len(sequences))
        self.read(rows, sequences, [0] * len(rows), versions)
        return rows

    def rows(self, number: int) -> list[Row]:
        """New rows that hold nothing."""
        return [row for _ in range(number) for row in self._emptiest().add([0])]

    def read(
        self,
        rows: Sequence[Row],
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        versions: Versions = (),
    ) -> None:
        """Read these sequences from `starts` on; what is before is in the rows."""
        if waiting := [row for row in rows if row.pool is self._waiting]:
            self._emptiest().take(waiting)
        for row, sequence in zip(rows, sequences, strict=True):
            row.pool.extend([row], [len(sequence)])
        num_new = sum(map(len, sequences)) - sum(starts)
        works = []
        for chunk in _chunks(rows, sequences, starts, self._threads_for(num_new)):
            given = [(rows[i], sequences[i], starts[i]) for i in chunk]
            own = [versions[i] for i in chunk] if versions else ()
            works.append(functools.partial(self._keep, given, own))
        self._run(works)

    def copy(self, rows: Sequence[Row], lengths: Sequence[int] | None = None) -> list[Row]:
        """New rows with what these hold, or with so many of their tokens; what comes after those is to be read."""
        if lengths is None:
            lengths = [len(row.blocks) * BLOCK for row in rows]
        numbers = [len(pool.rows) for pool in self._pools]
        sources: list[list[tuple[Row, int]]] = [[] for _ in self._pools]
        places = []
        for given in zip(rows, lengths, strict=True):
            places.append(emptiest := numbers.index(min(numbers)))
            sources[emptiest].append(given)
            numbers[emptiest] += 1
        copies = [
            iter(pool.copy([row for row, _ in own], [length for _, length in own]))
            for pool, own in zip(self._pools, sources, strict=True)
        ]
        return [next(copies[i]) for i in places]

    def copy_aside(self, rows: Sequence[Row], lengths: Sequence[int]) -> list[Row]:
        """As `copy`, set aside: these have no part in how rows are shared out among threads."""
        return self._waiting.copy(rows, lengths)

    def free(self, rows: Sequence[Row]) -> None:
        """Forget these rows."""
        for pool in (*self._pools, self._waiting):
            if gone := [row for row in rows if row.pool is pool]:
                pool.free(gone)

    def set_aside(self, rows: Sequence[Row]) -> None:
        """Passes are not about these rows for a while: `read` and `step` may be asked for them again."""
        self._waiting.take(rows)

    def room_aside(self, num_blocks: int, taken: int) -> int:
        """Blocks that those set aside may have, of so many for all, beside the `taken` ones, which stay."""
        self._waiting.most = max(taken, num_blocks - sum(pool.room for pool in self._pools))
        return self._waiting.most - taken

    def _threads_for(self, num_tokens: int) -> int:
        """That a pass over so many tokens is divided among. It changes no number."""
        return max(1, min(self.threads.number, int(num_tokens * self._weights_per_layer / LEAST_WORK)))

    def _emptiest(self) -> BlockPool:
        return min(self._pools, key=lambda pool: len(pool.rows))

    def _keep(self, given: Sequence[tuple[Row, Sequence[int], int]], versions: Versions) -> None:
        """As `_read`, for the keys and values alone."""
        with suppress(AllWasRead):
            self._read(given, versions, last_layer=self._num_layers)

    def _read(
        self,
        given: Sequence[tuple[Row, Sequence[int], int]],
        versions: Versions,
        *,
        last_layer: int | None = None,
    ) -> torch.Tensor:
        """Hidden states [R, T, D] of one pass over what is new in sequences, padded to one length.

        `given`: of each, its row, which has room, all of its tokens, and the first one that is new.
        """
        rows, sequences, starts = zip(*given, strict=True)
        lengths = [len(s) - start for s, start in zip(sequences, starts, strict=True)]
        tokens = torch.zeros(len(rows), _padded(max(lengths)), dtype=torch.int64)
        for row, sequence, start in zip(tokens, sequences, starts, strict=True):
            row[: len(sequence) - start] = torch.tensor(sequence[start:], dtype=torch.int64)
        # What pads stands at the last position, so that no position is beyond what the model knows.
        at = torch.minimum(torch.arange(tokens.shape[1]), torch.tensor(lengths)[:, None] - 1)
        attention = ReadAttention(rows, starts, lengths, self.device, last_layer=last_layer)
        hidden = self._pass(tokens, at + torch.tensor(starts)[:, None], attention, versions)
        self._num_layers = attention.num_layers
        return hidden

    def step(
        self,
        rows: Sequence[Row],
        tokens: Sequence[int],
        positions: Sequence[int],
        versions: Versions = (),
        *,
        then: Callable[[torch.Tensor, Sequence[int]], Sequence[T]],
    ) -> list[T]:
        """One more token at its position in each of these B rows.

        Each thread gives the logits [b, V], float32, of its rows to `then`, with their places in `rows`; `then` returns
        something for each of them. Returns that, in the order of `rows`.
        """

        def works_of(own: list[int]) -> Callable[[], Iterable[tuple[int, T]]]:
            return lambda: zip(own, self._step(rows, tokens, positions, versions, then, own), strict=True)

        found = dict(itertools.chain(*self._run([works_of(own) for own in self._shares(rows)])))
        return [found[i] for i in range(len(rows))]

    def _shares(self, rows: Sequence[Row]) -> list[list[int]]:
        """Places in `rows` of those that each thread computes, which it then has in its pool."""
        # So many rows for a thread that all but the last have whole steps of `LEAST_ROWS`.
        most = _padded(-(-len(rows) // self._threads_for(len(rows))))
        shares = [[i for i, row in enumerate(rows) if row.pool is pool] for pool in self._pools]
        fullest = sorted(range(len(shares)), key=lambda i: -len(shares[i]))
        room = dict.fromkeys(fullest[: -(-len(rows) // most)], most)
        excess = [i for i, row in enumerate(rows) if row.pool is self._waiting]
        for i, share in enumerate(shares):
            excess += share[room.get(i, 0) :]
            del share[room.get(i, 0) :]
        for i in room:
            taken = [excess.pop() for _ in range(min(len(excess), most - len(shares[i])))]
            self._pools[i].take([rows[place] for place in taken])
            shares[i] += taken
        return [share for share in shares if share]

    def _step(
        self,
        rows: Sequence[Row],
        tokens: Sequence[int],
        positions: Sequence[int],
        versions: Versions,
        then: Callable[[torch.Tensor, Sequence[int]], Sequence[T]],
        own: list[int],
    ) -> Sequence[T]:
        """Of the rows at the places `own`, all of one pool."""
        pool = rows[own[0]].pool
        pool.extend([rows[i] for i in own], [positions[i] + 1 for i in own])
        at = [positions[i] for i in own]
        attention = TokenAttention(pool, [rows[i] for i in own], at, self.device)
        padding = [0] * (-len(own) % LEAST_ROWS)
        hidden = self._pass(
            torch.tensor([*(tokens[i] for i in own), *padding])[:, None],
            torch.tensor([*at, *padding])[:, None],
            attention,
            [versions[i] for i in own] if versions else (),
        )
        return then(self._logits(hidden[:, 0])[: len(own)], own)

    def _run(self, works: Sequence[Callable[[], T]]) -> list[T]:
        with self._heads.of(self.model.lm):
            return self.threads.run(works)

    def score(self, sequences: Sequence[Sequence[int]], version: int | None = None) -> list[list[float]]:
        """The logprob of each token but the first, given those before it, at temperature 1."""
        rows = [self._emptiest().add([len(s)])[0] for s in sequences]
        works = [functools.partial(self._score, row, s, version) for row, s in zip(rows, sequences, strict=True)]
        scored = self._run(works)
        self.free(rows)
        return scored

    def _score(self, row: Row, sequence: Sequence[int], version: int | None) -> list[float]:
        hidden = self._read([(row, sequence, 0)], [version])[0, : len(sequence) - 1]
        targets = torch.tensor(sequence[1:], device=self.device)[:, None]
        logprobs = torch.log_softmax(self._logits(hidden) * self.model.transform.scale, dim=-1)
        return logprobs.gather(-1, targets)[:, 0].tolist()

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, D] -> [S, V], float32, capped but not yet scaled; see `LogitTransform`."""
        logits = self._head_logits(hidden).float()
        cap = self.model.transform.cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `ScoringModel.logits`; a head that computes in another type than its weights is converted once."""
        dtype, head = self.model.head_dtype, output_head(self.model.lm)
        if dtype is None:
            return self.model.logits(hidden)
        assert isinstance(head, nn.Linear), "load_model refuses a head of another kind"
        if dtype == head.weight.dtype:
            return self.model.logits(hidden)
        return linear(hidden.to(dtype), *self._converted_head.of(head, dtype))

    def weights_change(self) -> None:
        """To be called before the first pass with others."""
        self._converted_head.forget()

    def _pass(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: ReadAttention | TokenAttention,
        versions: Versions,
    ) -> torch.Tensor:
        given = pass_arguments(self.model.lm, tokens.to(self.device), positions.to(self.device), attention, None)
        num_rows, width = tokens.shape
        adapted = nullcontext()
        if self.adapters is not None:
            adapted = self.adapters.applied(versions, num_rows=num_rows, width=width)
        with adapted, OneDnnProducts() if self._has_experts else nullcontext():
            return self._heads.taken(functools.partial(self.model.lm, **given))


def has_experts(lm: PreTrainedModel) -> bool:
    """Whether layers of this model, on a CPU, have experts that can be asked one by one."""
    return lm.device.type == "cpu" and lm._can_set_experts_implementation()


class _ConvertedHead:
    """Weight and bias of an output head in another type, converted once for all passes under the same weights."""

    def __init__(self) -> None:
        self._converted: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def of(self, head: nn.Linear, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._converted is None:
            self._converted = head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)
        return self._converted

    def forget(self) -> None:
        self._converted = None


def _chunks(
    rows: Sequence[Row], sequences: Sequence[Sequence[int]], starts: Sequence[int], num_threads: int
) -> list[list[int]]:
    """Places of those that are read in one pass: of one pool, with as many new tokens, padding included, and as many
    blocks, and not too many tokens, so that each thread has some. Those with nothing new are not read.
    """
    alike: dict[tuple[int, int, BlockPool], list[int]] = {}
    for i, (row, sequence, start) in enumerate(zip(rows, sequences, starts, strict=True)):
        if len(sequence) > start:
            alike.setdefault((_padded(len(sequence) - start), len(row.blocks), row.pool), []).append(i)
    most = min(PREFILL_TOKENS, sum(width * len(places) for (width, _, _), places in alike.items())) // num_threads
    chunks = []
    for (width, _, _), places in alike.items():
        at_once = max(1, most // width)
        chunks += [places[i : i + at_once] for i in range(0, len(places), at_once)]
    return chunks


def _padded(number: int) -> int:
    return -(-number // LEAST_ROWS) * LEAST_ROWS


def _weights_per_layer(model: ScoringModel) -> float:
    outside = {id(model.lm.get_input_embeddings().weight), id(output_head(model.lm).weight)}
    num_weights = sum(p.numel() for p in model.lm.parameters() if id(p) not in outside)
    return num_weights / model.lm.config.get_text_config().num_hidden_layers


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
        decoder.free(decoder.prefill([sequences[0][:1]]))  # the layers are known from here on, and reading ends early
        got: list[list[float]] = [[], [], []]
        lengths = [min(4, cut - 1), min(1, cut - 1), 0]
        rows = decoder.prefill([s[:n] for s, n in zip(sequences, lengths, strict=True)])
        read = [expected[i][:n] for i, n in enumerate(lengths)]
        widest = 1.0
        while any(n < len(s) - 1 for s, n in zip(sequences, lengths, strict=True)):
            at = [min(n, len(s) - 2) for s, n in zip(sequences, lengths, strict=True)]
            tokens = [s[n] for s, n in zip(sequences, at, strict=True)]
            logits = torch.stack(decoder.step(rows, tokens, at, then=lambda logits, _: list(logits * scale)))
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
