"""The last layer computes what something is predicted from, and whatever it leaves out changes no number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from leeway.trainer import microbatch as microbatches
from leeway.trainer.families import find_model, load_model
from leeway.trainer.last_layer import PARTS
from leeway.trainer.linear import num_rows
from leeway.trainer.microbatch import Microbatch, split_into_microbatches
from leeway.trainer.scoring import ScoringModel, score_microbatch
from leeway.trainer.sharding import checkpoint_activations, decoder_layers
from leeway.types import Trajectory, batch_trajectories

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
PROMPT = 20


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    def build(name: str = "qwen2", **options: Any) -> str:
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **(SIZES | {"initializer_range": 0.3} | options))
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        return str(folder)

    return build


def microbatch(*, number: int = 3, few_lengths: bool = False) -> Microbatch:
    """Groups of two answers of three and two tokens to a prompt of twenty."""
    tokens = torch.randint(1, 64, (number, PROMPT), generator=torch.Generator().manual_seed(2)).tolist()
    answers = ([7, 8, 9], [11, 12])
    trajectories = [
        Trajectory(
            prompt_tokens=prompt,
            response_tokens=answer,
            loss_mask=[True] * len(answer),
            behavior_logprobs=[-1.0] * len(answer),
            policy_versions=[0] * len(answer),
            reward=0.0,
            finish_reason="stop",
            text="",
        )
        for prompt in tokens
        for answer in answers
    ]
    batch = batch_trajectories(trajectories, [0.0] * len(trajectories), num_sequences=1, num_tokens=1)
    [found] = split_into_microbatches(batch, max_tokens=10_000, few_lengths=few_lengths)
    return found


@contextmanager
def rows_of_parts(lm: PreTrainedModel) -> Iterator[dict[str, list[int]]]:
    """How many rows each part of each layer computes."""
    seen: dict[str, list[int]] = {name: [] for name in PARTS}
    originals = []
    for layer in decoder_layers(lm):
        for name in PARTS:
            part = layer.get_submodule(name)
            kind = type(part)

            def forward(self: nn.Module, x: torch.Tensor, *, _name: str = name, _kind: Any = kind) -> torch.Tensor:
                seen[_name].append(x.shape[:-1].numel())
                return _kind.forward(self, x)

            originals.append((part, kind))
            part.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    try:
        yield seen
    finally:
        for part, kind in originals:
            part.__class__ = kind


def scored(model: ScoringModel, piece: Microbatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logprobs, _ = score_microbatch(model, piece)
    (logprobs * torch.arange(1, len(logprobs) + 1)).sum().backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def whole(piece: Microbatch) -> Microbatch:
    assert piece.layout is not None
    return replace(piece, layout=replace(piece.layout, needed=None))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_last_layer_alone_leaves_out_what_nothing_is_predicted_from(save, checkpointed: bool) -> None:
    model, piece = load_model(save()), microbatch()
    for layer in decoder_layers(model.lm) if checkpointed else ():
        checkpoint_activations(layer)
    assert piece.layout is not None
    assert piece.layout.needed is not None
    # Of each prompt the last token, and all of an answer but its last one.
    assert piece.layout.needed.tolist() == sorted(set(piece.logit_positions.tolist()))
    assert len(piece.layout.needed) == 3 * (1 + 2 + 1)
    with rows_of_parts(model.lm) as seen:
        logprobs, gradients = scored(model, piece)
    length, needed = piece.input_ids.numel(), len(piece.layout.needed)
    forward = [length, length, needed]
    for name, rows in seen.items():  # what is computed again begins at the last layer
        assert rows == (forward + forward[::-1] if checkpointed else forward), name
    expected, its = scored(model, whole(piece))
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)
    assert gradients.keys() == its.keys()
    for name, gradient in its.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_a_microbatch_of_few_lengths_asks_for_a_number_of_rows_that_has_its_kernel() -> None:
    piece = microbatch(number=65, few_lengths=True)
    assert piece.layout is not None
    assert piece.layout.needed is not None
    needed = piece.layout.needed.tolist()
    assert len(needed) == num_rows(260) > 260, "filled up with others"
    assert needed == sorted(set(needed))
    assert set(piece.logit_positions.tolist()) < set(needed)


def test_where_most_is_needed_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatches, "MOST_NEEDED", 0.05)
    piece = microbatch()
    assert piece.layout is not None
    assert piece.layout.needed is None


def test_a_single_row_is_never_multiplied_alone() -> None:
    piece = microbatch(number=1)
    one = microbatches._needed(piece.logit_positions[:1], 20, few=False)
    assert one is not None
    assert len(one) == 2
    assert int(piece.logit_positions[0]) in one.tolist()


def test_a_layer_whose_parts_mix_tokens_is_computed_whole(save, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    own = Qwen2MLP.forward

    def depends_on_its_place(self: Any, x: torch.Tensor) -> torch.Tensor:
        return own(self, x) * (1 + torch.arange(x.shape[-2])[:, None] % 2)

    path = save()
    assert find_model(path, device=torch.device("cpu")).skips_unneeded
    monkeypatch.setattr(Qwen2MLP, "forward", depends_on_its_place)
    # Alone, and packed behind others, it is at other places: no way is exact but padded rows.
    found = find_model(path, device=torch.device("cpu"))
    assert not found.skips_unneeded


def test_a_part_that_gives_more_than_rows_leaves_the_layer_whole_and_packed(
    save, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    own = Qwen2MLP.forward

    class Both(tuple):
        def __radd__(self, other: torch.Tensor) -> torch.Tensor:
            return other + self[0]

    monkeypatch.setattr(Qwen2MLP, "forward", lambda self, x: Both((own(self, x), "its router's choice")))
    path = save()
    found = find_model(path, device=torch.device("cpu"))
    assert not found.skips_unneeded
    assert found.lm.config._attn_implementation == "leeway_packed", "rows are packed all the same"


def test_a_layer_whose_gradient_tokens_that_are_left_out_would_spoil_is_computed_whole(
    save, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    own = Qwen3RMSNorm.forward

    def without_epsilon(self: Any, x: torch.Tensor) -> torch.Tensor:  # of queries and keys: 0 / 0 for zeros
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt() if x.dim() == 4 else own(self, x)

    path = save("qwen3", head_dim=8, pad_token_id=None)
    assert find_model(path, device=torch.device("cpu")).skips_unneeded
    monkeypatch.setattr(Qwen3RMSNorm, "forward", without_epsilon)
    found = find_model(path, device=torch.device("cpu"))
    assert not found.skips_unneeded
    assert found.lm.config._attn_implementation == "leeway_packed"


def test_a_compiled_layer_is_computed_whole(save, monkeypatch: pytest.MonkeyPatch) -> None:
    model, piece = load_model(save()), microbatch()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with rows_of_parts(model.lm) as seen:
        scored(model, piece)
    assert seen["mlp"] == [piece.input_ids.numel()] * len(decoder_layers(model.lm))
