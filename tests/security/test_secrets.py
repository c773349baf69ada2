"""Secrets in settings: their names are written, their values never, whichever way they came."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from leeway import redaction
from leeway.cli.show import describe
from leeway.config import ConfigError, Stage, find_recipe, plan_run, run_yaml, this_machine, to_yaml
from leeway.config.inputs import AuxiliaryModel
from leeway.driver.checkpoints import Checkpoints, check_same_settings
from leeway.driver.resume import plan_resume
from leeway.driver.run_record import RunRecord
from leeway.envs.auxiliary import AuxiliaryClient
from leeway.failures import PartFailed, as_text
from leeway.monitor import build_monitor
from leeway.monitor.logs import Printable
from leeway.runtime.supervisor import Supervisor
from leeway.trainer.checkpoint import CheckpointError

from ..fakes import FakeRank

KEY, ROTATED, TYPED, PASSWORD = "sk-from-the-shell-81", "sk-rotated-4711", "hunter2-typed-in", "pa55-in-an-address"
SECRETS = (KEY, ROTATED, TYPED, PASSWORD)
CONFIG = f"""
output_dir: runs
project: p
name: r
model: {{path: org/m}}
task: {{name: jsonl, path: "${{oc.env:TASKS}}"}}
env:
  name: env_with_secrets:Env
  variables: {{JUDGE_KEY: "${{oc.env:SHELL_KEY}}", CACHE: /somewhere/cache}}
  options:
    api_key: {TYPED}
    again: "${{env.variables.JUDGE_KEY}}"
    header: "Bearer ${{.again}}"
    address: "https://me:{PASSWORD}@host.example/v1"
rollout: {{max_prompt_tokens: 8, max_response_tokens: 8, max_model_len: 16}}
cluster: {{device: cpu}}
train: {{steps: 4, groups_per_step: 4}}
"""


@pytest.fixture(autouse=True)
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(redaction, "_known", {})
    monkeypatch.setenv("SHELL_KEY", KEY)
    monkeypatch.setenv("TASKS", str(tmp_path / "tasks.jsonl"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "env_with_secrets.py").write_text("class Env: ...\n")


def stages(*overrides: str, file: str = "config.yaml") -> list[Stage]:
    return plan_run(file, "async_rl", overrides)


def no_secrets_in(text: str) -> None:
    found = [secret for secret in SECRETS if secret in text]
    assert not found, f"{found} in {text[:2000]}"


def save(tmp_path: Path, stage: Stage) -> Path:
    """A checkpoint of the stage; returns its folder."""
    rank = FakeRank()
    checkpoints = Checkpoints(tmp_path / "saved", config=stage.config, trainers=[rank], supervisor=Supervisor())

    async def one() -> None:
        rank.step = 1
        await checkpoints.at_end()

    asyncio.run(one())
    return tmp_path / "saved/step-000001"


@pytest.mark.honest
def test_in_memory_the_values_are_there():
    env = stages()[0].config.env
    assert env.variables == {"JUDGE_KEY": KEY, "CACHE": "/somewhere/cache"}
    assert env.options["header"] == f"Bearer {KEY}"
    assert env.options["api_key"] == TYPED


@pytest.mark.attack(cases=4)
def test_whatever_is_written_has_names_and_references(tmp_path):
    [stage] = stages()
    no_secrets_in(run_yaml([stage]))
    no_secrets_in(to_yaml(stage.config))
    text = run_yaml([stage])
    for reference in ("${oc.env:SHELL_KEY}", "${oc.env:API_KEY}", "Bearer ${.again}", "${oc.env:ADDRESS}"):
        assert reference in text
    assert "/somewhere/cache" in text, "the run's own file loads again"
    assert "/somewhere/cache" not in json.dumps(stage.config.written())
    no_secrets_in(json.dumps(stage.config.written()))
    no_secrets_in(describe("config.yaml", [stage], this_machine(), (), [[]], yaml=True))
    folder = save(tmp_path, stage)
    RunRecord(tmp_path, recipes=[find_recipe("async_rl")], argv=["leeway", "run"], goes_on=False).close("done")
    monitor = build_monitor(tmp_path / "logs", stage.config.monitor, stage.config.written(), 4, "r")
    monitor.log(1, {"reward": 1.0}, role="trainer")
    monitor.close("done")
    for path in [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "config.yaml"]:
        no_secrets_in(path.read_bytes().decode(errors="replace"))
    assert "${oc.env:SHELL_KEY}" in (folder / "state.json").read_text()


@pytest.mark.attack
def test_wandb_is_given_references(tmp_path, monkeypatch):
    given: dict[str, Any] = {}
    wandb = pytest.importorskip("wandb")

    def init(**options: Any) -> Any:
        given.update(options)
        raise RuntimeError("no network")

    monkeypatch.setattr(wandb, "init", init)
    [stage] = stages("monitor.wandb=offline")
    with pytest.raises(Exception, match="no network"):
        build_monitor(tmp_path / "logs", stage.config.monitor, stage.config.written(), 4, "r")
    assert given["config"]["env"]["variables"] == {"JUDGE_KEY": "${oc.env:SHELL_KEY}", "CACHE": "***"}
    no_secrets_in(str(given))


@pytest.mark.honest
def test_a_rotated_key_resumes_and_another_data_set_does_not(tmp_path, monkeypatch):
    folder = save(tmp_path, stages()[0])
    monkeypatch.setenv("SHELL_KEY", ROTATED)
    check_same_settings(folder, stages()[0].config)
    monkeypatch.setenv("TASKS", "/elsewhere.jsonl")
    with pytest.raises(CheckpointError, match=r"task.path was '\$\{oc.env:TASKS\} \(value \w{8}\)', is") as refused:
        check_same_settings(folder, stages()[0].config)
    assert "elsewhere" not in str(refused.value)
    no_secrets_in(str(refused.value))


@pytest.mark.honest
def test_the_runs_own_file_loads_again_and_asks_for_what_was_typed(tmp_path, monkeypatch):
    run = tmp_path / "runs/p/r"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(run_yaml(stages()))
    RunRecord(run, recipes=[find_recipe("async_rl")], argv=["leeway"], goes_on=False).close("interrupted")
    with pytest.raises(ConfigError, match=r"env.options.\w+: .*Environment variable 'A\w+' not found"):
        plan_resume(run, [])
    monkeypatch.setenv("API_KEY", TYPED)
    monkeypatch.setenv("ADDRESS", "https://host.example/v1")
    monkeypatch.setenv("SHELL_KEY", ROTATED)
    [again] = stages(file=str(run / "config.yaml"))
    assert again.config.env.variables["JUDGE_KEY"] == ROTATED
    assert again.config.env.options["api_key"] == TYPED
    no_secrets_in(run_yaml([again]))


@pytest.mark.attack
@pytest.mark.parametrize(
    "override",
    [
        f"env.options.api_key={TYPED}",
        f"env.variables.OPENAI_API_KEY={TYPED}",
        f"env={{variables: {{OPENAI_API_KEY: {TYPED}}}}}",
        f"env.options.hf_token={TYPED}",
        f"env.variables.MY_TOKEN={TYPED}",
        f"env.variables.PGPASSWORD={TYPED}",
        f"env.variables.AWS_SECRET_ACCESS_KEY={TYPED}",
        f"env.options.address=https://me:{PASSWORD}@host",
        f"stages.async_rl.env.options.password={TYPED}",
    ],
)
def test_a_secret_on_the_command_line_is_refused(override):
    with pytest.raises(ConfigError, match=r"a secret on the command line.*\$\{oc\.env:\w+\}") as refused:
        stages(override)
    no_secrets_in(str(refused.value))


@pytest.mark.honest
@pytest.mark.parametrize(
    "override",
    [
        "env.variables.OPENAI_API_KEY=${oc.env:SHELL_KEY}",
        "env.variables.MODE=fast",
        "env.variables.PATH_TO_MONKEYS=fast",
        "env.models={judge: {url: http://h/v1, key_variable: SHELL_KEY}}",
        "env.options.max_tokens=7",
        "env.options.eos_token=x",
        "env.options.url=https://host/v1",
    ],
)
def test_what_is_no_secret_may_be_typed(override):
    [stage] = stages(override)
    assert stage.config


@pytest.mark.attack
def test_the_value_of_a_variable_is_not_in_the_command_that_is_shown():
    [stage] = stages("env.variables.MODE=something")
    shown = describe("config.yaml", [stage], this_machine(), (), [[]], ["env.variables.MODE=something"])
    assert "env.variables.MODE=***" in shown
    assert "something" not in shown


@pytest.mark.attack
@pytest.mark.parametrize(
    "line",
    [
        'algorithm: {preset: "${oc.env:SHELL_KEY}"}',
        'train: {steps: "${env.variables.JUDGE_KEY}"}',
        'seed: "${env.options.api_key}"',
        'model: {path: "${env.options.header}"}',
    ],
)
def test_errors_about_settings_do_not_show_it(tmp_path, line):
    section = line.partition(":")[0]
    kept = [own for own in CONFIG.splitlines() if not own.startswith(f"{section}:")]
    (tmp_path / "config.yaml").write_text("\n".join([*kept, line]))
    with pytest.raises(ConfigError) as refused:
        stages()
    no_secrets_in(str(refused.value))


@pytest.mark.attack
def test_a_variable_of_another_kind_is_not_shown_where_it_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG.replace("CACHE: /somewhere/cache", "PIN: 471147"))
    with pytest.raises(ConfigError, match="a value that is not shown") as refused:
        stages()
    assert "471147" not in str(refused.value)


@pytest.mark.attack
def test_failures_of_a_part_that_was_sent_the_settings_hide_them(monkeypatch):
    sent = pickle.dumps(stages()[0].config)
    monkeypatch.setattr(redaction, "_known", {})  # another process
    config = pickle.loads(sent)

    class Part:
        role = "generator-0"

        @as_text
        async def call(self) -> None:
            raise RuntimeError(f"401 for {{'Authorization': '{config.env.options['header']}', 'x': '{TYPED}'}}")

    async def call() -> None:
        await Part().call()

    with pytest.raises(PartFailed) as failed:
        asyncio.run(call())
    no_secrets_in(str(failed.value) + failed.value.details + repr(failed.value.args))
    assert "RuntimeError: 401 for" in str(failed.value)


@pytest.mark.attack
def test_logs_hide_them_in_messages_and_tracebacks():
    [stage] = stages()
    try:
        raise ValueError(f"Invalid header value {stage.config.env.options['header']!r}")
    except ValueError:
        record = logging.LogRecord("x", logging.WARNING, "x", 1, "failed with %s", (KEY,), sys.exc_info())
    text = Printable("%(message)s").format(record)
    no_secrets_in(text)
    assert "${oc.env:SHELL_KEY}" in text


@pytest.mark.attack
@pytest.mark.parametrize("key", [KEY, KEY + "\n"], ids=["refused by the server", "a key that is no header"])
def test_a_judge_that_fails_does_not_show_its_key(monkeypatch, key):
    monkeypatch.setenv("SHELL_KEY", key)
    settings = AuxiliaryModel(url="http://127.0.0.1:9/v1", key_variable="SHELL_KEY", model="m", retries=0)
    client = AuxiliaryClient("judge", settings)

    def echo(*_: Any) -> Any:
        raise OSError(f"the server says: Incorrect API key provided: {key!r}")

    if key == KEY:
        monkeypatch.setattr(client, "_request", echo)
    with pytest.raises(RuntimeError) as failed:
        asyncio.run(client.chat([{"role": "user", "content": "x"}]))
    no_secrets_in(str(failed.value))
