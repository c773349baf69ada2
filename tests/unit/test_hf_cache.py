"""Attention over keys and values in blocks, beside the formula in float64."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from leeway.engines import hf_kernel
from leeway.engines.hf_cache import BLOCK, BlockPool, Row, TokenAttention, _attention, _by_token, _in_rows, num_blocks

LENGTHS = [33, 70, 3]  # before the token that attends


@pytest.fixture
def kernels() -> None:
    """As vLLM's build for x86 processors has them."""
    vllm = importlib.util.find_spec("vllm")
    if not (vllm and vllm.origin and [*Path(vllm.origin).parent.glob("_C_AVX2*so")]):
        pytest.skip("vLLM was built for another processor")


@pytest.fixture(params=["kernel", "no kernel"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's kernels, and what is computed without them."""
    if request.param == "no kernel":
        monkeypatch.setattr(hf_kernel, "kernels", lambda: None)
    else:
        request.getfixturevalue("kernels")


@pytest.mark.usefixtures("kernels")
def test_the_kernels_are_found_and_used_with_keys_in_the_type_of_the_model() -> None:
    pool = BlockPool()
    rows, (key, value) = pool.add([40]), torch.randn(2, 1, 2, 1, 48).to(torch.bfloat16)
    attention = TokenAttention(pool, rows, [39], torch.device("cpu"))
    attention.attend(key, key, value, scaling=None, window=None, softcap=None)
    assert "_blocks" in vars(attention)
    assert pool.bytes_per_token == 2 * (2 * 48 * 2)


@pytest.mark.usefixtures("kernels")
def test_that_there_are_no_kernels_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert hf_kernel.kernels.__wrapped__() is None
    assert "without vLLM's kernels, several times slower: vLLM is not installed" in caplog.text


@pytest.mark.usefixtures("either")
def test_a_score_far_above_its_cap_is_the_cap() -> None:
    """vLLM's kernel makes no number of it."""
    pool = BlockPool()
    rows, key = pool.add([40]), torch.ones(1, 2, 1, 48)
    attention = TokenAttention(pool, rows, [39], torch.device("cpu"))
    for x in _by_token(pool.layer(0, key, key)):
        x[:] = 1
    out = attention.attend(100 * key, key, key, scaling=1.0, window=None, softcap=0.5)
    torch.testing.assert_close(out, torch.ones(1, 1, 2, 48))


def remember(
    memory: tuple[torch.Tensor, torch.Tensor], row: Row, key: torch.Tensor, value: torch.Tensor, length: int
) -> None:
    """So many tokens of key and value [H_kv, T, D]."""
    keys, values = memory
    for t in range(length):
        keys[row.blocks[t // BLOCK], :, : key.shape[-1], t % BLOCK] = key[:, t]
        values[row.blocks[t // BLOCK], :, t % BLOCK, : value.shape[-1]] = value[:, t]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "value_size"), [(4, 2, 48, 48), (3, 3, 20, 36), (7, 1, 64, 16)])
def test_scores_are_not_rounded_to_the_type_of_the_model(
    heads: int, kv_heads: int, size: int, value_size: int, dtype: torch.dtype
) -> None:
    """They are up to 100 here, so that a bfloat16 of them could be off by a quarter, and a weight by as much."""
    torch.manual_seed(0)
    pool = BlockPool()
    rows = pool.add([length + 1 for length in LENGTHS])
    query = (5 * torch.randn(len(rows), heads, 1, size)).to(dtype)
    key = (5 * torch.randn(len(rows), kv_heads, max(LENGTHS) + 1, size)).to(dtype)
    value = torch.randn(len(rows), kv_heads, max(LENGTHS) + 1, value_size).to(dtype)
    for i, (row, length) in enumerate(zip(rows, LENGTHS, strict=True)):
        remember(pool.layer(0, key, value), row, key[i], value[i], length)
    last = torch.tensor(LENGTHS)
    new = tuple(x[torch.arange(len(rows)), :, last][:, :, None] for x in (key, value))
    attention = TokenAttention(pool, rows, LENGTHS, torch.device("cpu"))
    out = attention.attend(query, *new, scaling=None, window=None, softcap=None)
    for i, length in enumerate(LENGTHS):
        k, v = (x[i, :, : length + 1].double().repeat_interleave(heads // kv_heads, 0) for x in (key, value))
        scores = query[i].double() @ k.transpose(1, 2) * size**-0.5
        expected = (scores.softmax(-1) @ v)[:, 0]
        epsilon = torch.finfo(dtype).eps
        torch.testing.assert_close(out[i, 0].double(), expected, rtol=2 * epsilon, atol=max(4 * epsilon, 3e-5))


def test_a_pool_that_grows_shows_nobody_what_was_in_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is masked is multiplied by 0 all the same, and would not be 0 if it were not a number."""
    made = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size: made(x, *size).fill_(float("nan")))
    pool = BlockPool()
    first = pool.add([BLOCK + 1])
    pool.layer(0, torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
    rows = [*first, *pool.add([5 * BLOCK]), *pool.copy(first)]
    pool.extend(first, [6 * BLOCK])
    held = [block for row in rows for block in row.blocks]
    assert sorted(held) == [*range(pool.num_used)]
    assert all(x[pool.num_used :].isnan().all() and len(x) > pool.num_used for layer in pool._layers for x in layer)
    assert all(x[: pool.num_used].isfinite().all() for layer in pool._layers for x in layer)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "value_size", "window", "softcap"),
    [(4, 4, 48, None, None), (6, 2, 48, None, None), (4, 2, 48, 20, None), (4, 2, 20, None, 0.5)],
)
def test_a_row_attends_alike_alone_and_among_others_wherever_its_blocks_are(
    heads: int, kv_heads: int, value_size: int, window: int | None, softcap: float | None
) -> None:
    """To the last bit; also beside a row that is not a number, with blocks to spare, and after a layer of other heads.
    And as other devices compute it, up to rounding.
    """
    torch.manual_seed(0)
    lengths, size = [33, 200, 3, 64], 48
    query, of_other_layer = torch.randn(len(lengths), heads, 1, size), torch.randn(3, len(lengths), 3, 1, BLOCK)
    keys = torch.randn(len(lengths), kv_heads, max(lengths) + 1, size)
    values = torch.randn(len(lengths), kv_heads, max(lengths) + 1, value_size)
    keys[1, :, 195], values[1, :, 195] = float("nan"), float("nan")

    def attended(order: list[int]) -> torch.Tensor:
        pool = BlockPool()
        rows = [pool.add([BLOCK])[0] for _ in order]
        for _ in range(max(lengths) // BLOCK + 1):  # a block at a time, so that no row's blocks are side by side
            for row, i in zip(rows, order, strict=True):
                pool.extend([row], [min(len(row.blocks) + 1, num_blocks(lengths[i] + 1) + i % 2) * BLOCK])
        pool.layer(0, *of_other_layer[1:])
        memory = pool.layer(1, keys, values)
        for row, i in zip(rows, order, strict=True):
            remember(memory, row, keys[i], values[i], lengths[i])
        at = [lengths[i] for i in order]
        attention = TokenAttention(pool, rows, at, torch.device("cpu"))
        new = (x[order, :, at][:, :, None] for x in (keys, values))
        how = {"scaling": None, "window": window, "softcap": softcap}
        attention.attend(*of_other_layer[:, order], **how)
        out = attention.attend(query[order], *new, **how)
        sizes = size, value_size
        tables = (_in_rows(x[..., :d], attention._table) for x, d in zip(_by_token(memory), sizes, strict=True))
        elsewhere = _attention(query[order], *tables, attention._mask(window, query.dtype), None, softcap)
        torch.testing.assert_close(out, elsewhere, equal_nan=True)
        return out

    among = attended([0, 1, 2, 3])
    assert among[1].isnan().any()
    for order in ([3, 2, 1, 0], [0], [2], [3, 0]):
        for i, row in zip(order, attended(order), strict=True):
            assert row.equal(among[i]) or i == 1


@pytest.mark.usefixtures("either")
def test_threads_that_attend_at_once_get_their_own_numbers() -> None:
    """The kernels have one workspace for the whole process."""
    torch.manual_seed(0)
    num_rows, length = 64, 200
    works = []
    for _ in range(4):
        pool = BlockPool()
        rows = pool.add([length] * num_rows)
        key, value = torch.randn(2, num_rows, 4, length, 48)
        for i, row in enumerate(rows):
            for x, new in zip(_by_token(pool.layer(0, key, value)), (key, value), strict=True):
                blocks = torch.tensor(row.blocks).repeat_interleave(BLOCK)[:length]
                x[blocks, :, torch.arange(length) % BLOCK] = new[i].transpose(0, 1)
        works.append((pool, rows, torch.randn(num_rows, 4, 1, 48), key[:, :, -1:], value[:, :, -1:]))

    def attended(work: tuple[BlockPool, list[Row], torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        pool, rows, *given = work
        attention = TokenAttention(pool, rows, [length - 1] * num_rows, torch.device("cpu"))
        return attention.attend(*given, scaling=None, window=None, softcap=None)

    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        alone = [threads.submit(attended, work).result() for work in works]
        for _ in range(20):
            for out, expected in zip(threads.map(attended, works), alone, strict=True):
                assert out.equal(expected)
