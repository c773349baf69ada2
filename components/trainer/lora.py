"""Low-rank adapters (LoRA, arXiv 2106.09685): trained and published in the place of a model's own weights.

    y = W x + alpha / rank * B (A x)        W frozen; A [rank, in] and B [out, rank] are trained; B begins as zeros

A target keeps its class's name for `W`, and A and B are its submodules `lora_A` and `lora_B`: so every tensor has the
name that peft gives it, behind peft's own prefix. There is no dropout: trainer and engines agree on every token.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ..config.inputs import ALL_LINEAR, LoraConfig
from ..config.names import nearest
from ..failures import Refused
from ..integrity import write_checksums
from ..weights import BucketPlan, Manifest, TensorEntry, WeightSyncError, checksum_of
from .durable import sync_tree
from .linear import linear
from .names import PublishedNames
from .pretrained import skeleton, tensors_of
from .scoring import output_head
from .shards import own_rows, write_safetensors
from .tensors import saved_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .gather import Gatherer

ADAPTER_DIR = "adapter"
"""The folder, beside the merged weights, that holds the last adapter in peft's form."""
_PEFT_PREFIX = "base_model.model."


def low_rank(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """What an adapter adds to W x: x [..., in], a [rank, in], b [out, rank] -> [..., out]."""
    return linear(linear(x, a), b) * scaling


class LoraLinear(nn.Linear):
    """A linear layer that became a target of `adapt`. `is_on`: whether the adapter counts."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scaling: float
    is_on: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = linear(input, self.weight, self.bias)
        return out + low_rank(input, self.lora_A.weight, self.lora_B.weight, self.scaling) if self.is_on else out


def is_adapter(name: str) -> bool:
    """Whether a tensor of this name belongs to an adapter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def adapter_tensors(lm: nn.Module) -> dict[str, torch.Tensor]:
    """Of `saved_tensors`: what is trained."""
    return {name: tensor for name, tensor in saved_tensors(lm).items() if is_adapter(name)}


def base_tensors(lm: nn.Module) -> dict[str, torch.Tensor]:
    """Of `saved_tensors`: what never changes."""
    return {name: tensor for name, tensor in saved_tensors(lm).items() if not is_adapter(name)}


def lora_targets(lm: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """The modules that get an adapter, by name. Raises `Refused` in one line for what cannot have one."""
    head = output_head(lm)
    layers = {name: m for name, m in lm.named_modules() if isinstance(m, nn.Linear) and m is not head}
    if lora.target_modules == ALL_LINEAR:
        chosen = list(layers)
    else:
        chosen = [name for name in layers if any(_is_called(name, target) for target in lora.target_modules)]
        for target in lora.target_modules:
            if not any(_is_called(name, target) for name in chosen):
                raise Refused(_not_a_target(lm, target, layers))
    if not chosen:
        raise Refused(f"model.lora.target_modules: {type(lm).__name__} has no linear layers that could be targets")
    for name in chosen:
        least = min(layers[name].in_features, layers[name].out_features)
        if lora.rank > least:
            raise Refused(
                f"model.lora.rank: got {lora.rank}, expected at most {least}, the smaller side of {name}: above it an "
                "adapter is no smaller than what it is added to; lower it, or leave that module out of "
                "model.lora.target_modules"
            )
    return chosen


def published_targets(path: str, lora: LoraConfig) -> list[str]:
    """`lora_targets` of the model at `path`, by the names that its files have for them. Reads no weights."""
    lm = skeleton(path, "eager")
    targets = lora_targets(lm, lora)
    tensors_of(lm, path)  # from here on the files' names are known
    renamed = PublishedNames(lm).renamed
    return [renamed[f"{name}.weight"].removesuffix(".weight") for name in targets]


def _is_called(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _not_a_target(lm: PreTrainedModel, target: str, linear: Mapping[str, nn.Module]) -> str:
    own = sorted({name.rpartition(".")[2] for name in linear})
    said = f"model.lora.target_modules: got {target!r}"
    other = next((m for name, m in lm.named_modules() if name and _is_called(name, target)), None)
    if other is lm.get_input_embeddings() or other is output_head(lm):
        tied = " (tied to the embeddings)" if getattr(lm.config.get_text_config(), "tie_word_embeddings", False) else ""
        return (
            f"{said}, which is the {'output head' if other is output_head(lm) else 'embedding'}{tied}, expected linear "
            f"layers inside the model: {', '.join(own)}; leave it out"
        )
    if other is not None:
        return f"{said}, a {type(other).__name__}, expected linear layers: {', '.join(own)}"
    near = nearest(target, own)
    return f"{said}, expected some of {', '.join(own)}" + (f"; nearest: {near}" if near else "")


def adapt(lm: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Freeze a skeleton and give its targets an adapter, on the meta device; returns the targets' names."""
    targets = lora_targets(lm, lora)
    lm.requires_grad_(False)
    for name in targets:
        module = lm.get_submodule(name)
        assert isinstance(module, nn.Linear)
        # Like FSDP, this changes the layer's class: a wrapper would change the names of its weights.
        module.__class__ = type(f"Lora{type(module).__name__}", (LoraLinear, type(module)), {})
        target = cast(LoraLinear, module)
        target.lora_A = nn.Linear(module.in_features, lora.rank, bias=False, device="meta")
        target.lora_B = nn.Linear(lora.rank, module.out_features, bias=False, device="meta")
        target.scaling, target.is_on = lora.scaling, True
    return targets


def initial_adapters(
    lm: PreTrainedModel, *, seed: int, rank: int, num_ranks: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """This rank's rows of new adapters, float32: they add nothing yet. The same numbers on any number of ranks.

    A is uniform within 1 / sqrt(in), as peft draws it.
    """
    weights = {}
    for name, tensor in adapter_tensors(lm).items():
        whole = torch.zeros(tensor.shape)
        if name.endswith(".lora_A.weight"):
            generator = torch.Generator().manual_seed(_seed_of(seed, name))
            whole.uniform_(-1 / math.sqrt(tensor.shape[1]), 1 / math.sqrt(tensor.shape[1]), generator=generator)
        first, last = own_rows(tensor.shape[0], rank=rank, num_ranks=num_ranks)
        weights[name] = whole[first:last].clone().to(device)
    return weights


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the one that it was adapted from."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for module in adapted:
        module.is_on = False
    try:
        yield
    finally:
        for module in adapted:
            module.is_on = True


def base_entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    """What the digest of the weights that adapters are added to is made of: one published tensor."""
    memory = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    kind = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(name, kind, tuple(tensor.shape), 0, 0, tensor.nbytes, checksum_of(memory, "xxh3_128"))


def base_error(manifest: Manifest, digest: str) -> WeightSyncError:
    """For an engine whose weights have another `digest` than those that the adapter belongs to."""
    return manifest.error(
        "base",
        f"the adapter belongs to weights with the digest {manifest.base[:16] or 'none'}, the engine's are "
        f"{digest[:16]}: model.path must be the same files for trainer and engine",
    )


class MergedWeights:
    """What is exported of an adapted model: its weights with the adapter added, bucket by bucket, as plain tensors.

    The adapter is merged as it was published, in the compute type; sums are in float32.
    """

    def __init__(self, base: Gatherer, adapters: Gatherer, lora: LoraConfig, *, base_path: str) -> None:
        self._base, self._adapters, self._lora, self._base_path = base, adapters, lora, base_path
        self._adapter: dict[str, torch.Tensor] = {}

    def buckets(self) -> Iterator[tuple[BucketPlan, torch.Tensor | None]]:
        """As `Gatherer.buckets` (a collective)."""
        self._adapter = {}
        for plan, memory in self._adapters.buckets():
            if memory is not None:
                plan, memory = self._adapters.as_published(plan, memory)
                self._adapter |= {span.names[0]: span.tensor(memory).clone() for span in plan.spans}
            del memory
        renamed = self._base.names.renamed
        for plan, memory in self._base.buckets():
            for span in plan.spans if memory is not None else []:
                assert memory is not None
                module = renamed.get(span.names[0], "").removesuffix(".weight")
                if f"{module}.lora_A.weight" in self._adapter:
                    weights = span.tensor(memory)
                    weights.copy_(weights.float() + self._difference(module))
            yield plan, memory
            del memory

    def _difference(self, module: str) -> torch.Tensor:
        a, b = (self._adapter[f"{module}.lora_{which}.weight"].float() for which in "AB")
        return self._lora.scaling * (b @ a)

    def write_beside(self, folder: Path) -> None:
        """The adapter of the last `buckets` in peft's own form, in `ADAPTER_DIR` beside `folder` (rank 0)."""
        target = folder.with_name(ADAPTER_DIR)
        target.mkdir(parents=True)
        modules = sorted({name.rpartition(".lora_")[0] for name in self._adapter})
        about = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._base_path,
            "r": self._lora.rank,
            "lora_alpha": self._lora.alpha,
            "lora_dropout": 0.0,
            "target_modules": modules,
            "bias": "none",
            "use_rslora": False,
            "inference_mode": True,
        }
        (target / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")
        tensors = {_PEFT_PREFIX + name: tensor for name, tensor in self._adapter.items()}
        sums, _ = write_safetensors(target / "adapter_model.safetensors", tensors, metadata={"format": "pt"})
        write_checksums(target, {"adapter_model.safetensors": sums})
        sync_tree(target)
