"""A Hugging Face causal LM that answers one question: how likely each of these tokens is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..sampling_masks import BARRED, KEPT
from .attention import NAME as PACKED
from .attention import OwnAttention
from .layout import Layout, padded_layout
from .logprobs import LogitTransform, head_logits, token_logprobs

if TYPE_CHECKING:
    from .microbatch import Microbatch

# Above this many logits, tiling is worth a third more arithmetic in the head: 128 MiB in float32.
MANY_LOGITS = 1 << 25
# How many logits then exist at once. GPUs need products that are large enough to keep them busy: 256 MiB in bfloat16.
TILE_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 27}
CACHED_LOGITS = 1 << 18  # 1 MiB
# Replaces infinity, because 0 times infinity would be nan.
LOWEST = -1e30


class ScoringModel(nn.Module):
    """Wraps a causal LM; the output head runs only on the positions asked for, `chunk_tokens` of them at a time.

    None: as many as `MANY_LOGITS` allows. The wrapper is the FSDP root, so that the head (tied or not) is gathered
    together with the embeddings whatever calls it. `transform`: what the model does to its head's logits.
    `head_dtype`: in which they are computed (None: as everything else). `masks`: a mask separates padded rows from
    their padding. `families.load_model` determines what a model needs.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        transform: LogitTransform,
        head_dtype: torch.dtype | None = None,
        chunk_tokens: int | None = None,
        masks: bool = False,
    ) -> None:
        super().__init__()
        self.lm = lm
        self.transform = transform
        self.head_dtype = head_dtype
        self.chunk_tokens = chunk_tokens
        self.masks = masks
        self.eval()

    def train(self, mode: bool = True) -> ScoringModel:
        """Always in evaluation mode: engines have no dropout and no router noise, and agree on every token."""
        return super().train(False)

    @property
    def is_packed(self) -> bool:
        """Whether packed rows can be scored."""
        return is_packed(self.lm)

    def forward(
        self,
        input_ids: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor | None,
        temperature: float | torch.Tensor,
        *,
        position_ids: torch.Tensor | None = None,
        layout: Layout | None = None,
        attention_mask: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
        barred: torch.Tensor | None = None,
        entropy_gradient: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids [B, T], rows [S] into the flattened B * T positions -> (logprobs, entropy [S]), in nats, float32.

        With targets [S]: `logprobs` [S] of those. Without: of the whole vocabulary, [S, V]. `temperature`: one for all,
        or of each token, [S] (with targets). `position_ids`, `layout` (only for a model that `is_packed`) and
        `attention_mask`: see `Microbatch`. `kept` [S, W] and `barred` [S, B]: the tokens that each token was drawn
        from, and not (`sampling_masks`): the distribution is that over these. A gradient through the entropy needs all
        logits of a token at once, so it is only computed on request, for some tokens at a time.
        """
        given = pass_arguments(self.lm, input_ids, position_ids, layout, attention_mask if self.masks else None)
        head = output_head(self.lm)
        with head_input(head) as seen:
            self.lm(**given)
        # Not [rows]: what its backward adds for tokens that answers share comes in the order of the threads.
        hidden = seen[0].flatten(0, 1).index_select(0, rows)
        masks = (kept, barred)
        if not isinstance(temperature, torch.Tensor):
            return self._scored(hidden, targets, self.transform.at(temperature), masks, entropy_gradient)
        assert targets is not None, "tokens of several temperatures"
        where, parts = [], []
        for one in temperature.unique().tolist():
            where.append((temperature == one).nonzero().flatten())
            at = self.transform.at(one)
            own = tuple(None if mask is None else mask[where[-1]] for mask in masks)
            parts.append(self._scored(hidden.index_select(0, where[-1]), targets[where[-1]], at, own, entropy_gradient))
        order = torch.cat(where).argsort()
        logprobs, entropy = (torch.cat(each).index_select(0, order) for each in zip(*parts, strict=True))
        return logprobs, entropy

    def _scored(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor | None,
        transform: LogitTransform,
        masks: tuple[torch.Tensor | None, ...],
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [S, D] -> what `forward` returns."""
        head = output_head(self.lm)
        entropy_gradient = entropy_gradient and torch.is_grad_enabled()
        many, chunk = self._chunks(hidden.device)
        if targets is None or len(hidden) <= many:
            return self._at_once(hidden, targets, transform, masks, entropy_gradient)
        is_masked = any(mask is not None for mask in masks)
        # Tiles along the vocabulary need a head that is nothing but its weights, and their entropy has no gradient.
        if type(head) is nn.Linear and not is_masked and not entropy_gradient:
            return token_logprobs(
                hidden, head.weight, head.bias, targets, transform=transform, chunk=chunk, dtype=self.head_dtype
            )
        # All logits of some tokens at a time, computed again in the backward pass, which keeps hidden states alone.
        again = functools.partial(checkpoint, self._at_once, use_reentrant=False)
        score = again if torch.is_grad_enabled() else self._at_once
        parts = []
        for start in range(0, len(targets), chunk):
            own = slice(start, start + chunk)
            own_masks = tuple(None if mask is None else mask[own] for mask in masks)
            parts.append(score(hidden[own], targets[own], transform, own_masks, entropy_gradient))
        logprobs, entropy = (torch.cat(each) for each in zip(*parts, strict=True))
        return logprobs, entropy

    def _at_once(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor | None,
        transform: LogitTransform,
        masks: tuple[torch.Tensor | None, ...],
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `_scored` returns, from all logits at a time."""
        logits = transform(self.logits(hidden).float())
        if targets is None:
            assert all(mask is None for mask in masks), "tokens that were drawn"
            scored = logprobs = torch.log_softmax(logits, dim=-1)
        else:
            scored, logprobs = masked_logprobs(logits, targets, *masks)
        if entropy_gradient:
            return scored, entropy_of(logprobs)
        # A few rows at a time, which stay in a CPU's cache: passes over all at once cost as much as a layer.
        parts = logprobs.detach().split(_rows_in_cache(logprobs))
        return scored, torch.cat([entropy_of(part) for part in parts])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the output head makes of hidden states [..., D]: [..., V], neither capped nor scaled."""
        head = output_head(self.lm)
        if self.head_dtype is None and type(head) is not nn.Linear:
            return head(hidden)
        assert isinstance(head, nn.Linear), "load_model refuses a head of another kind"
        return head_logits(hidden, head.weight, head.bias, self.head_dtype)

    def plain_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """What transformers itself makes of tokens [B, T], without anything of ours: logits [B, T, V], float32."""
        return self.lm(**pass_arguments(self.lm, tokens, None, None, None)).logits.float()

    def _chunks(self, device: torch.device) -> tuple[int, int]:
        """(how many tokens are scored at once, how many tokens' logits exist at a time if more are scored)."""
        if self.chunk_tokens is not None:
            return self.chunk_tokens, self.chunk_tokens
        vocab_size = self.lm.config.get_text_config().vocab_size
        return max(1, MANY_LOGITS // vocab_size), max(1, TILE_LOGITS[device.type] // vocab_size)


def score_microbatch(
    model: ScoringModel, microbatch: Microbatch, *, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropy [S]) of the microbatch's tokens, as `ScoringModel.forward` has them (a collective)."""
    rows, targets, distinct = microbatch.logit_positions, microbatch.targets, microbatch.distinct
    logprobs, entropy = model(
        microbatch.input_ids,
        rows if distinct is None else rows[distinct],
        targets if distinct is None else targets[distinct],
        microbatch.temperature,
        position_ids=microbatch.position_ids,
        layout=microbatch.layout,
        attention_mask=microbatch.attention_mask,
        kept=microbatch.token_tensors.get(KEPT),
        barred=microbatch.token_tensors.get(BARRED),
        entropy_gradient=entropy_gradient,
    )
    if (copies := microbatch.copies) is None:
        return logprobs, entropy
    # Not [copies], as above.
    return logprobs.index_select(0, copies), entropy.index_select(0, copies)


def masked_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor | None, barred: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [S, V], targets [S], kept [S, W] and barred [S, B] token ids, -1 after them -> their logprobs [S], and
    those of the tokens that they were drawn from [S, W or V].

    Over what is kept, over all but what is barred, or over all. Nothing kept: nobody drew this token, and its logprob
    is 0.
    """
    if kept is None:
        if barred is not None:
            size = logits.shape[-1]
            hidden = torch.zeros(len(logits), size + 1, dtype=torch.bool, device=logits.device)
            hidden.scatter_(1, torch.where(barred < 0, size, barred).long(), True)
            logits = logits.masked_fill(hidden[:, :size], float("-inf"))
        logprobs = torch.log_softmax(logits, dim=-1)
        # A sum over one element instead of a squeeze: FSDP hooks must not sit on a view.
        return logprobs.gather(-1, targets[:, None]).sum(-1), logprobs
    alone = torch.where((kept < 0).all(-1), targets, kept[:, 0])
    kept = torch.cat([alone[:, None], kept[:, 1:]], dim=1).long()
    among = logits.gather(-1, kept.clamp(min=0)).masked_fill(kept < 0, float("-inf"))
    logprobs = torch.log_softmax(among, dim=-1)
    return torch.where(kept == targets[:, None], logprobs, 0.0).sum(-1), logprobs


def entropy_of(logprobs: torch.Tensor) -> torch.Tensor:
    """Entropies [S] of distributions [S, V]; a token of probability 0 contributes nothing, not even to the gradient."""
    return -(logprobs.exp() * logprobs.clamp(min=LOWEST)).sum(-1)


def _rows_in_cache(logprobs: torch.Tensor) -> int:
    """How many rows of [S, V] are handled at once if handling all of them gains nothing."""
    return max(1, CACHED_LOGITS // logprobs.shape[-1] if logprobs.device.type == "cpu" else len(logprobs))


def is_packed(lm: PreTrainedModel) -> bool:
    return lm.config._attn_implementation == PACKED


def pass_arguments(
    lm: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None,
    layout: Layout | OwnAttention | None,
    attention_mask: torch.Tensor | None,
) -> dict[str, Any]:
    """The arguments of a model, or of its body, for a pass; see `Microbatch`."""
    given: dict[str, Any] = {"input_ids": input_ids}
    if "use_cache" in _parameters(type(lm)):
        given["use_cache"] = False
    if is_packed(lm):
        num_rows, width = input_ids.shape
        given["layout"] = padded_layout(num_rows, width, input_ids.device) if layout is None else layout
    if position_ids is not None:
        given["position_ids"] = position_ids
    if attention_mask is not None:
        given["attention_mask"] = attention_mask
    return given


def output_head(lm: PreTrainedModel) -> nn.Module:
    head = lm.get_output_embeddings()
    assert head is not None, "a causal LM has an output head"
    return head


@contextmanager
def head_input(head: nn.Module) -> Iterator[list[torch.Tensor]]:
    """While active, `head` does nothing; the list holds its inputs: hidden states [B, T, D], one entry per call.

    So a model's own forward computes the hidden states exactly as they enter the head, whatever it does before.
    """
    seen: list[torch.Tensor] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden)
        return hidden[..., :1]  # stands for logits, of a vocabulary of one

    with head_forward(head, forward):
        yield seen


@contextmanager
def head_forward(head: nn.Module, forward: Any) -> Iterator[None]:
    """While active, calling `head` calls `forward`."""
    head.forward = forward
    try:
        yield
    finally:
        del head.forward


@functools.cache
def _parameters(model: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)
