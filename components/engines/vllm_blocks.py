"""How many tokens a block of vLLM's key-value cache holds on a CPU.

Prompts share whole blocks, and of the next one a copy (`vllm_beginnings.py`). Of vLLM's default of 128 tokens that
would be all of a short prompt, for each of its answers. Blocks of 32 cost answers no time that could be measured
(docs/log.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm import AsyncEngineArgs

LEAST = 16
"""For vLLM's kernel `vec16`. Its other kernels take multiples of 32."""


def block_size(args: AsyncEngineArgs) -> int | None:
    """The block for this model; None: vLLM's own, where not all of its layers attend to keys and values."""
    model = args.create_model_config()
    if model.is_hybrid or model.is_attention_free or model.use_mla:
        return None
    # Where another kernel takes blocks of 32, it is faster over long contexts, by about a tenth.
    return LEAST if _is_vec16(model.dtype, 2 * LEAST, model.get_head_size()) else 2 * LEAST


def allow_least_blocks() -> None:
    """Let vLLM's worker take blocks of 16 where their kernel computes them: its own list has multiples of 32 only."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

    listed = CPUAttentionBackend.get_supported_kernel_block_sizes

    def sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        if isinstance(kv_cache_spec, AttentionSpec) and _is_vec16(kv_cache_spec.dtype, LEAST, kv_cache_spec.head_size):
            return [MultipleOf(LEAST)]
        return listed(kv_cache_spec)

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(sizes)  # type: ignore[method-assign]


def _is_vec16(dtype: torch.dtype, block: int, head_size: int) -> bool:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(dtype, block, head_size) == "vec16"
