"""Two machines that are namespaces of this one, and a cable between them that can be cut: benchmarks/namespaces.py."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ..transport_contract import version

ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks/namespaces.py")))
A, B = "10.77.0.1", "10.77.0.2"
ONE_END = """
import asyncio, pickle, sys
from leeway.transports.broadcast import Broadcast
from tests.transport_contract import received, send
def write(value): print(pickle.dumps(value).hex(), flush=True)
end = Broadcast(host=sys.argv[1], timeout_s=600.0, keep=2)
async def fetched(given):
    async with asyncio.timeout(3):
        return [bucket.tobytes() for bucket in await received(end, given)]
for line in sys.stdin:
    verb, given = pickle.loads(bytes.fromhex(line))
    try:
        write(send(end, given) if verb == "send" else asyncio.run(fetched(given)))
    except Exception as error:
        write(error)
"""


class End:
    """Of a broadcast, on one of the machines."""

    def __init__(self, machine: Any) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
        self.process = machine.popen(
            [sys.executable, "-c", ONE_END, machine.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )

    def does(self, verb: str, given: Any) -> Any:
        self.process.stdin.write(pickle.dumps((verb, given)).hex().encode() + b"\n")
        self.process.stdin.flush()
        return pickle.loads(bytes.fromhex(self.process.stdout.readline().decode()))


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Any]:
    if (why := NAMESPACES.refusal()) is not None:
        pytest.skip(why)
    with contextlib.ExitStack() as held:
        a, b = (
            held.enter_context(contextlib.closing(NAMESPACES.Machine(name, address, folder=tmp_path / name)))
            for name, address in (("host-a", A), ("host-b", B))
        )
        cable = held.enter_context(contextlib.closing(NAMESPACES.Cable(a, b)))
        yield SimpleNamespace(a=a, b=b, cable=cable)


def test_weights_cross_a_link_that_is_cut_and_mended(machines: Any) -> None:
    """What is asked for while it is cut ends by the asker's deadline; what is asked for then takes a new connection."""
    sends, fetches = End(machines.a), End(machines.b)
    whole = [bucket.tobytes() for bucket in version(1)[1]]
    publication = sends.does("send", 1)
    assert fetches.does("fetch", publication) == whole
    machines.cable.cut()
    assert isinstance(fetches.does("fetch", publication), TimeoutError)
    assert isinstance(fetches.does("fetch", publication), TimeoutError), "nor is there a new one"
    machines.cable.mend()
    assert fetches.does("fetch", publication) == whole


@pytest.mark.long("two machines with a Ray of their own, twice: minutes")
def test_a_run_outlives_its_other_machine_which_joins_again(tmp_path: Path) -> None:
    """An environment that lies on one machine, no disk that both share; then the other machine's Ray is killed."""
    if (why := NAMESPACES.refusal()) is not None:
        pytest.skip(why)
    cells = ["plain:broadcast", "kill:object_store"]
    command = [sys.executable, "benchmarks/hosts.py", f"--out={tmp_path}", "--cells", *cells]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    plain, kill = (json.loads((tmp_path / "hosts.json").read_text())[cell] for cell in cells)
    assert (plain["code"], plain["steps"]) == (0, 8), plain
    assert {*plain["hosts"].values()} == {A, B}, plain
    assert (kill["code"], kill["steps"]) == (0, 150), kill
    assert kill["restarts"] >= 1, kill
    assert max(plain["max_policy_lag"], kill["max_policy_lag"]) <= 2
    assert plain["left_on_b"] == kill["left_on_b"] == 0
