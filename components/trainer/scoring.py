"""A Hugging Face causal LM that answers one question: how likely is each of these tokens."""

from __future__ import annotations

import logging

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from .attention import NAME as PACKED
from .attention import is_packable
from .layout import Layout
from .logprobs import LogitTransform, token_logprobs

logger = logging.getLogger(__name__)

# Logits that are worth a third more arithmetic in the head to not have at once: 128 MiB in float32.
MANY_LOGITS = 1 << 25
# And how many there then are at once. GPUs need products of a size that keeps them busy: 256 MiB in bfloat16.
TILE_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 27}
CACHED_LOGITS = 1 << 18  # 1 MiB
# Stands for infinity where 0 times infinity would be nan.
LOWEST = -1e30


class ScoringModel(nn.Module):
    """Wraps a causal LM; the output head runs only on the positions asked for, `chunk_tokens` of them at a time.

    None: as many as `MANY_LOGITS` allows. The wrapper is the FSDP root, so that the head (tied or not) is gathered
    together with the embeddings whatever calls it.
    """

    def __init__(self, lm: PreTrainedModel, *, chunk_tokens: int | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.chunk_tokens = chunk_tokens

    @property
    def is_packed(self) -> bool:
        """Whether packed rows can be scored."""
        return self.lm.config._attn_implementation == PACKED

    def forward(
        self,
        input_ids: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor | None,
        temperature: float,
        *,
        position_ids: torch.Tensor | None = None,
        layout: Layout | None = None,
        entropy_gradient: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids [B, T], rows [S] into the flattened B * T positions -> (logprobs, entropy [S]), in nats, float32.

        With targets [S]: `logprobs` [S] of those. Without: of the whole vocabulary, [S, V]. `position_ids` and
        `layout`: see `Microbatch`; only a model that `is_packed` takes them. A gradient through the entropy keeps
        another [S, V] for the backward pass, so it is there only where asked for.
        """
        packed = {} if layout is None else {"position_ids": position_ids, "layout": layout}
        hidden = self.lm.base_model(input_ids=input_ids, use_cache=False, **packed).last_hidden_state
        hidden = hidden.flatten(0, 1)[rows]
        head = self.lm.get_output_embeddings()
        assert head is not None, "a causal LM has an output head"
        transform = LogitTransform.of(self.lm.config, temperature)
        # A head of an unknown kind is asked for all logits: its weights alone do not say what it does. And so is any
        # head where the entropy is to carry a gradient: that of the chunks has none.
        many, chunk = self._chunks(hidden.device)
        chunked = len(rows) > many and type(head) is nn.Linear and not entropy_gradient
        if targets is not None and chunked:
            return token_logprobs(hidden, head.weight, head.bias, targets, transform=transform, chunk=chunk)
        logprobs = torch.log_softmax(transform(head(hidden).float()), dim=-1)
        if entropy_gradient and torch.is_grad_enabled():
            entropy = entropy_of(logprobs)
        else:
            # A few rows at a time, which stay in a CPU's cache: passes over all at once cost as much as a layer.
            entropy = torch.cat([entropy_of(part) for part in logprobs.detach().split(_rows_in_cache(logprobs))])
        if targets is None:
            return logprobs, entropy
        # A sum over one element instead of a squeeze: FSDP hooks must not sit on a view.
        return logprobs.gather(-1, targets[:, None]).sum(-1), entropy

    def _chunks(self, device: torch.device) -> tuple[int, int]:
        """(how many tokens are scored at once, how many tokens' logits there are at a time if more are scored)."""
        if self.chunk_tokens is not None:
            return self.chunk_tokens, self.chunk_tokens
        vocab_size = self.lm.config.get_text_config().vocab_size
        return max(1, MANY_LOGITS // vocab_size), max(1, TILE_LOGITS[device.type] // vocab_size)


def entropy_of(logprobs: torch.Tensor) -> torch.Tensor:
    """Entropies [S] of distributions [S, V]; a token of probability 0 adds nothing, nor to the gradient."""
    return -(logprobs.exp() * logprobs.clamp(min=LOWEST)).sum(-1)


def _rows_in_cache(logprobs: torch.Tensor) -> int:
    """How many rows of [S, V] are handled at once where nothing is gained by handling all of them."""
    return max(1, CACHED_LOGITS // logprobs.shape[-1] if logprobs.device.type == "cpu" else len(logprobs))


def load_model(
    path: str, *, attn: str, packing: str = "auto", chunk_tokens: int | None = None, trust_remote_code: bool = False
) -> ScoringModel:
    """The model in float32 (master weights), in training mode with every dropout off.

    `packing`: see `TrainerSettings`. What cannot be packed is padded. `chunk_tokens`: no more logits at a time than
    those of so many tokens; None: `MANY_LOGITS`.
    """
    lm = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=attn, trust_remote_code=trust_remote_code, low_cpu_mem_usage=True
    )
    # The engine has no dropout, and both must agree on every token. Some models keep a rate beside nn.Dropout modules.
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(rate := getattr(module, "attention_dropout", None), float) and rate:
            module.attention_dropout = 0.0  # type: ignore[assignment]  # torch's stub knows tensors and modules only
    lm.config.attention_dropout = 0.0
    if packing != "padded" and attn == "sdpa":
        if is_packable(lm):
            lm.set_attn_implementation(PACKED)
        else:
            logger.warning("%s mixes tokens in ways that packing does not know: batches are padded", type(lm).__name__)
    return ScoringModel(lm, chunk_tokens=chunk_tokens).train()  # gradient checkpointing works in training mode only
