"""A Hugging Face causal LM that answers one question: how likely is each of these tokens."""

from __future__ import annotations

import logging

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from .attention import NAME as PACKED
from .attention import is_packable
from .layout import Layout

logger = logging.getLogger(__name__)


class ScoringModel(nn.Module):
    """Wraps a causal LM; the output head runs only on the positions asked for, never on whole padded sequences.

    It is the FSDP root, so that the head (tied or not) is gathered together with the embeddings whatever calls it.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

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
        head = self.lm.get_output_embeddings()
        assert head is not None, "a causal LM has an output head"
        logits = head(hidden.flatten(0, 1)[rows])
        logits = final_transform(logits.float(), self.lm.config) / temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        if targets is None:
            return logprobs, entropy
        # A sum over one element instead of a squeeze: FSDP hooks must not sit on a view.
        return logprobs.gather(-1, targets[:, None]).sum(-1), entropy


def final_transform(logits: torch.Tensor, config: object) -> torch.Tensor:
    """What some architectures do after the head: Gemma caps, Granite divides, Cohere multiplies."""
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    if divisor := getattr(config, "logits_scaling", None):
        logits = logits / divisor
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    return logits


def load_model(path: str, *, attn: str, packing: str = "auto", trust_remote_code: bool = False) -> ScoringModel:
    """The model in float32 (master weights), in training mode with every dropout off.

    `packing`: see `TrainerSettings`. What cannot be packed is padded.
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
    return ScoringModel(lm).train()  # gradient checkpointing works in training mode only
