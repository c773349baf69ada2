"""A user's own environment, and real text from a file; one run is ended by a user's mistake, one by an interrupt."""

from __future__ import annotations

import importlib
import json
import re
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from .conftest import ANY_ENGINE, FEW_STEPS, command_line

GSM8K = Path(__file__).resolve().parents[3] / "shared/data/gsm8k/train.jsonl"

MY_ENV = '''
import asyncio
from pathlib import Path
from helper_of_mine import bonus
from leeway import Environment, Task, Trajectory

class ShortAnswers(Environment):
    """Pays for short answers; asks in a way of its own. Breaks when the policy has made three steps."""
    async def rollout(self, task: Task, policy) -> list[Trajectory]:
        prompt = policy.encode(task.prompt)
        completions = await policy.generate(prompt)
        while not Path("GO").exists():
            await asyncio.sleep(0.05)
        if completions[0].policy_versions[0] >= 3:
            raise KeyError("my own mistake")
        return [Trajectory.from_completion(prompt, c, reward=bonus(len(c.tokens)),
                                           metrics={"short": float(len(c.tokens) < 4)}) for c in completions]
'''


@pytest.mark.timeout(1000)
def test_an_environment_of_the_users_own_trains_on_two_ranks_watched_and_what_it_raises_ends_the_run_as_its_reason(
    start: Any, from_untrained: list[str], of_sums: list[str], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    (tmp_path / "envs_of_mine.py").write_text(MY_ENV.replace("GO", str(go)))
    (tmp_path / "helper_of_mine.py").write_text("def bonus(n):\n    return 1.0 / n\n")
    command = start(
        "async_rl",
        *from_untrained,
        *of_sums,
        ANY_ENGINE,
        "env.name=envs_of_mine:ShortAnswers",
        "train.num_ranks=2",
        "rollout.retries=0",
        "stages.async_rl.train.groups_per_step=4",
        "eval.at_start=false",
        "eval.at_end=false",
        "--watch",
    )
    command.wait_for("leeway: watch: http", 400)
    live = state_on_page(command.output(), within_s=400)
    go.touch()
    assert live == "live"
    run = command.wait(600)
    assert run.code == 1, run.output
    assert "my own mistake" in run.last_line()
    lengths, rewards = run.series("train/response_tokens/mean"), run.series("train/reward/mean")
    assert len(run.series("train/accuracy/short")) == len(rewards) >= 3
    assert all(1 / 8 <= r <= 1.0 for r in rewards)
    assert all(r >= 1 / n - 1e-6 for r, n in zip(rewards, lengths, strict=True)), "mean of 1/n is at least 1/mean"
    assert command.left_over(grace_s=120) == [], "the page has ended too"


def state_on_page(output: str, *, within_s: float) -> str:
    """What the page that `--watch` has started says of the run, once it says that it has begun."""
    found = re.search(r"leeway: watch: (http://\S+)", output)
    assert found is not None
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    opener.open(found[1], timeout=within_s).read()
    deadline = time.monotonic() + within_s
    while True:
        with opener.open(f"{found[1].partition('?')[0]}api/overview", timeout=within_s) as answer:
            (overview,) = json.load(answer)
        if overview["state"] != "waiting" or time.monotonic() > deadline:
            return overview["state"]
        time.sleep(0.2)


def hub_folder_of_gsm8k(folder: Path) -> Path:
    """As a download leaves it: two subsets of two splits, parquet. Of `main` the real rows, or where they are not at
    hand rows that are written the same way; of `socratic` none that anybody could train on.
    """
    pa, pq = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    rows = rows_like_gsm8k() if not GSM8K.exists() else [json.loads(line) for line in GSM8K.read_text().splitlines()]
    main = {"train": rows[:200], "test": rows[200:208]}
    none = {split: [{"question": "", "answer": "none"}] for split in main}
    for subset, files in (("main", main), ("socratic", none)):
        (folder / subset).mkdir(parents=True)
        for split, own in files.items():
            pq.write_table(pa.Table.from_pylist(own), folder / subset / f"{split}-00000-of-00001.parquet")
    return folder


def rows_like_gsm8k() -> list[dict[str, str]]:
    return [
        {
            "question": f"Mia has {a} red marbles, and {b} more blue than red ones. How many are blue?",
            "answer": f"There are {a} + {b} = <<{a}+{b}={a + b}>>{a + b} blue marbles.\n#### {a + b}",
        }
        for a in range(2, 24)
        for b in range(3, 13)
    ]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long("takes the same way as SIGINT")),
    ],
)
def test_gsm8k_rows_with_two_generators_until_an_interrupt_that_saves_a_checkpoint_and_leaves_nothing(
    start: Any, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """From nothing, and all promises of asynchronous running with the other engine, which needs no vLLM."""
    gsm8k = hub_folder_of_gsm8k(tmp_path / "gsm8k")
    command = start(
        "async_rl",
        ANY_ENGINE,
        "rollout.engine.max_num_seqs=24",  # fewer than are asked for at a time
        "task.name=hf",
        "task.dataset=null",
        "task.options={}",
        f"task.path={gsm8k}",
        "task.subset=main",
        f"eval.tasksets={{test: {{name: hf, path: {gsm8k}, subset: main, split: test}}}}",
        "task.answer_after='####'",
        "env.rewards={math_verify: 1, length: 1}",  # nothing of this is learned in a minute but to stop
        "model.init.options.max_position_embeddings=512",
        "rollout.max_prompt_tokens=320",
        "rollout.max_response_tokens=24",
        "rollout.max_model_len=512",
        "rollout.num_generators=2",
        "staleness.in_flight=recompute",
        *FEW_STEPS,
        "stages.sft=null",
        "stages.async_rl.train.groups_per_step=4",
        "stages.async_rl.train.skip_zero_advantage=false",  # or a first step of equal rewards measures no gap
        "stages.async_rl.optimizer.warmup_steps=0",
        "eval.tasksets.test.num_tasks=8",
        "monitor.console=plain",
    )
    rows = command.wait_for_steps(5, timeout_s=600)
    processes = command.processes()
    generators = [p for p in processes if "CollectorActor" in command_line(p)]
    assert len(generators) == 2
    loaded = {Path(m.path).name for p in generators for m in p.memory_maps() if "vllm" in m.path}
    assert not {name for name in loaded if not name.startswith("_C")}, "of vLLM it loads kernels alone"
    assert not [p for p in processes if "EngineCore" in command_line(p)]
    command.process.send_signal(number)
    run = command.wait(300)
    assert run.code == code, run.output
    assert run.summary["status"] == "interrupted"
    sequences, gaps = run.series("train/sequences"), run.series("param_server/served_gap/max")
    assert len(run.metrics()) >= len(rows)
    assert sequences == [32.0] * len(sequences)
    assert gaps, "the canary was scored"
    assert all(gap <= 1e-4 for gap in gaps)  # 0 where both sides compute with the same operations
    assert 0 < max(run.series("train/logprob_gap/max")) <= 1e-4
    assert run.series("eval/test/reward"), "the split test of the same folder was answered before the first step"

    # Asynchronous, within the bound, nothing dropped and nothing twice.
    assert 0 < max(run.series("train/policy_lag/max")) <= run.lag_bound
    assert run.series("replay/dropped_stale")[-1] == 0
    # The interrupt may have come between the last step's own row and the buffer's.
    assert run.series("replay/groups_taken")[-1] >= 4 * (len(sequences) - 1)
    trained = [json.loads(line) for f in run.dir.glob("stages/async_rl/rollouts/*.jsonl") for line in f.open()]
    assert len({(r["group_id"], r["sequence_id"]) for r in trained}) == len(trained) > 0
    assert len({v for r in trained for v in r["policy_versions"]}) >= 3

    checkpoints = run.dir / "stages/async_rl/checkpoints"
    latest = json.loads((checkpoints / "latest.json").read_text())
    assert latest["step"] >= 5
    assert (checkpoints / latest["path"] / "hf/model.safetensors").exists()
    assert command.left_over(grace_s=120) == []
