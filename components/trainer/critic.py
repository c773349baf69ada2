"""The critic: a value function with its own weights and optimizer, sharded like the policy.

    values(passes) -> the value of each state         forward_backward(passes, ...) -> optim_step()

The body of any Hugging Face causal LM, and a head that maps each hidden state to one number. The head is initialized
to zero: the first values are 0, so the first advantages are the rewards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ..algorithms.critic import value_loss, value_sums
from .families import find_model
from .layout import Layout
from .microbatch import Microbatch
from .offload import Offload
from .optimizer import Stepper, embedding_ids, make_optimizer
from .pretrained import ModelRefusedError
from .scoring import is_packed, pass_arguments
from .sharding import reshard, shard

if TYPE_CHECKING:
    from .settings import TrainerSettings

NUM_SUMS = 8
"""The value loss, then `value_sums`."""


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The critic's estimates for a rank's share of a step: [S] each, on the CPU.

    `values` under the weights that took the batch, `returns` as their targets, `advantages` for the policy.
    """

    values: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor


class ValueModel(nn.Module):
    """The body of a causal LM under a linear head; the FSDP root. `masks`, and no training mode: see `ScoringModel`."""

    def __init__(self, body: PreTrainedModel, hidden_size: int, *, masks: bool = False) -> None:
        super().__init__()
        self.lm = body
        self.masks = masks
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.eval()

    def train(self, mode: bool = True) -> ValueModel:
        return super().train(False)

    @property
    def is_packed(self) -> bool:
        return is_packed(self.lm)

    def forward(
        self,
        input_ids: torch.Tensor,
        rows: torch.Tensor,
        *,
        position_ids: torch.Tensor | None = None,
        layout: Layout | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids [B, T], rows [S] into the flattened B * T positions -> values [S] of the states there, float32."""
        given = pass_arguments(self.lm, input_ids, position_ids, layout, attention_mask if self.masks else None)
        hidden = self.lm(**given).last_hidden_state.flatten(0, 1).index_select(0, rows)
        # In float32 whatever the body computes in: bfloat16 resolves rewards between 0 and 1 to two digits only.
        values = nn.functional.linear(hidden.float(), self.head.weight.float(), self.head.bias.float())
        return values.sum(-1)  # over one element: FSDP hooks must not sit on a view


class Critic:
    """One rank's part of it. Every method that takes passes is a collective: all ranks give equally many."""

    def __init__(
        self,
        path: str,
        settings: TrainerSettings,
        mesh: DeviceMesh,
        *,
        device: torch.device,
    ) -> None:
        """`path`: a causal LM with the policy's vocabulary; only its body is used."""
        critic, train = settings.critic, settings.train
        assert critic is not None
        optimizer = critic.optimizer_of(settings.optimizer)
        self._value_clip = critic.value_clip
        found = find_model(
            path,
            attn=settings.model.attn,
            packing=train.packing,
            max_length=settings.max_length,
            device=device,
            mesh=mesh,
            cpu_offload=train.cpu_offload,
        )
        head = found.lm.get_output_embeddings()
        assert isinstance(head, nn.Linear), "a causal LM has an output head"
        body = found.lm.base_model
        if body is found.lm or not isinstance(body, PreTrainedModel):
            raise ModelRefusedError(
                f"critic.path: got a {type(found.lm).__name__}, expected a model whose body can be run without its "
                "output head; use another model"
            )
        prefix = next(name for name, module in found.lm.named_modules() if module is body) + "."
        of_body = {name.removeprefix(prefix): rows for name, rows in found.weights.items() if name.startswith(prefix)}
        model = ValueModel(body, head.in_features, masks=found.masks)
        model.head.to("cpu" if train.cpu_offload else device)
        self.model: ValueModel = shard(
            cast(Any, model),  # any module around an `lm`
            mesh,
            weights=of_body,
            compute_dtype=settings.dtype,
            gradient_checkpointing=train.gradient_checkpointing,
            cpu_offload=train.cpu_offload,
            forward_prefetch=train.forward_prefetch,
            units=train.fsdp_units,
        )  # type: ignore[assignment]
        # No matrix between hidden states either: the head, which makes one number of each.
        outside = embedding_ids(self.model) | {id(self.model.head.weight)}
        self.optimizer = make_optimizer(self.model.parameters(), optimizer, embeddings=outside)
        self._stepper = Stepper(
            self.optimizer,
            optimizer,
            total_steps=settings.total_steps,
            lr_key="critic.lr",
            norm_name="the critic's gradient norm",
            moments=Offload([], [self.optimizer], device) if train.cpu_offload_optimizer else None,
        )
        self._num_ranks = mesh.size()

    @torch.no_grad()
    def values(self, passes: Iterable[Microbatch], count: int) -> torch.Tensor:
        """Values [S], S = `count`, of the states before each response token of a rank's share, on the CPU."""
        values = torch.zeros(count)
        for microbatch in passes:
            values[microbatch.batch_positions.cpu()] = self._run(microbatch).cpu()
        return values

    def forward_backward(self, passes: Iterable[Microbatch], estimates: Estimates, *, num_tokens: int) -> torch.Tensor:
        """Add this step's gradient; returns sums [NUM_SUMS] over this rank's tokens, see `value_sums`.

        The loss is the mean of `value_loss` over the `num_tokens` sampled tokens of the whole step.
        """
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64)
        clip = self._value_clip
        for microbatch in passes:
            values, places = self._run(microbatch), microbatch.batch_positions.cpu()
            old, returns = (x[places].to(values.device) for x in (estimates.values, estimates.returns))
            per_token = value_loss(values, old, returns, clip=clip)
            loss = torch.where(microbatch.mask, per_token, 0.0).sum() / num_tokens
            # FSDP averages gradients over ranks; the parts must add up.
            (loss * self._num_ranks).backward()
            own = value_sums(values, old, returns, microbatch.mask, clip=clip)
            sums += torch.cat([loss.detach().double()[None], own]).cpu()
        return sums

    def optim_step(self, step: int) -> dict[str, float]:
        """One optimizer step, the `step`-th; empty if the critic's own gradient is not finite (`Stepper`)."""
        reshard(self.model)
        own = self._stepper.step(step)
        return {
            "train/value/grad_norm": own["train/grad_norm"],
            "train/value/lr": own["train/lr"],
            "train/value/skipped_steps": own["train/skipped_steps"],
        }

    def forget_gradient(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _run(self, microbatch: Microbatch) -> torch.Tensor:
        return self.model(
            microbatch.input_ids,
            microbatch.logit_positions,
            position_ids=microbatch.position_ids,
            layout=microbatch.layout,
            attention_mask=microbatch.attention_mask,
        )
