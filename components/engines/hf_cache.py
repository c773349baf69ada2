"""Keys and values of sequences that grow by a token at a time, in blocks, and the attention of a token over them.

    sequences   a: 70 tokens         b: 20 tokens   c: 33 tokens
    a pool      | a 0-31 | b 0-31 | a 32-63 | c 0-31 | c 32-63 | a 64-95 |      blocks of `BLOCK`, in any order

A pass looks up the blocks of each sequence where they lie: nothing is computed for what a long sequence is longer than
a short one. A block's number decides nothing. On a CPU the numbers of a sequence are then the same to the last bit,
whatever else is there. The blocks in use are the first ones, without a gap, so that memory can be given back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from .hf_kernel import BlockAttention, kernel_size

BLOCK = 32


def num_blocks(length: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-length // BLOCK)


@dataclass(eq=False)
class Row:
    """One sequence: the numbers of its blocks in `pool`, in the order of its tokens."""

    pool: BlockPool
    blocks: list[int] = field(default_factory=list)


class BlockPool:
    """Keys [N, H_kv, D, BLOCK] and values [N, H_kv, BLOCK, D] of every layer. One thread computes with it at a time.

    That is how the kernels of `hf_kernel` have them; for these, D may be larger than that of the model.
    """

    def __init__(self) -> None:
        self.rows: set[Row] = set()
        self._owners: list[tuple[Row, int]] = []  # of each block in use: its row, and its number there
        self._room = 0
        self.most: int | None = None  # blocks that there is to be memory for, if that is enough
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._making = threading.Lock()

    @property
    def num_used(self) -> int:
        return len(self._owners)

    @property
    def room(self) -> int:
        """Blocks that there is memory for."""
        return self._room

    @property
    def bytes_per_token(self) -> int:
        return sum(x.shape[1:].numel() // BLOCK * x.itemsize for layer in self._layers for x in layer)

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for layer in self._layers for x in layer)

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory of a layer, made for keys and values [..., H_kv, T, D] when it is first met."""
        if index == len(self._layers):
            with self._making:  # prompts are read by several threads
                if index == len(self._layers):
                    heads, size = key.shape[-3], kernel_size(key, value)
                    sizes = (size, size) if size else (key.shape[-1], value.shape[-1])
                    made = self._made(key, heads, sizes[0], BLOCK), self._made(value, heads, BLOCK, sizes[1])
                    self._layers.append(made)
        return self._layers[index]

    def _made(self, x: torch.Tensor, *shape: int) -> torch.Tensor:
        return x.new_zeros(self._room, *shape)  # zeros, because what is masked is multiplied by 0 all the same

    def add(self, lengths: Sequence[int]) -> list[Row]:
        """Rows with room for so many tokens each."""
        rows = [Row(self) for _ in lengths]
        self.rows.update(rows)
        self.extend(rows, lengths)
        return rows

    def extend(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Room for so many tokens in each of these rows; what is there stays."""
        first = self._added(rows, lengths)
        if first < self.num_used:
            for layer in self._layers:
                for x in layer:  # what an earlier row left, were it not a number, would spoil what is masked too
                    x[first : self.num_used] = 0

    def _added(self, rows: Sequence[Row], lengths: Sequence[int]) -> int:
        """The same, with anything in the new blocks; returns the first of them."""
        first = self.num_used
        for row, length in zip(rows, lengths, strict=True):
            for number in range(len(row.blocks), num_blocks(length)):
                row.blocks.append(len(self._owners))
                self._owners.append((row, number))
        if self.num_used > self._room:
            ahead = self._room * 3 // 2
            self._room = max(self.num_used, ahead if self.most is None else min(ahead, self.most))
            for index, (keys, values) in enumerate(self._layers):  # in place: only one layer is there twice
                self._layers[index] = self._grown(keys, first), self._grown(values, first)
                del keys, values
        return first

    def _grown(self, old: torch.Tensor, num_used: int) -> torch.Tensor:
        new = old.new_empty(self._room, *old.shape[1:])  # whoever takes a block fills it
        new[:num_used] = old[:num_used]
        return new

    def copy(self, sources: Sequence[Row], lengths: Sequence[int] | None = None) -> list[Row]:
        """New rows with what these hold, or with so many of their tokens. They may lie in other pools."""
        if lengths is None:
            lengths = [len(source.blocks) * BLOCK for source in sources]
        rows = [Row(self) for _ in sources]
        for pool in dict.fromkeys(source.pool for source in sources):
            own = [i for i, source in enumerate(sources) if source.pool is pool]
            first = self._added([rows[i] for i in own], [lengths[i] for i in own])
            copied = [block for i in own for block in sources[i].blocks[: num_blocks(lengths[i])]]
            blocks = torch.tensor(copied, dtype=torch.int64)
            for index, layer in enumerate(pool._layers):
                for x, source in zip(self.layer(index, *_by_token(layer)), layer, strict=True):
                    old = source[:first] if pool is self else source
                    torch.index_select(old, 0, blocks.to(x.device), out=x[first : self.num_used])
        self.rows.update(rows)
        return rows

    def take(self, rows: Sequence[Row]) -> None:
        """Have these rows, which lie in other pools, here instead."""
        copies = self.copy(rows)
        for pool in {row.pool for row in rows}:
            pool.free([row for row in rows if row.pool is pool])
        for row, here in zip(rows, copies, strict=True):
            row.pool, row.blocks = self, here.blocks
            for number, block in enumerate(row.blocks):
                self._owners[block] = row, number
        self.rows.difference_update(copies)
        self.rows.update(rows)

    def free(self, rows: Sequence[Row]) -> None:
        """Forget these rows. The last blocks that stay take the places that become free."""
        gone = {block for row in rows for block in row.blocks}
        left = self.num_used - len(gone)
        free = [block for block in sorted(gone) if block < left]
        moving = [block for block in range(left, self.num_used) if block not in gone]
        if moving:
            targets, sources = torch.tensor(free), torch.tensor(moving)
            for layer in self._layers:
                for x in layer:
                    x.index_copy_(0, targets.to(x.device), x.index_select(0, sources.to(x.device)))
        for source, target in zip(moving, free, strict=True):
            row, number = self._owners[target] = self._owners[source]
            row.blocks[number] = target
        del self._owners[left:]
        self.rows.difference_update(rows)
        if self.most is not None and left <= self.most < self._room:
            self._trim()

    def clear(self) -> None:
        """Forget all rows; the memory stays."""
        self.rows.clear()
        self._owners.clear()

    def _trim(self) -> None:
        """Give back the memory that is more than there is to be."""
        self._room = self.num_used
        for index, (keys, values) in enumerate(self._layers):
            self._layers[index] = keys[: self._room].clone(), values[: self._room].clone()
            del keys, values


class AllWasRead(Exception):
    """The last layer has its keys and values: what it would make of them is not wanted."""


class ReadAttention:
    """That of a pass over tokens that come after what R rows hold, from `starts` on, for which they have room.

    The rows are of one pool, and have as many blocks each. Their tokens are padded to one length T. With `last_layer`,
    the number of layers that attend, the last one raises `AllWasRead` in the place of attending.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        starts: Sequence[int],
        lengths: Sequence[int],
        device: torch.device,
        *,
        last_layer: int | None = None,
    ) -> None:
        self._pool = rows[0].pool
        self._last_layer = last_layer
        self.num_layers = 0
        table = torch.tensor([row.blocks for row in rows])
        new = torch.tensor(lengths)
        owners = torch.repeat_interleave(torch.arange(len(rows)), new)
        offsets = torch.arange(len(owners)) - torch.repeat_interleave(new.cumsum(0) - new, new)
        at = torch.tensor(starts)[owners] + offsets
        places = table[owners, at // BLOCK], at % BLOCK
        self._table, self._owners, self._offsets = (x.to(device) for x in (table, owners, offsets))
        self._blocks, self._columns = (x.to(device) for x in places)
        self._starts = torch.tensor(starts, device=device)
        self._masks: dict[int | None, torch.Tensor] = {}

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
        memory = self._pool.layer(self.num_layers, key, value)
        self.num_layers += 1
        for x, new in zip(_by_token(memory), (key, value), strict=True):
            size = new.shape[-1]  # that of memory may be larger
            x[self._blocks, :, self._columns, :size] = new[self._owners, :, self._offsets]
        if self.num_layers == self._last_layer:
            raise AllWasRead
        # On a CPU in float32, whatever type the model has: else torch rounds weights to a shorter one.
        dtype = torch.float32 if query.is_cpu else query.dtype
        if window not in self._masks:
            at = self._starts[:, None] + torch.arange(query.shape[2], device=query.device)
            mask = _mask(at, self._table.shape[1] * BLOCK, window, dtype)[:, None]
            self._masks[window] = mask.repeat(1, 1, query.shape[1] // key.shape[1], 1)
        keys, values = (
            _in_rows(x[..., : new.shape[-1]], self._table).to(dtype)
            for x, new in zip(_by_token(memory), (key, value), strict=True)
        )
        return _attention(query.to(dtype), keys, values, self._masks[window], scaling, softcap).to(key.dtype)


class TokenAttention:
    """That of a pass over one more token of each of B rows of one pool, for which they have room, at `positions`.

    A pass may have more rows; those get zeros. On a CPU a row's numbers are its own to the last bit.
    """

    def __init__(self, pool: BlockPool, rows: Sequence[Row], positions: Sequence[int], device: torch.device) -> None:
        self._pool = pool
        self._num_layers = 0
        self._num_rows = len(rows)
        self._counts = [len(row.blocks) for row in rows]
        most = max(self._counts)
        # Of each row, its blocks in order, and its first one again in the place of those that it does not have: nothing
        # is to be seen there, and of another row's block, were it not a number, something would be.
        padded = [block for row in rows for block in (*row.blocks, *row.blocks[:1] * (most - len(row.blocks)))]
        table, at = torch.tensor(padded, dtype=torch.int32).view(-1, most), torch.tensor(positions)
        self._table, self._positions = table.to(device), at.to(device)
        self._masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    @functools.cached_property
    def _blocks(self) -> BlockAttention:
        block, column = self._places
        return BlockAttention(self._table, self._positions + 1, block * BLOCK + column)

    @functools.cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The block of each row's token, and its column there."""
        return self._table.gather(1, self._positions[:, None] // BLOCK)[:, 0].long(), self._positions % BLOCK

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
        """query [>=B, H, 1, D], key and value [>=B, H_kv, 1, D] -> [>=B, 1, H, D]."""
        memory = self._pool.layer(self._num_layers, key, value)
        self._num_layers += 1
        q, k, v = (x[: self._num_rows, :, 0] for x in (query, key, value))
        factor = float(query.shape[-1] ** -0.5) if scaling is None else scaling
        if kernel_size(key, value) is not None and query.dtype == key.dtype and softcap is None:
            self._blocks.write(k, v, *memory)
            out = self._blocks.attend(q, *memory, scaling=factor, window=window)[:, None, :, : value.shape[-1]]
        else:
            block, column = self._places
            for x, new in zip(_by_token(memory), (k, v), strict=True):
                x[block, :, column, : new.shape[-1]] = new
            keys, values = (x[..., : new.shape[-1]] for x, new in zip(_by_token(memory), (k, v), strict=True))
            out = self._without_kernel(q, keys, values, scaling=factor, window=window, softcap=softcap)
        return F.pad(out, (0, 0, 0, 0, 0, 0, 0, query.shape[0] - self._num_rows))

    def _without_kernel(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query [B, H, D], keys and values [N, H_kv, BLOCK, D] -> [B, 1, H, D].

        On a CPU in float32, and rows of as many blocks at a time: in one product over the columns of all rows, how
        torch parts a row's sums depends on the longest.
        """
        dtype = torch.float32 if query.is_cpu else query.dtype
        out = query.new_empty(len(query), 1, query.shape[1], values.shape[-1])
        for own, count in self._alike() if query.is_cpu else [(slice(None), self._table.shape[1])]:
            q, mask = query[own][:, :, None].to(dtype), self._mask(window, dtype)[own, ..., : count * BLOCK]
            k, v = (_in_rows(x, self._table[own, :count]).to(dtype) for x in (keys, values))
            out[own] = _attention(q, k, v, mask, scaling, softcap).to(query.dtype)
        return out

    def _alike(self) -> list[tuple[torch.Tensor, int]]:
        """Places of rows that have as many blocks, and how many."""
        alike: dict[int, list[int]] = {}
        for i, count in enumerate(self._counts):
            alike.setdefault(count, []).append(i)
        return [(torch.tensor(places), count) for count, places in alike.items()]

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[B, 1, 1, W]"""
        if (window, dtype) not in self._masks:
            mask = _mask(self._positions[:, None], self._table.shape[1] * BLOCK, window, dtype)
            self._masks[window, dtype] = mask[:, None]
        return self._masks[window, dtype]


def _by_token(memory: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [N, H_kv, BLOCK, D], where they lie."""
    keys, values = memory
    return keys.transpose(2, 3), values


def _mask(positions: torch.Tensor, width: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[R, T] -> [R, T, W], to add to scores: which columns a token at each position does not see."""
    distance = positions[..., None] - torch.arange(width, device=positions.device)
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _in_rows(memory: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[N, H_kv, BLOCK, D] -> [R, H_kv, W, D], contiguous: else torch takes another kernel, with other last bits."""
    return memory[table].transpose(1, 2).flatten(2, 3).contiguous()


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """query [B, H, T, D], key and value [B, H_kv, W, D], mask [B, 1, G T or 1, W] -> [B, T, H, D].

    The G heads that share keys lie below each other, as G T queries of one head, so that no keys are copied.
    """
    groups = query.shape[1] // key.shape[1]
    q = query.unflatten(1, (key.shape[1], groups)).flatten(2, 3)
    if softcap is None:
        out = F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scaling)
    else:
        scores = q @ key.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = softcap * torch.tanh(scores / softcap) + mask
        out = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value
    return out.unflatten(2, (groups, query.shape[2])).flatten(1, 2).transpose(1, 2)
