"""vLLM's kernels for the attention of single tokens over blocks of keys and values, on an x86 processor.

They look the blocks up where they lie, and add up in float32 whatever type the keys have. What a sequence gets is its
own to the last bit, whatever else is in the batch. Loaded without the rest of vLLM, whose import takes seconds. Where
its build has none (one for GPUs), or the processor is another, `kernels` is None. Their tanh is NaN from 88 on, so
layers that cap their scores cannot use them.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import threading
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)
SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that there are kernels for."""
TYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_TYPE = "auto"  # that of keys and values: the query's
_workspace = threading.Lock()
"""The kernels have one workspace for the process: two threads that call them at once would get each other's numbers."""


@functools.cache
def kernels() -> Any | None:
    """The operators, or None, and then the log says why."""
    try:
        return _loaded()
    except (ImportError, OSError) as error:
        logger.warning("engine hf attends without vLLM's kernels, several times slower: %s", error)
        return None


def _loaded() -> Any:
    """Raises ImportError where there are none, OSError where a library that they need is missing."""
    found = importlib.util.find_spec("vllm")
    if not torch.cpu._is_avx2_supported():
        raise ImportError("they are for x86 processors with AVX2")
    if found is None or found.origin is None:
        raise ImportError("vLLM is not installed")
    name = "_C_AVX2"
    if torch.cpu._is_avx512_supported():
        name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    for library in Path(found.origin).parent.glob(f"{name}.*so"):
        torch.ops.load_library(library)
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        raise ImportError("this build of vLLM has none for CPUs")
    return torch.ops._C


def kernel_size(key: torch.Tensor, value: torch.Tensor) -> int | None:
    """The head size, padding included, of the kernel for keys and values [..., D] like these, or None."""
    largest = max(key.shape[-1], value.shape[-1])
    if not key.is_cpu or key.dtype != value.dtype or key.dtype not in TYPES:
        return None
    if largest > SIZES[-1] or kernels() is None:
        return None
    return next(size for size in SIZES if size >= largest)


class BlockAttention:
    """That of the last token of each of B sequences, all of whose `lengths` are at least 1.

    `table` [B, M], int32: the blocks of each sequence in order. All memory is [N, H_kv, BLOCK, D] or, for keys,
    [N, H_kv, D, BLOCK], with a D of `SIZES`; what is given for it may have less and is padded with zeros. `slots` [B],
    int64: the block of each last token times BLOCK, and its place there.
    """

    def __init__(self, table: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor) -> None:
        self._ops: Any = kernels()
        self._table, self._lengths, self._slots = table, lengths.int(), slots
        self._starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
        self._plans: dict[tuple[int, int, int | None, int, torch.dtype], torch.Tensor] = {}

    def write(self, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Those of the last tokens, [B, H_kv, D] each, to memory."""
        size = values.shape[-1]
        self._ops.cpu_attn_reshape_and_cache(
            _padded(key, size),
            _padded(value, size),
            keys.view(values.shape),
            values,
            self._slots,
            _instructions(size),
            1.0,
            1.0,
            BLOCK_TYPE,
        )

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """query [B, H, D], of the type of memory -> [B, H, D], padding of values included."""
        assert query.dtype == keys.dtype == values.dtype, "the kernel would read beyond their end"
        size = values.shape[-1]
        query = _padded(query, size)
        out = torch.empty_like(query)
        alike = query.shape[1], values.shape[1], window, size, query.dtype
        with _workspace:
            if alike not in self._plans:
                self._plans[alike] = self._plan(*alike)
            self._ops.cpu_attention_with_kv_cache(
                query,
                keys.view(values.shape),
                values,
                out,
                self._starts,
                self._lengths,
                scaling,
                True,  # causal
                None,  # no slopes
                -1 if window is None else window,
                self._table,
                0.0,  # no cap
                self._plans[alike],
                None,  # no sinks
                None,
                1.0,
                1.0,
                BLOCK_TYPE,
            )
        return out

    def _plan(self, heads: int, kv_heads: int, window: int | None, size: int, dtype: torch.dtype) -> torch.Tensor:
        return self._ops.get_scheduler_metadata(
            len(self._lengths),
            heads,
            kv_heads,
            size,
            self._lengths,
            dtype,
            self._starts,
            True,  # causal
            -1 if window is None else window,
            _instructions(size),
            False,  # a sequence's blocks stay together: how many threads there are decides nothing
            None,
            BLOCK_TYPE,
        )


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    return F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x.contiguous()


def _instructions(size: int) -> str:
    """As vLLM chooses them, but for those of AMX, which have blocks of another layout and round weights."""
    return "vec" if size % 32 == 0 else "vec16"
