"""Lag 0 is the reference: with a seed, the same weights to the last bit, however many generators there are, and
however often everything is killed on the way."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from leeway.monitor.trace import read_spans

from ..tiers import sample
from .conftest import DIGITS_LAST, command_line

TOLERANCE = 1e-4
STEPS = sample(6, 20)
HALF = STEPS // 2
SAVING = (f"checkpoint.every={HALF}", "checkpoint.resume=auto")
SAMPLED = (
    "eval.tasksets={sampled: {name: reasoning_gym, dataset: chain_sum, options: {min_terms: 2, max_terms: 2, "
    "min_digits: 2, max_digits: 2}, size: 200, num_tasks: 24, samples: 4, temperature: 1}}"
)
CORES = min(2, len(os.sched_getaffinity(0)))
"""On several, threads divide rows and sums among them, which must change nothing."""
TURNS = (
    "stages.async_rl.cluster.placement=turns",
    f"stages.async_rl.cluster.cpus_per_trainer={CORES}",
    f"stages.async_rl.cluster.cpus_per_generator={CORES}",
)
MINUTES = "a run for each number of generators and ranks"

pytestmark = pytest.mark.timeout(1000)


@pytest.fixture(
    scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.long("the same runs with the other engine"))]
)
def engine(request: pytest.FixtureRequest) -> str:
    """What does not end in both of them was not decided by the engine. `engine_contract` holds vLLM to its seeds."""
    return request.param


@pytest.fixture(scope="module")
def from_untrained(from_untrained: list[str], of_sums: list[str], engine: str) -> list[str]:
    return [*from_untrained, *of_sums, *DIGITS_LAST, f"rollout.engine.name={engine}"]


@pytest.fixture(scope="module")
def start_for_all(start_for_all: Any, engine: str) -> Any:
    return lambda *args, name: start_for_all(*args, name=f"{name}-{engine}")


def begin(start: Any, from_untrained: list[str], generators: int, ranks: int, *more: str, name: str) -> Any:
    return start(
        "async_rl",
        *from_untrained,
        f"stages.async_rl.train.steps={STEPS}",
        "stages.async_rl.train.groups_per_step=16",
        "stages.async_rl.optimizer.warmup_steps=0",
        "staleness.max_policy_lag=0",
        f"rollout.num_generators={generators}",
        f"train.num_ranks={ranks}",
        "eval.at_start=false",
        "eval.num_tasks=32",
        SAMPLED,
        *more,
        name=name,
    )


def weights_of(command: Any, generators: int, ranks: int, *, first_step: int = 1) -> tuple[str, Path]:
    """Hash and folder of the weights after the last step of a run that trained all from `first_step` on at lag 0.

    Before those there may be steps of a part that was killed, none of them twice.
    """
    run = command.wait(600)
    assert run.code == 0, run.output
    steps = [row["step"] for row in run.metrics() if "train/grad_norm" in row]
    own = [*range(first_step, STEPS + 1)]
    assert steps[-len(own) :] == own
    assert steps == sorted(set(steps))
    assert run.series("train/policy_lag/max") == [0.0] * len(steps)
    # Every token is of the trainer's own version, so both can be compared on all of them.
    gaps = run.series("train/logprob_gap/max")
    assert len(gaps) == len(steps)
    assert 0 < max(gaps) <= TOLERANCE
    assert len([role for role in run.summary["processes"] if role.startswith(("generator", "trainer"))]) == (
        generators + ranks
    )
    return run.summary["weights_sha256"], run.dir / f"stages/async_rl/checkpoints/step-{STEPS:06d}/hf"


def train(start: Any, from_untrained: list[str], generators: int, ranks: int) -> tuple[str, Path]:
    command = begin(start, from_untrained, generators, ranks, name=f"lockstep-{generators}-{ranks}")
    return weights_of(command, generators, ranks)


@pytest.fixture(scope="module")
def alone(start_for_all: Any, from_untrained: list[str]) -> tuple[str, Path]:
    """One generator, one rank, never disturbed; it records no spans, and those that it is compared with do."""
    command = begin(start_for_all, from_untrained, 1, 1, "log.spans=false", name="lockstep-1-1")
    return weights_of(command, 1, 1)


@pytest.fixture(scope="module")
def of_two_ranks(start_for_all: Any, from_untrained: list[str]) -> tuple[str, Path]:
    """Two generators, two ranks."""
    return train(start_for_all, from_untrained, 2, 2)


@pytest.fixture(scope="module")
def half_way(start_for_all: Any, from_untrained: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what one generator and one rank had saved when they were killed, half-way.

    The generator was killed before, and is another when the rest is killed.
    """
    command = begin(start_for_all, from_untrained, 1, 1, *SAVING, name="killed")
    command.wait_for_steps(1, timeout_s=240)
    (generator,) = [p for p in command.processes() if "CollectorActor" in command_line(p)]
    generator.kill()
    latest = command.run_dir / "stages/async_rl/checkpoints/latest.json"
    deadline = time.monotonic() + 600
    while not latest.exists():
        assert command.process.poll() is None, command.output()
        assert time.monotonic() < deadline, command.output()
        time.sleep(0.005)
    command.kill()
    assert command.left_over(grace_s=120) == []
    assert not (command.run_dir / "summary.json").exists()
    saved = json.loads(latest.read_text())
    assert saved["step"] == HALF
    assert "generator-0 serves again" in command.output()
    return shutil.copytree(latest.parent / saved["path"], tmp_path_factory.mktemp("saved") / saved["path"])


@pytest.mark.long(MINUTES)
def test_lockstep_gives_the_same_weights_with_one_or_two_generators(
    start: Any, from_untrained: list[str], alone: tuple[str, Path], of_two_ranks: tuple[str, Path]
) -> None:
    assert train(start, from_untrained, 2, 1)[0] == alone[0]
    assert train(start, from_untrained, 1, 2)[0] == of_two_ranks[0]


@pytest.mark.long(MINUTES)
def test_lockstep_gives_close_weights_with_two_generators_and_two_ranks(
    alone: tuple[str, Path], of_two_ranks: tuple[str, Path]
) -> None:
    assert largest_difference(alone[1], of_two_ranks[1]) <= 1e-5


def test_a_run_killed_half_way_goes_on_with_two_generators_to_the_weights_of_one_that_was_left_alone(
    start_for_all: Any, untrained: Path, from_untrained: list[str], alone: tuple[str, Path], half_way: Path
) -> None:
    """On the trainer's own cores, in turns with it: every batch is generated by engines that have slept."""
    command = begin(start_for_all, from_untrained, 2, 1, *SAVING, *TURNS, name="killed")
    assert weights_of(command, 2, 1, first_step=HALF + 1)[0] == alone[0]
    assert largest_difference(alone[1], untrained) > 0, "nothing was learned: equal hashes say little"


def test_a_trainer_that_begins_before_its_batch_is_whole_takes_the_same_steps_but_for_rounding(
    start: Any, untrained: Path, from_untrained: list[str], alone: tuple[str, Path]
) -> None:
    # Answers of a few tokens end together; a few groups at a time end one after the other.
    own = ("train.stream_groups=3", "rollout.max_groups_in_flight=4")
    command = begin(start, from_untrained, 1, 1, *own, name="in-parts")
    _, folder = weights_of(command, 1, 1)
    # Not each weight by itself: AdamW makes a whole step of a gradient that is nothing but rounding.
    assert distance(alone[1], folder) <= 2e-3 * distance(alone[1], untrained)
    processes = {part.name: part.spans for part in read_spans(command.run_dir) if part.stage == "async_rl"}
    parts = [s for s in processes["trainer-0"] if s.name == "forward_backward"]
    assert len(parts) > STEPS, "no step came in parts"
    taken = [g for s in processes["replay"] if s.name == "batch_taken" for g in s.attrs["groups"]]
    assert len(taken) == len({*taken}) == 16 * STEPS


def test_what_was_saved_gives_the_same_answers_as_the_last_version_did_in_the_run(
    start_for_all: Any, from_untrained: list[str], alone: tuple[str, Path]
) -> None:
    stage = alone[1].parents[2]
    summary = json.loads((stage.parents[1] / "summary.json").read_text())
    own = (f"model.path={alone[1]}", f"eval.checkpoints={stage}", "eval.num_tasks=32", SAMPLED)
    command = start_for_all("evaluate", *from_untrained, *own, name="again")
    run = command.wait(600)
    assert run.code == 0, run.output
    assert list(run.summary["checkpoints"]) == [str(STEPS)]
    after, again = summary["eval"]["after"], run.summary["eval"]
    assert again["sampled"] == after["tasksets"]["sampled"], "what is drawn depends on weights, seed and task alone"
    assert 0 < after["tasksets"]["sampled"]["reward"] < 1
    for name in ("reward", "response_tokens_mean"):
        assert again["held_out"][name] == after[name]


@pytest.mark.long(MINUTES)
def test_two_ranks_go_on_from_what_one_rank_saved(
    start: Any, from_untrained: list[str], alone: tuple[str, Path], half_way: Path
) -> None:
    command = begin(start, from_untrained, 1, 2, f"checkpoint.resume={half_way}", name="other-ranks")
    difference = largest_difference(weights_of(command, 1, 2, first_step=HALF + 1)[1], alone[1])
    print(f"two ranks, {STEPS - HALF} steps on from one rank's checkpoint: weights differ by {difference:.1e} at most")
    assert difference <= 1e-5


def distance(a: Path, b: Path) -> float:
    """Euclidean, between the weights of two folders."""
    from safetensors.torch import load_file

    first, second = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert first.keys() == second.keys()
    return sum(float((first[name] - second[name]).double().pow(2).sum()) for name in first) ** 0.5


def largest_difference(a: Path, b: Path) -> float:
    """Of a weight between two folders."""
    from safetensors.torch import load_file

    first, second = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)
