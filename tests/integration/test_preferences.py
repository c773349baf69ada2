"""`leeway run dpo` as a user starts it: pairs of the quickstart's task from the example's script and config."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from leeway.config import load_config
from leeway.tasks.preferences import rejected_answer
from leeway.tasks.prompting import Prompter
from leeway.tasks.taskset import build_taskset

from .conftest import ROOT

STEPS = 40


def answer_logprob(model: Any, prompter: Prompter, prompt: Any, answer: str) -> float:
    """In float64 from the logits on, one answer at a time."""
    prompt_tokens, answer_tokens = prompter.encode_example(prompt, answer)
    with torch.no_grad():
        logits = model(torch.tensor([prompt_tokens + answer_tokens])).logits[0, len(prompt_tokens) - 1 : -1]
    logprobs = torch.log_softmax(logits.double(), -1)
    return logprobs.gather(-1, torch.tensor(answer_tokens)[:, None]).sum().item()


@pytest.mark.timeout(1000)
def test_dpo_widens_the_margin_of_pairs_that_it_never_saw(start: Any, warm: Path, tmp_path: Path) -> None:
    make_pairs = runpy.run_path(str(ROOT / "examples/preference_pairs.py"))["pairs"]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(line) + "\n" for line in make_pairs(6_000)))
    settings = [f"task.path={pairs}", f"model.path={warm}", f"train.steps={STEPS}", "eval.every=20"]
    settings += ["cluster.cpus_per_trainer=1"]  # another test runs beside it
    file = str(ROOT / "examples/dpo.yaml")
    run = start("dpo", *settings, "monitor.console=plain", config=file, name="run").wait(600)
    assert run.code == 0, run.output
    rows = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    margins = [row["train/preference/margin"] for row in rows if "train/preference/margin" in row]
    assert len(margins) == STEPS
    assert margins[0] == pytest.approx(0.0, abs=1e-4)
    assert sum(margins[-5:]) / 5 > 0.3
    measured = [row["eval/held_out/preference_margin"] for row in rows if "eval/held_out/preference_margin" in row]
    assert len(measured) == 3
    assert measured[0] == pytest.approx(0.0, abs=1e-4)
    assert measured[1] < measured[2], "it rises on"
    assert measured[1] > 0.1

    # The numbers are those of the weights that were left, by transformers alone.
    config = load_config(file, settings, recipe="dpo")
    held_out = build_taskset(config.task, seed=config.seed, split="eval", eval_config=config.eval).tasks
    prompter, saved = Prompter.load(str(warm)), run.dir / f"checkpoints/step-{STEPS:06d}/hf"
    before, after = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (warm, saved))
    own = []
    for task in held_out:
        sides: Any = (task.answer, rejected_answer(task, key="rejected"))
        gains = [answer_logprob(after, prompter, task.prompt, a) for a in sides]
        gains = [g - answer_logprob(before, prompter, task.prompt, a) for g, a in zip(gains, sides, strict=True)]
        own.append(config.algorithm.dpo.beta * (gains[0] - gains[1]))
    told = run.summary["eval"]["after"]
    assert told["preference_margin"] == pytest.approx(sum(own) / len(own), abs=1e-4)
    assert told["preference_accuracy"] == pytest.approx(sum(m > 0 for m in own) / len(own), abs=1e-9)
    assert told["preference_accuracy"] > 0.7
