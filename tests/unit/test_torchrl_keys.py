"""A batch under torchrl's keys is what torchrl's loss takes, sequence by sequence of different lengths."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss
from transformers import AutoModelForCausalLM, AutoTokenizer

from leeway.collector.torchrl_keys import batch_under_torchrl_keys
from leeway.types import Trajectory, batch_trajectories

ADVANTAGES = [1.0, -0.5, 0.25, -2.0, 0.75]


@pytest.mark.slow
def test_the_gradient_of_torchrls_loss_is_that_of_each_conversation_alone(model_path: Path) -> None:
    """On policy: minus the advantage times the gradient of a sampled token's log-probability, in the mean of tokens.
    Whatever pads or cuts at the wrong end changes it. One token in four was not sampled.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(model_path).eval()
    rng = random.Random(0)
    expected, num_tokens, trajectories = torch.zeros(()), 0, []
    for advantage in ADVANTAGES:
        prompt, response = ([rng.randrange(5, 50) for _ in range(rng.randint(1, 7))] for _ in range(2))
        mask = [t % 4 != 1 for t in range(len(response))]
        logprobs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        own = [logprobs[len(prompt) - 1 + t, token] for t, token in enumerate(response)]
        expected = expected - advantage * sum(p for p, m in zip(own, mask, strict=True) if m)
        num_tokens += sum(mask)
        trajectories.append(
            Trajectory(
                prompt_tokens=prompt,
                response_tokens=response,
                behavior_logprobs=[p.item() if m else 0.0 for p, m in zip(own, mask, strict=True)],
                policy_versions=[0 if m else -1 for m in mask],
                loss_mask=mask,
                reward=0.0,
                finish_reason="stop",
                text="",
            )
        )
    (expected / num_tokens).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    batch = batch_trajectories(trajectories, ADVANTAGES, num_sequences=len(ADVANTAGES), num_tokens=num_tokens)
    form: Any = {"input_mode": "tokens", "generate": False, "pad_output": True}
    actor = TransformersWrapper(model, tokenizer=AutoTokenizer.from_pretrained(model_path), **form)
    out = GRPOLoss(actor, clip_epsilon=0.2, entropy_bonus=False, masking_strategy="generic")(
        batch_under_torchrl_keys(batch)
    )
    out.loss_objective.backward()
    assert float(out.ESS) == pytest.approx(1.0, abs=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], atol=1e-5, rtol=1e-4)
