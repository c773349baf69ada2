"""The command line: what it says, how it ends, and what it loads."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Done

SRC = Path(__file__).resolve().parents[2] / "src"
SPEEDS = ("--generate-tokens-per-s", "8000", "--train-tokens-per-s", "12000", "--length", "lognormal:300,1,2000")
HEAVY = ("torch", "ray", "vllm", "transformers", "torchrl", "tensordict", "matplotlib", "wandb", "tensorboard")


@pytest.mark.slow
def test_light_commands_load_nothing_heavy(tmp_path: Path) -> None:
    """One after the other in one process: what one loads is still there after the next.

    `validate` loads what reading the tasks takes (reasoning-gym brings matplotlib, torchdata torch), and no more.
    """
    commands = [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["plan", "--help"],
        ["tune", "--help"],
        ["ps", "--help"],
        ["ls"],
        ["cat", "quickstart"],
        ["cp", "quickstart", "copy.yaml"],
        ["convert", "--help"],
        ["validate", "gsm8k_qwen2_5_1_5b"],
        ["validate", "--quick", "quickstart"],
        ["plan", *SPEEDS, "-L", "1", "--out", "."],  # draws
        ["validate", "quickstart", "task.size=500"],
    ]
    code = (
        "import json, sys\n"
        "from leeway.cli.main import main\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    try:\n        main(command)\n"
        "    except SystemExit as end:\n        code = end.code\n"
        f"    print('DONE', json.dumps([command, code or 0, sorted(set(sys.modules) & set({HEAVY!r}))]))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("DONE ")]
    assert lines[:-2] == [[command, 0, []] for command in commands[:-2]]
    assert lines[-2] == [commands[-2], 0, ["matplotlib"]]
    assert lines[-1] == [commands[-1], 0, ["matplotlib", "torch"]]


def test_ls_shows_each_config_with_its_description(leeway: Callable[..., Done]) -> None:
    done = leeway("ls")
    assert done.returncode == 0
    assert "quickstart  " in done.stdout
    assert "two-digit" in done.stdout
    assert "async_rl" in done.stdout


def test_cat_and_cp_give_the_same_file(leeway: Callable[..., Done], tmp_path: Path) -> None:
    text = leeway("cat", "quickstart").stdout
    assert text.startswith("# A tiny model")
    assert leeway("cp", "quickstart", "mine.yaml").returncode == 0
    assert (tmp_path / "mine.yaml").read_text() == text
    assert leeway("validate", "--quick", "mine.yaml").returncode == 0


def test_cp_never_overwrites(leeway: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("precious")
    done = leeway("cp", "quickstart", "mine.yaml")
    assert done.returncode == 2
    assert "exists" in done.stderr
    assert (tmp_path / "mine.yaml").read_text() == "precious"


def test_validate_prints_derived_numbers_and_what_is_missing(leeway: Callable[..., Done]) -> None:
    done = leeway("validate", "gsm8k_qwen2_5_1_5b", "task.name=jsonl", "task.path=none.jsonl")
    assert done.returncode == 0, done.stderr
    assert "max outstanding groups  1280" in done.stdout  # 64 * (19 + 1)
    assert "weights                 published every 10 steps, pulled every 10 steps" in done.stdout
    assert "GPUs needed             8" in done.stdout
    assert "lacks: task.path: missing file" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (
            ["rollout.pull_every=9"],
            "published every step, pulled every 9 steps (a lag of 4 leaves no room to publish less",
        ),
        (
            ["eval.every=3"],
            "published every step, pulled every 2 steps (evaluations, every 3 steps, ask for versions in",
        ),
        (["param_server.publish_every=3"], "published every 3 steps, pulled every 2 steps\n"),
    ],
)
def test_validate_says_how_often_there_are_new_weights(
    leeway: Callable[..., Done], overrides: list[str], why: str
) -> None:
    done = leeway("validate", "quickstart", "name=w", "--quick", *overrides)
    assert done.returncode == 0, done.stderr
    assert why in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["validate", "quickstart", "staleness.max_lag=1"], "staleness.max_policy_lag"),
        (["run", "asyncrl", "--config", "quickstart"], "did you mean async_rl?"),
        (["run", "async_rl", "--config", "gsm8k_qwen2_5_1_5b", "model.path=/no/such/model"], "missing model path"),
        (["run", "async_rl"], "--config"),
        (["run", "grpo", "--config", "quickstart"], "algorithm.name=grpo"),
        (["frobnicate"], "frobnicate"),
        (["cat", "nothing"], "quickstart"),
        (["cat", "async_lr"], "NAME: got 'async_lr'"),
        (["cat", "async_lr"], "did you mean async_rl?"),
        (["validate", "quickstart", "--train.steps=3"], "train.steps: got --train.steps, expected no mark before it"),
        (["validate", "quickstart", "++train.steps=3"], "write train.steps=VALUE"),
        (["scale", "gone", "generators=²"], "expected generators=N"),
        (["plot", "gone"], "RUN: got gone (nothing there)"),
        (["resume", __file__], "(a file)"),
    ],
)
def test_wrong_input_exits_2_without_a_traceback(
    args: list[str], word: str, leeway: Callable[..., Done], tmp_path: Path
) -> None:
    done = leeway(*args)
    assert done.returncode == 2
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_run_refuses_a_folder_that_holds_a_run(leeway: Callable[..., Done], tmp_path: Path) -> None:
    folder = tmp_path / "runs/leeway/quickstart"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{}")
    done = leeway("run", "async_rl", "--config", "quickstart")
    assert done.returncode == 2
    assert "holds another run" in done.stderr
    assert "name=" in done.stderr


def test_run_hands_stages_to_the_runner_and_returns_its_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import types

    from leeway.cli import main as cli

    seen: dict[str, object] = {}

    def run_stages(stages: list, run_dir: Path, config_name: str, argv: list[str]) -> int:
        seen.update(names=[s.name for s in stages], run_dir=run_dir, config_name=config_name)
        return 1

    runner = types.ModuleType("leeway.driver.runner")
    runner.run_stages = run_stages  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "leeway.driver.runner", runner)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "async_rl", "--config", "quickstart", "name=x"])
    assert end.value.code == 1
    assert seen == {"names": ["sft", "async_rl"], "run_dir": Path("runs/leeway/x"), "config_name": "quickstart"}


def test_a_failing_run_exits_1_and_says_why_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from leeway.cli import main as cli

    def broken(*_: object) -> None:
        raise RuntimeError("the trainer\nfell over")

    monkeypatch.setattr(cli, "plan_run", broken)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "async_rl", "--config", "quickstart"])
    assert end.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1] == "leeway: failed: RuntimeError: the trainer fell over"


@pytest.mark.parametrize(("code", "kept"), [(0, False), (2, False), (130, False), (1, True)])
def test_trying_an_environment_leaves_no_folder_but_one_with_the_logs_of_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, kept: bool
) -> None:
    import tempfile
    import types

    from leeway.cli import main as cli

    def run_stages(_: list, run_dir: Path, *__: object, is_scratch: bool) -> int:
        assert is_scratch
        assert run_dir.parent == tmp_path
        (run_dir / "logs").mkdir()
        return code

    modules = {
        "runner": {"run_stages": run_stages},
        "try_env": {"Choice": lambda *_: None, "recipe_of": lambda _: None},
    }
    for name, contents in modules.items():
        module = types.ModuleType(f"leeway.driver.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cli.sys, "argv", ["leeway"])
    with pytest.raises(SystemExit) as end:
        cli.main(["env", "try", "single_turn", "--config", "quickstart"])
    assert end.value.code == code
    assert bool(list(tmp_path.iterdir())) is kept


def test_version_says_which(leeway: Callable[..., Done]) -> None:
    import leeway as package

    done = leeway("--version")
    assert (done.returncode, done.stdout) == (0, f"leeway {package.__version__}\n")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("leeway run as", ["async_rl"]),
        ("leeway run async_rl --config quick", ["quickstart"]),
        ("leeway run async_rl --config m", ["mine.yaml"]),
        ("leeway run async_rl --config quickstart optimizer.l", ["optimizer.lr="]),
        ("leeway validate quickstart opt", ["optimizer."]),
        ("leeway validate quickstart train.steps=1", []),
        ("leeway cat quick", ["quickstart"]),
    ],
)
def test_the_shell_completes(
    words: str, offered: list[str], leeway: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("")
    (tmp_path / "mine.txt").write_text("")
    monkeypatch.setenv("_LEEWAY_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert leeway().stdout.split() == offered


@pytest.mark.parametrize(
    ("parts", "running", "expected"),
    [
        (None, False, "(no parts.json in it)', expected the folder of a run whose training has begun"),
        ({"time": 0}, False, "expected a run that is running; leeway resume"),
        ({"time": 0}, True, "whose stage rl has ended', expected a run that is training on rollouts now"),
    ],
)
def test_a_number_of_generators_that_nobody_would_follow_is_refused(
    tmp_path: Path, leeway: Callable[..., Done], parts: dict[str, int] | None, running: bool, expected: str
) -> None:
    from leeway.driver.run_record import locked

    if parts is not None:
        (tmp_path / "parts.json").write_text(json.dumps({"stage": "rl", "parts": [], "said": "", **parts}))
    with locked(tmp_path) if running else contextlib.nullcontext():
        done = leeway("scale", str(tmp_path), "generators=2")
    assert done.returncode == 2
    assert expected in done.stderr
    assert not (tmp_path / "scale.json").exists()


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ({"answered": {"id": None, "refusal": ""}}, 0, "generators: 1 -> 2, under way"),
        ({"answered": {"id": None, "refusal": "the stage is ending"}}, 2, "got 2, expected 1 as it is: the stage is"),
        ({"is_over": True}, 2, "got 2, expected 1 as it is: the stage has ended"),
        ({}, 0, "it has not answered yet"),
    ],
)
def test_a_request_for_generators_waits_for_its_answer(
    tmp_path: Path, leeway: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, answer: Any, code: int, said: str
) -> None:
    """`answer`: what the run writes once it has seen the request."""
    from leeway.cli import parts
    from leeway.driver.run_record import locked

    seen = {"stage": "rl", "parts": [], "said": "", "time": time.time(), "generators": 1}
    (tmp_path / "parts.json").write_text(json.dumps(seen))

    def other(seconds: float) -> None:
        if (tmp_path / "scale.json").exists() and answer:
            asked = json.loads((tmp_path / "scale.json").read_text())
            assert asked["generators"] == 2
            own = dict(answer)
            if "answered" in own:
                (tmp_path / "scale.json").unlink()
                own["answered"] = own["answered"] | {"id": asked["id"]}
            (tmp_path / "parts.json").write_text(json.dumps(seen | own))

    monkeypatch.setattr(parts, "ANSWER_S", 0.05)
    monkeypatch.setattr(parts.time, "sleep", other)
    with locked(tmp_path):
        done = leeway("scale", str(tmp_path), "generators=2")
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert (tmp_path / "scale.json").exists() == (not answer)
