"""The benchmark beside TRL and torchrl: what it says of what it has measured."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from leeway.config import load_config
from leeway.tasks.evalsets import build_evalsets

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def peers() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import peers  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(BENCHMARKS))
    assert isinstance(peers, ModuleType)
    return peers


@pytest.fixture(scope="module")
def peer_workloads(peers: Any) -> Any:
    return sys.modules["peer_workloads"]


def row(system: str, step_s: float, **more: Any) -> dict[str, Any]:
    return {
        "workload": "short",
        "system": system,
        "learn": False,
        "step_s": step_s,
        "cpu_s": 2 * step_s,
        "tokens": 1000.0,
        "peak_gib": 1.0,
    } | more


def test_accuracy_is_read_by_the_name_that_runs_give_it(peers: Any, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f'{{"question": "{n}+1", "answer": "{n + 1}"}}\n' for n in range(40)))
    given = ["task.name=jsonl", f"task.path={file}", "task.dataset=null", "task.options={}"]
    (evalset,) = build_evalsets(load_config("quickstart", [*given, "task.holdout_frac=0.5"]))
    assert peers.accuracy_of({"step": 10, f"eval/{evalset.name}/exact_match": 0.5}) == 0.5
    assert peers.accuracy_of({"step": 10, "accuracy": 0.25}) == 0.25  # of the other systems
    assert peers.accuracy_of({"step": 10, "train/accuracy/exact_match": 0.5}) is None


def test_an_accuracy_is_reached_between_two_evaluations(peers: Any) -> None:
    points = [(10, 0.5), (20, 0.6), (30, 0.8)]
    assert peers.crossing(points, 0.7) == pytest.approx(25)
    assert peers.crossing(points, 0.4) == 10
    assert peers.crossing(points, 0.9) is None


def test_the_table_has_medians_over_rounds_and_says_who_is_faster(peers: Any) -> None:
    learned = row("bound2", 9.0, learn=True, curve=[[10, 0.5], [20, 1.0]], target=0.75)
    rows = [*(row("trl", s) for s in (1.0, 1.2, 5.0)), row("bound2", 0.6), row("bound2", 0.4), learned]
    lines = peers.table(rows).splitlines()[2:]
    assert lines[0].startswith("| short | trl | 3 | 1.20 (1.00 to 5.00) | 1.00 x | 2.40 | 833 |")
    assert lines[1].startswith(
        "| short | bound2 | 2 | 0.50 (0.40 to 0.60) | 2.40 x | 1.00 | 2,000 | 8 to 0.75 (15 steps)"
    )
    never = row("trl", 1.0, learn=True, curve=[[10, 0.6]], target=0.7)
    assert "not 0.70 in 10 steps (0.60)" in peers.table([*rows, never])


def test_of_several_seeds_the_table_says_what_all_of_them_took(peers: Any) -> None:
    never, late, soon = ([[10, a], [20, b]] for a, b in ((0.5, 0.6), (0.5, 0.8), (0.7, 0.9)))

    def said(*curves: list[list[float]]) -> str:
        learned = [row("hf", 9.0, learn=True, curve=curve, target=0.7) for curve in curves]
        return peers.table([row("hf", 0.5), *learned])

    assert "| 8 to 0.70 (17 steps, 3 seeds: 10, 17, never) |" in said(never, late, soon)
    assert "| not 0.70 in 20 steps (0.60, 3 seeds: 10, never, never) |" in said(never, soon, never)
    assert "| 5 to 0.70 (10 steps) |" in said(soon)


def test_all_are_compared_with_trl_in_its_faster_type(peers: Any) -> None:
    rows = [row("trl", 1.0), row("hf", 0.5), row("trl", 0.8, dtype="bfloat16"), row("hf", 0.4, dtype="bfloat16")]
    said = [[cell.strip() for cell in line.split("|")[2:6]] for line in peers.table(rows).splitlines()[2:]]
    assert [(cells[0], cells[3]) for cells in said] == [
        *(("trl", "0.80 x"), ("hf", "1.60 x")),
        *(("trl bfloat16", "1.00 x"), ("hf bfloat16", "2.00 x")),
    ]


@pytest.mark.parametrize("system", ["lockstep", "lockstep_hf", "bound1", "bound2", "bound4", "hf", "hf4"])
@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in ("short", "long", "even", "turns", "smollm2")),
        ("chat", "cuda"),
        ("thousand", "cuda"),
    ],
)
def test_every_workload_is_one_that_our_side_takes(
    peer_workloads: Any, name: str, device: str, system: str, tmp_path: Path
) -> None:
    workload = peer_workloads.WORKLOADS[name]
    files = {"tasks_file": tmp_path / "tasks.jsonl", "heldout_file": tmp_path / "heldout.jsonl"}
    own: dict[str, Any] = {"steps": 12, "every": 3 * bool(workload.target), "threads": 2}
    own |= {"dtype": "bfloat16", "device": device, "gpu_share": 0.4}
    given = peer_workloads.overrides(system, workload, tmp_path, files, tmp_path, "label", **own)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        config = load_config("smollm2_135m" if workload.model == "given" else "quickstart", given)
    finally:
        sys.path.remove(str(BENCHMARKS))
    assert config.train.steps == 12
    assert (config.model.dtype, config.model.head_dtype) == ("bfloat16", "float32")
    assert config.train.groups_per_step == workload.groups
    assert config.optimizer.lr == workload.lr
    assert config.rollout.engine_name == ("hf" if "hf" in system else "vllm")
    assert (config.rollout.temperature, config.task.answer_after) == (1.0, None)
    # What the other systems' prompts are made with (`task_files`).
    assert config.task.system_prompt == (peer_workloads.SYSTEM_PROMPT if workload.model == "given" else None)
    assert config.param_server.publish_every == 1, "whatever the bundled config has"
    assert config.staleness.max_policy_lag == {"lockstep": 0, "lockstep_hf": 0, "bound1": 1, "bound4": 4, "hf4": 4}.get(
        system, 2
    )
    shares = device == "cuda" or system.startswith("lockstep")  # there is one GPU
    assert config.cluster.placement == ("together" if shares else "separate")
    a_core_each = system.startswith("lockstep") and name in ("long", "even")
    assert config.rollout.num_generators == (2 if a_core_each else 1)
    in_parts = system.startswith("lockstep") and name == "turns"
    assert config.train.stream_groups == (8 if in_parts else None)
    assert (config.rollout.engine_options.places == 64) is in_parts
    # Engine `hf` has as many as it has by itself, whatever the bundled config says.
    assert "hf" not in system or in_parts or config.rollout.engine_options.places == 256
    assert config.cluster.device == device
    length = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    assert name not in ("chat", "thousand") or length <= config.rollout.max_model_len


def test_all_are_compared_with_trls_faster_engine(peers: Any) -> None:
    rows = [row(system, s) | {"workload": "chat"} for system, s in (("trl", 3.0), ("trl_vllm", 1.0), ("bound2", 0.5))]
    said = [[cell.strip() for cell in line.split("|")[2:6]] for line in peers.table(rows).splitlines()[2:]]
    assert [cells[3] for cells in said] == ["0.33 x", "1.00 x", "2.00 x"]


def test_what_ran_on_a_gpu_is_compared_with_what_ran_there(peers: Any) -> None:
    rows = [row("trl", 2.0), row("hf", 1.0), row("trl", 0.4, device="cuda"), row("hf", 0.1, device="cuda")]
    said = [[cell.strip() for cell in line.split("|")[1:6]] for line in peers.table(rows).splitlines()[2:]]
    assert [(cells[0], cells[1], cells[4]) for cells in said] == [
        *(("short", "trl", "1.00 x"), ("short", "hf", "2.00 x")),
        *(("short on a GPU", "trl", "1.00 x"), ("short on a GPU", "hf", "4.00 x")),
    ]


def test_what_ran_in_turns_is_compared_with_what_ran_in_turns(peers: Any) -> None:
    rows = [row("trl", 2.0), row("hf", 1.0), row("trl", 4.0, slices=10), row("hf", 1.0, slices=10)]
    said = [[cell.strip() for cell in line.split("|")[1:6]] for line in peers.table(rows).splitlines()[2:]]
    assert [(cells[0], cells[4]) for cells in said] == [
        *(("short", "1.00 x"), ("short", "2.00 x")),
        *(("short, in turns", "1.00 x"), ("short, in turns", "4.00 x")),
    ]


def test_trl_with_vllm_is_for_a_gpu(
    peers: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers.py"])
    assert "trl_vllm" not in peers.parse().systems
    monkeypatch.setattr(sys, "argv", ["peers.py", "--device", "cuda"])
    assert "trl_vllm" in peers.parse().systems
    monkeypatch.setattr(sys, "argv", ["peers.py", "--systems", "trl_vllm:bfloat16"])
    with pytest.raises(SystemExit):
        peers.parse()
    assert "got trl_vllm, which needs a GPU; add --device cuda" in capsys.readouterr().err


def test_trl_on_a_gpu_trains_on_all_answers_in_equal_parts(peers: Any) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import peer_loops  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(BENCHMARKS))
    for size, length in ((512, 128), (128, 1104), (96, 400), (8, 100_000)):
        passes = peer_loops.num_passes(size, length)
        assert size % passes == 0
        assert passes == size or size // passes * length <= 32_768


def test_a_round_has_each_system_in_its_own_type_or_in_all(peers: Any) -> None:
    assert peers.in_turns(["trl:float32", "hf4"], ["float32", "bfloat16"]) == [
        *[("trl", "float32"), ("hf4", "float32"), ("hf4", "bfloat16")],
    ]


def test_each_line_that_a_run_writes_is_read_once(peers: Any, tmp_path: Path) -> None:
    lines = tmp_path / "steps.jsonl"
    written = peers.Written(lines)
    assert written.step() == 0
    lines.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert written.step() == 2
    with lines.open("a") as file:
        file.write('ep": 3}\n')
    assert written.step() == 3
    lines.write_text("x" * len(lines.read_text()) + '{"step": 5}\n')  # what was read is not looked at again
    assert written.step() == 5


def test_every_run_has_a_name_of_its_own_that_a_run_may_have(peers: Any, tmp_path: Path) -> None:
    fast = "bound2+param_server.transport=ipc+rollout.engine.max_num_seqs=512+rollout.engine.kv_cache_memory_bytes=1e10"
    asked = ["bound2", fast, fast.replace("512", "256")]
    labels = [peers.label_of("thousand", system, "bfloat16", learn=True, seed=0) for system in asked]
    assert len(set(labels)) == 3
    for label in labels:
        assert load_config("quickstart", [f"name={label}"]).name == label


STEPS = """
import json, os, subprocess, sys, time
if len(sys.argv) == 2:  # a child that has overwritten what it inherited, as vLLM's processes do with their title
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"], env={})
    while not os.path.exists(sys.argv[1] + ".child"):
        time.sleep(0.02)
ended = time.monotonic() + 60
number, begun = 0, time.monotonic()
while time.monotonic() < ended:
    time.sleep(0.02)
    number += 1
    with open(sys.argv[1] + ".".join(["", *sys.argv[2:]]), "a") as file:
        file.write(json.dumps({"step": number, "seconds": 0.02, "tokens": 7}) + "\\n")
"""


@pytest.fixture
def alive(peers: Any, tmp_path: Path) -> Any:
    (script := tmp_path / "steps.py").write_text(STEPS)
    made = []

    def start(name: str) -> Any:
        lines, env = tmp_path / name, {**os.environ, peers.MARK: f"{name}-{tmp_path}"}
        command = [sys.executable, str(script), str(lines)]
        made.append(peers.Alive(peers.Run({}, env[peers.MARK], command, env, lines, tmp_path / "log", 10, 0.0)))
        return made[-1]

    yield start
    for one in made:
        one.end()


def steps_of(*files: Path) -> list[int]:
    return [len(file.read_text().splitlines()) for file in files]


def test_runs_have_the_machine_in_turn(peers: Any, alive: Any, tmp_path: Path) -> None:
    first, second = alive("first"), alive("second")
    peers.until_ready([first, second])
    files = [tmp_path / name for name in ("first", "first.child", "second", "second.child")]
    stopped = steps_of(*files)
    time.sleep(0.3)
    assert steps_of(*files) == stopped, "all processes of both are stopped"
    found = first.has_the_machine(0.5)
    after = steps_of(*files)
    assert after[0] > stopped[0] + 3
    assert after[1] > stopped[1]
    assert after[2:] == stopped[2:]
    assert (found["step_s"], found["tokens"]) == (0.02, 7)
    assert 0 < found["steps"] <= after[0] - stopped[0] - 2, "without those that began in an earlier turn"
    time.sleep(0.3)
    assert steps_of(*files) == after
    assert second.has_the_machine(0.2) is not None


def test_a_step_in_which_a_turn_ended_counts_in_none(peers: Any) -> None:
    """Ours are on record when they are reported, which may be some steps later: going on at 100."""
    late, over_the_pause, own = (
        {"step": step, "time": at, "step/total_s": s}
        for step, at, s in ((7, 100.1, 0.4), (8, 100.2, 6.5), (9, 100.6, 0.4))
    )
    assert [peers.began_after(row, 100.0) for row in (late, over_the_pause, own)] == [False, False, True]
    assert peers.began_after({"step": 3, "seconds": 0.4, "tokens": 7}, 100.0), "a peer's, on record as it ends"
    assert peers.began_after({"step": 9, "time": 100.3, "collector/interval_s": 0.4}, 100.0)


def test_a_run_that_ended_is_left_out_and_leaves_no_process(
    peers: Any, alive: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    one = alive("one")
    peers.until_ready([one])
    first, child = peers.of_run(one.run.label)
    first.kill()  # its child has no variable of the run, and another parent now
    assert one.has_the_machine(0.2) is None
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert one.ended
    assert "ended with -9; see" in capsys.readouterr().err
