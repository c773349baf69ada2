"""What the engine computes with after a load, read back and compared bit for bit with what was published.

The canary proves the function on a few prompts. A single wrong weight can hide from it: the embedding of a token that
no canary prompt holds, a weight whose effect is below the tolerance. So after each load every weight is read back from
where the engine's kernels read it, and compared. vLLM stacks layers (q, k and v are one matrix) and CPU kernels hold
weights in packed form; both are got around without knowing how:

- Stacking only puts rows below each other. So per decoder layer and matrix width, the sum over all rows of the bit
  patterns of each column must be what was published: one integer per column, without rounding. A changed bit changes
  its column's sum, always; several changes cancel with a chance of about 2^-32. What the sums do not see, rows that
  changed places within a layer, moves logprobs by far more than the canary's tolerance.
- A packed matrix is read by multiplying it with columns of the identity, which gives its columns back exactly. That
  costs numel x width multiplications, so of large models each load reads a block of columns, the next load the next.
  Where there is no packed kernel for a type (bfloat16 on a CPU without AVX-512), the plain matrix is what is computed
  with, and it is summed as it lies: multiplying would cost 3 s per GB.
- The experts of a mixture are packed for a kernel that cannot be made to give them back. Packing moves weights about
  and pads with zeros, so one sum over each expert's matrices of one width is compared. What it does not see, weights
  that changed places within an expert, the canary sees of the experts that it is routed to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Generator, Iterator, Set
from dataclasses import dataclass
from types import FunctionType

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.layernorm import LayerNorm, RMSNorm
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

MAX_MULTIPLICATIONS = 1e9
"""Per load, for reading packed matrices: a few hundredths of a second of one core."""
CHUNK_BYTES = 256 << 10
"""Summed at once: what is computed on the way stays in the core's cache, and no new pages are needed for it."""

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

Key = tuple[str, int]
"""(decoder layer, expert or module, width of its matrices; 1 for vectors)."""


@functools.cache  # asked twice for each tensor, at every load
def layer_of(name: str) -> str:
    """The decoder layer a parameter belongs to, or its module: the same for Hugging Face's names and vLLM's."""
    parts = name.replace(".base_layer.", ".").split(".")  # what vLLM puts an adapter around
    index = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: index + 1])


@dataclass(frozen=True)
class Columns:
    """Those that one load reads of each matrix: `num` of them, another block each turn; all if it is no wider."""

    num: int
    turn: int

    def of(self, width: int) -> slice:
        first = 0 if self.num >= width else self.turn * self.num % width
        return slice(first, min(width, first + self.num))


ALL = Columns(2**62, 0)


def column_sums(tensor: torch.Tensor, columns: Columns = ALL, *, multiplied: bool = True) -> torch.Tensor:
    """Sum over rows of the bit patterns of these columns: [..., K] -> int64 [num]; of a vector -> [1].

    `multiplied`: -0.0 counts as 0.0, into which multiplying with the identity turns it.
    """
    matrix = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    if columns.num < matrix.shape[1]:
        matrix = matrix[:, columns.of(matrix.shape[1])]
    bits, wide, num_rows = _BITS[matrix.dtype], torch.int64, max(1, len(matrix))
    if matrix.device.type == "cpu":
        num_rows = max(1, CHUNK_BYTES // max(1, matrix.shape[1] * matrix.element_size()))
        if bits is torch.int16:
            wide, num_rows = torch.int32, min(num_rows, 2**15)  # the sum of so many fits
    first, *others = [matrix] if len(matrix) <= num_rows else matrix.split(num_rows)
    sums = (first + 0.0 if multiplied else first).view(bits).sum(0, dtype=wide).to(torch.int64)
    for rows in others:
        sums += (rows + 0.0 if multiplied else rows).view(bits).sum(0, dtype=wide)
    return sums


def expert_of(name: str) -> str | None:
    """The expert whose matrix this is in a model's files, as (decoder layer).experts.(number)."""
    _, found, number = name.partition(".experts.")
    number = number.partition(".")[0]
    return f"{layer_of(name)}.experts.{number}" if found and number.isdigit() else None


def total_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of the bit patterns of all elements: int64 [1]."""
    return column_sums(tensor.flatten())


class Published:
    """The names and column sums of one publication. `multiplied`: layers of which some matrix is read that way."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device, columns: Columns, multiplied: Set[str]) -> None:
        self._dtype, self._device = dtype, device
        self.columns, self._multiplied = columns, multiplied
        self.sums: dict[Key, torch.Tensor] = {}
        self._leaves: set[tuple[str, str]] = set()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._leaves.add((layer_of(name), name.rpartition(".")[2]))
        tensor = tensor.to(device=self._device, dtype=self._dtype)
        expert, layer = expert_of(name), layer_of(name)
        sums = total_sum(tensor) if expert is not None else self.sums_of(layer, tensor)
        key = (expert or layer, tensor.shape[-1] if tensor.dim() > 1 else 1)
        self.sums[key] = self.sums[key] + sums if key in self.sums else sums

    def narrowed(self, columns: Columns) -> Published:
        """Of the sums of all columns, those of these."""
        assert self.columns is ALL
        one = Published(dtype=self._dtype, device=self._device, columns=columns, multiplied=self._multiplied)
        one._leaves = self._leaves
        # An expert's one sum is of all its columns.
        one.sums = {key: s if len(s) != key[1] else s[columns.of(key[1])] for key, s in self.sums.items()}
        return one

    def sums_of(self, layer: str, tensor: torch.Tensor) -> torch.Tensor:
        """Of a plain tensor of this layer, in the form in which the layer's others are read."""
        return column_sums(tensor.to(self._dtype), self.columns, multiplied=layer in self._multiplied)

    def buffers_of(self, name: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """A module's own buffers that were published (a layer's scale): what a kernel made for itself was not."""
        layer = layer_of(f"{name}.weight")
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set and (layer, leaf) in self._leaves:
                yield leaf, buffer


@dataclass(frozen=True)
class ReadBack:
    """`differing`: layers that do not hold what was published. `unread`: layers that could not be compared."""

    differing: list[str]
    unread: list[str]


def read_back(
    model: torch.nn.Module,
    tensors: Iterator[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    turn: int,
    head_is_packed: bool = True,
) -> Generator[None, None, ReadBack]:
    """Compare what `model` computes with to the published `tensors`, in pieces: it may compute something in between.

    `turn` chooses the block of columns where reading all of them would cost too much. `head_is_packed`: the output head
    is computed by a kernel like other matrices, not from its plain weight in another type.
    """
    layout = Layout.of(model, head_is_packed=head_is_packed)
    published = layout.published(dtype=dtype, device=device, columns=layout.columns(turn))
    for name, tensor in tensors:
        published.add(name, tensor)
        yield
    return (yield from compare(model, layout, published, dtype=dtype))


@dataclass(frozen=True)
class Layout:
    """Where a model's weights are. `modules`: by (layer, id); `packed`: ids of those that a kernel holds;
    `multiplied`: layers of which some matrix is read by multiplying; `num_columns`: that one load reads of each matrix.
    """

    modules: dict[tuple[str, int], torch.nn.Module]
    packed: Set[int]
    multiplied: Set[str]
    num_columns: int

    @classmethod
    def of(cls, model: torch.nn.Module, *, head_is_packed: bool) -> Layout:
        # A module under two names (a tied head) was published under both; a router has two names within one layer.
        named = [(layer_of(f"{n}.weight"), m) for n, m in model.named_modules(remove_duplicate=False)]
        modules = {(layer, id(m)): m for layer, m in named if next(m.parameters(False), None) is not None}
        packed = {id(m) for m in modules.values() if _is_packed(m) and (head_is_packed or isinstance(m, LinearBase))}
        multiplied = {layer for (layer, _), m in modules.items() if id(m) in packed}
        sizes = sum(math.prod(_shape(m)) for m in modules.values() if id(m) in packed)
        return cls(modules, packed, multiplied, max(1, int(MAX_MULTIPLICATIONS / max(1, sizes))))

    def columns(self, turn: int) -> Columns:
        return Columns(self.num_columns, turn)

    def published(self, *, dtype: torch.dtype, device: torch.device, columns: Columns = ALL) -> Published:
        """For what is published of such a model; empty yet."""
        return Published(dtype=dtype, device=device, columns=columns, multiplied=self.multiplied)


def compare(
    model: torch.nn.Module, layout: Layout, published: Published, *, dtype: torch.dtype
) -> Generator[None, None, ReadBack]:
    """What `model` computes with and what was `published`, in pieces."""
    modules, packed, columns = layout.modules, layout.packed, published.columns
    names = {layer for layer, _ in published.sums}
    unread: set[str] = set()
    found: dict[Key, torch.Tensor] = {}
    for (layer, _), module in modules.items():
        if isinstance(module, RoutedExperts):
            experts = dict(_expert_sums(module, layer, dtype)) if _are_readable(module) else {}
            if experts and experts.keys() <= published.sums.keys():
                found |= experts
                yield
            else:
                unread.add(f"{layer}.experts")
        elif not _is_readable(module) or layer not in names:
            unread.add(layer)
    for (layer, _), module in modules.items():
        if layer in unread or isinstance(module, RoutedExperts):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if name == "weight" and id(module) in packed:
                width, sums = _shape(module)[1], _multiplied(module, parameter, dtype, columns)
            else:  # a kernel may have made a bias wider
                width, sums = parameter.shape[-1] if parameter.dim() > 1 else 1, published.sums_of(layer, parameter)
            found[layer, width] = found[layer, width] + sums if (layer, width) in found else sums
            yield
    for name, module in model.named_modules():
        for _, buffer in published.buffers_of(name, module):
            key = (layer_of(f"{name}.weight"), buffer.shape[-1] if buffer.dim() > 1 else 1)
            if key[0] not in unread:
                sums = published.sums_of(key[0], buffer)
                found[key] = found[key] + sums if key in found else sums
    read = {layer for layer, _ in found}
    compared, differing = [], set[str]()
    for key, sums in published.sums.items():
        if key in found and found[key].shape == sums.shape:
            compared.append(key)
        elif key[0] in read:
            differing.add(key[0])
    if compared:  # at once: each look at what a device has computed waits for all that it was asked
        differs = torch.cat([found[key] for key in compared]) != torch.cat([published.sums[key] for key in compared])
        of_keys = differs.cpu().split([len(found[key]) for key in compared])
        differing |= {layer for (layer, _), of_key in zip(compared, of_keys, strict=True) if of_key.any()}
    return ReadBack(sorted(differing), sorted(unread))


def _expert_sums(module: RoutedExperts, layer: str, dtype: torch.dtype) -> Iterator[tuple[Key, torch.Tensor]]:
    """The sum of each expert's matrices of each width, whatever order they lie in."""
    hidden, inner = module.moe_config.hidden_dim_unpadded, module.moe_config.intermediate_size_per_partition_unpadded
    assert hidden is not None
    assert inner is not None
    weights = dict(module.named_parameters(recurse=False))
    for i, (w13, w2) in enumerate(zip(weights["w13_weight"], weights["w2_weight"], strict=True)):
        expert, up, down = f"{layer}.experts.{i}", total_sum(w13.to(dtype)), total_sum(w2.to(dtype))
        yield from {(expert, inner): down, (expert, hidden): up + down if inner == hidden else up}.items()


def _multiplied(module: torch.nn.Module, weight: torch.Tensor, dtype: torch.dtype, columns: Columns) -> torch.Tensor:
    """The column sums of a packed matrix."""
    width = _shape(module)[1]
    wanted = columns.of(width)
    num = wanted.stop - wanted.start
    of_identity = torch.zeros(num, width, dtype=dtype, device=weight.device)
    of_identity[torch.arange(num), torch.arange(wanted.start, wanted.stop)] = 1
    return column_sums(module.cpu_linear(of_identity, weight, None).t())  # type: ignore[operator]


def _is_packed(module: torch.nn.Module) -> bool:
    """Whether a kernel of its own holds this module's weight (an embedding's too, but lookups read the plain one).

    vLLM's fallback is a function that holds nothing, and computes with the weight that it is given.
    """
    kernel = getattr(module, "cpu_linear", None)
    holds = not (isinstance(kernel, FunctionType) and kernel.__closure__ is kernel.__defaults__ is None)
    return kernel is not None and holds and isinstance(module, LinearBase | ParallelLMHead)


def _shape(module: torch.nn.Module) -> tuple[int, int]:
    if isinstance(module, VocabParallelEmbedding):
        return module.num_embeddings_per_partition, module.embedding_dim
    assert isinstance(module, LinearBase)
    if isinstance(module, ReplicatedLinear):  # the router of a mixture of experts
        return module.output_size, module.input_size
    return module.output_size_per_partition, module.input_size_per_partition  # type: ignore[attr-defined]


def _are_readable(module: RoutedExperts) -> bool:
    """Whether all of a layer's experts are here, one by one, and nothing else is."""
    return (
        type(module.quant_method) is UnquantizedFusedMoEMethod
        and {name for name, _ in module.named_parameters(recurse=False)} == {"w13_weight", "w2_weight"}
        and module.local_num_experts == module.moe_config.num_logical_experts == module.moe_config.num_experts
    )


def _is_readable(module: torch.nn.Module) -> bool:
    """Whether this module holds what was published as it was published: not quantised."""
    if isinstance(module, LinearBase):
        return type(module.quant_method) is UnquantizedLinearMethod
    if isinstance(module, VocabParallelEmbedding):
        return type(module.quant_method) is UnquantizedEmbeddingMethod
    return isinstance(module, RMSNorm | LayerNorm)
