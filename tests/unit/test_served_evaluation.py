"""A served address is evaluated as the run evaluates its own engine: the same answers, the same numbers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leeway.collector import actor as actor_module
from leeway.collector.actor import CollectorActor
from leeway.config import Config, ConfigError, load_config
from leeway.config.inputs import ModelInit
from leeway.driver.evaluation import evaluate, table_of_versions, version_at
from leeway.driver.serving import Address, Engines
from leeway.failures import PartFailed, Refused
from leeway.runtime.launch import engine_settings
from leeway.runtime.supervisor import Supervisor
from leeway.tasks import Prompter
from leeway.tasks.bootstrap import build_model_dir
from leeway.tasks.evalsets import build_evalsets
from leeway.transports.transport import TransportSettings

from .test_evaluation import generators_of

VERSION = 7


@pytest.fixture(scope="module")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    init = ModelInit(options={**sizes, "intermediate_size": 64, "max_position_embeddings": 64}, init_std=0.4)
    texts = [f"{a} + {b} = {a + b}" for a in range(6) for b in range(4)]
    return build_model_dir(init, texts, tmp_path_factory.mktemp("served") / "model", seed=0)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_module, "LoopWatch", lambda: None)
    monkeypatch.setattr(actor_module, "log_to_file", lambda *_: None)
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "here")


def settings_of(served_model: Path, tmp_path: Path, *overrides: str) -> Config:
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(6) for b in range(4)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [
        f"model.path={served_model}", "rollout.engine.name=hf", "cluster.kv_cache_gib=0.01", "rollout.max_model_len=64",
        "cluster.device=cpu", "rollout.max_response_tokens=12", "rollout.max_prompt_tokens=40", 
        f"plugins=[{tmp_path}]", "task.holdout_frac=0", "eval.every=0",
        f"eval.tasksets={{sums: {{name: jsonl, path: {tmp_path / 'tasks.jsonl'}}}}}",
        "env.reward=scored_for_serving:score",
    ]  # fmt: skip
    (tmp_path / "scored_for_serving.py").write_text("def score(task, text):\n    return sum(map(ord, text)) % 7 / 7\n")
    return load_config("quickstart", [*given, *overrides], recipe="evaluate")


class OfActor:
    """A generator whose process is this one."""

    role, is_up = "generator-0", True

    def __init__(self, actor: CollectorActor) -> None:
        self.actor = SimpleNamespace(
            **{name: SimpleNamespace(remote=getattr(actor, name)) for name in ("sample", "heard", "end")}
        )

    async def call_now(self, ask: Any) -> Any:
        return await ask(self.actor)


async def started(config: Config, tmp_path: Path, name: str) -> CollectorActor:
    settings = engine_settings(config, cores=[], initial_version=VERSION)
    actor = CollectorActor(settings, role=name, log_file=tmp_path / f"{name}.log", log_level="INFO")
    transport = TransportSettings(name="files", folder=tmp_path)
    await actor.start(config, buffer=None, param_server=None, transport=transport)
    return actor


async def measured(config: Config, actor: CollectorActor, version: int = VERSION) -> tuple[Any, Any]:
    played: Any = SimpleNamespace(
        evaluate=SimpleNamespace(remote=actor.evaluate), num_evaluated=SimpleNamespace(remote=actor.num_evaluated)
    )
    parts: Any = SimpleNamespace(**generators_of(played), supervisor=Supervisor())
    return await evaluate(config, parts, build_evalsets(config), policy_version=version)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ("eval.temperature=1.0", "eval.samples=3", "eval.top_p=0.9")])
def test_a_served_address_is_evaluated_as_the_engine_inside_the_run(
    served_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    """Greedy, and sampled: requests carry their seeds, and an engine's samples depend on them alone."""
    monkeypatch.setenv("CLIENT_KEY", "a-key-that-is-long-enough")

    async def main() -> None:
        config = settings_of(served_model, tmp_path, *overrides)
        inside = await started(config, tmp_path, "inside")
        metrics, trajectories = await measured(config, inside)
        anywhere = config.model_copy(update={"serve": config.serve.model_copy(update={"port": 0})})
        prompter, engines = Prompter.load(served_model), Engines(lambda: [OfActor(inside)])
        address = Address(anywhere, engines, prompter, newest_version=lambda: VERSION)
        await address.open(["a-key-that-is-long-enough"])
        try:
            there = settings_of(
                served_model, tmp_path, *overrides, f"eval.address={address.url}", "eval.key_variable=CLIENT_KEY"
            )
            assert await version_at(there.eval) == VERSION
            outside = await started(there, tmp_path, "outside")
            again, the_same = await measured(there, outside)
            assert [t.response_tokens for t in the_same] == [t.response_tokens for t in trajectories]
            assert [t.text for t in the_same] == [t.text for t in trajectories]
            assert len({t.text for t in the_same}) > 3, "one answer for all says little"
            assert again == metrics, "to the digit"
            assert metrics["eval/sums/policy_version"] == VERSION
        finally:
            await address.close()
            await inside.shutdown()

    asyncio.run(asyncio.wait_for(main(), 250))


@pytest.mark.slow
def test_an_address_that_cannot_be_evaluated_is_refused_in_a_line(
    served_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody there, a wrong key, another model's name: said before the first task."""
    monkeypatch.setenv("WRONG_KEY", "not-the-one-that-is-expected")

    async def main() -> None:
        config = settings_of(served_model, tmp_path)
        inside = await started(config, tmp_path, "inside")
        anywhere = config.model_copy(update={"serve": config.serve.model_copy(update={"port": 0})})
        engines = Engines(lambda: [OfActor(inside)])
        address = Address(anywhere, engines, Prompter.load(served_model), newest_version=lambda: VERSION)
        await address.open(["a-key-that-is-long-enough"])
        try:
            at = f"eval.address={address.url}"
            for overrides, said in (
                ([at], "expected `authorization: Bearer KEY` with a valid key"),
                ([at, "eval.key_variable=WRONG_KEY"], "expected `authorization: Bearer KEY` with a valid key"),
            ):
                there = settings_of(served_model, tmp_path, *overrides)
                with pytest.raises(Refused, match=said):
                    await version_at(there.eval)
                with pytest.raises(PartFailed, match=r"eval\.address: got no answer to a prompt of token ids"):
                    await started(there, tmp_path, "outside")
        finally:
            await address.close()
            await inside.shutdown()

    asyncio.run(asyncio.wait_for(main(), 250))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.address=ftp://host"], r"eval\.address: got 'ftp://host', expected http://host:port/v1"),
        (["eval.model=m"], r"eval\.model: got 'm', expected nothing: .* where eval\.address is set"),
        (
            ["eval.address=http://h/v1", "eval.checkpoints=runs/a"],
            r"eval\.checkpoints: got 'runs/a', expected null where",
        ),
        (
            ["eval.address=http://h/v1", "eval.key_variable=NO_SUCH_KEY"],
            r"expected an environment variable that is set",
        ),
    ],
)
def test_settings_of_an_address_that_do_not_fit_are_refused(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(tmp_path, tmp_path, *overrides)


def test_a_key_is_in_no_setting_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIENT_KEY", "a-key-that-is-long-enough")
    config = settings_of(tmp_path, tmp_path, "eval.address=http://h/v1", "eval.key_variable=CLIENT_KEY")
    assert "CLIENT_KEY" in str(config.written())
    assert "a-key-that-is" not in str(config.written(loads_again=True)) + str(config.model_dump())
    with pytest.raises(ConfigError, match="on the command line, which other users"):
        settings_of(tmp_path, tmp_path, "eval.address=http://:a-key-that-is-long@h/v1")


def test_versions_are_compared_in_a_table() -> None:
    own = {"exact_match": 0.25, "exact_match_low": 0.125, "exact_match_high": 0.5, "reward": 1.0}
    measured = {2: {"sums": {**own, "response_tokens_mean": 3.25}}, 10: {"sums": {**own, "response_tokens_mean": 4.0}}}
    assert table_of_versions("sums", measured) == [
        "sums: step  accuracy (95 % of samples of tasks like these)  tokens",
        "sums:    2  0.2500 (0.1250 to 0.5000)  3.2",
        "sums:   10  0.2500 (0.1250 to 0.5000)  4.0",
    ]
