"""An engine of two processes on a CPU: each loads its part of the weights, proves it, and is missed when it dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from leeway.collector.engine import EngineLost
from leeway.weights import WeightSyncError

from ..engine_contract import TOLERANCE, _in_flight
from .conftest import command_line
from .test_engine import MLP, UP, VLLM_OPTIONS, ServedByVllm, sabotaged

pytestmark = [pytest.mark.timeout(300), pytest.mark.long("an engine of several processes")]

OTHERS = set[int]()
"""What this process had started before the engine, such as its fork server."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedByVllm]:
    OTHERS.update(child.pid for child in psutil.Process().children(recursive=True))
    options = {**VLLM_OPTIONS, "tensor_parallel_size": 2}
    with sabotaged(tmp_path_factory.mktemp("model"), options=options, cores=[0, 1]) as served:
        served.recover()
        yield served


def test_tokens_in_flight_through_three_syncs_are_exact_for_their_own_version(served: ServedByVllm) -> None:
    most, before, after = _in_flight(served, "recompute", temperature=1.0)
    assert most >= 3, "no completion lived through the updates"
    assert 0 < max(before, after) <= TOLERANCE


@pytest.mark.parametrize(
    ("fault", "module", "index", "bit", "check", "names"),
    [
        ("flip", "model.embed_tokens", 3, 30, "load", "rank 1: .*embed_tokens"),
        ("flip", "lm_head", 77, 0, "load", "rank 1: .*lm_head"),
        ("flip", "model.norm", 9, 31, "load", r"rank 1: .*model\.norm"),
        ("flip", "model.layers.0.self_attn.qkv_proj", 1000, 26, "load", r"rank 1: .*model\.layers\.0"),
        ("flip", "model.layers.1.self_attn.o_proj", 100, 0, "load", r"rank 1: .*model\.layers\.1"),
        ("flip", "model.layers.0.mlp.gate_up_proj", 3000, 10, "load", r"rank 1: .*model\.layers\.0"),
        ("half", "model.layers.1.mlp.down_proj", 0, 0, "load", r"rank 1: .*model\.layers\.1"),
        ("swap", f"{MLP} {UP}", 0, 0, "compute", "scored prompts"),
    ],
)
def test_a_fault_in_one_ranks_part_is_refused_by_name(
    served: ServedByVllm, fault: str, module: str, index: int, bit: int, check: str, names: str
) -> None:
    served.rpc("arm", fault, module, index, bit, 1)
    with pytest.raises(WeightSyncError, match=names) as refused:
        served.give(*served.publisher.next())
    served.rpc("disarm")
    assert refused.value.check == check
    served.recover()


def test_the_death_of_one_rank_ends_the_engine_by_name_and_leaves_no_process(served: ServedByVllm) -> None:
    """Last, because nothing is served after it."""
    processes = [psutil.Process(pid) for pid in served.engine.process_ids() if pid not in OTHERS]
    assert len(processes) >= 3

    async def dies() -> None:
        asking = asyncio.ensure_future(
            served.engine.generate([5] * 8, n=8, temperature=1.0, max_tokens=200, stop_token_ids=[])
        )
        await asyncio.sleep(0.1)
        pids: list[Any] = await served.engine._llm.collective_rpc("process_id")
        os.kill(pids[1], 9)
        with pytest.raises(EngineLost, match="the inference engine died"):
            await asking

    served.run(dies())
    trackers = [p for p in processes if "resource_tracker" in command_line(p)]
    _, left = psutil.wait_procs([p for p in processes if p not in trackers], timeout=30)
    assert not left, [command_line(p) for p in left]
