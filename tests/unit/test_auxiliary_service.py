"""A served model, asked by the client that environments have: text from an engine, classes from a real classifier."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leeway.auxiliary.actor import AuxiliaryActor
from leeway.auxiliary.classifier import Classifier
from leeway.auxiliary.service import Service
from leeway.config import ConfigError, derive, find_recipe, load_config
from leeway.config.inputs import AuxiliaryModel
from leeway.envs.auxiliary import AuxiliaryClient, AuxiliaryError
from leeway.envs.server import Server
from leeway.runtime.launch import Launcher
from leeway.runtime.supervisor import Supervisor
from leeway.tasks import Prompter
from leeway.tasks.tiny_tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(["a question and its answer 123"])
PROMPTER = Prompter(TOKENIZER)


class Echo:
    """Says its prompt again, and how it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def generate(self, prompt_tokens: list[int], **sampling: Any) -> list[Any]:
        self.asked.append(sampling)
        return [SimpleNamespace(tokens=prompt_tokens[: sampling["max_tokens"]], finish_reason="stop")]


def play(service: Service, scenario: Any, *, key: str | None = None, **settings: Any) -> Any:
    async def main():
        server = Server()
        await server.start()
        session = server.open(service.routes(), max_body_bytes=2**20)
        url = f"http://:{key or session.key}@{server.address}/v1"
        try:
            return await scenario(AuxiliaryClient("m", AuxiliaryModel(url=url, retries=0, **settings)))
        finally:
            await server.stop()

    return asyncio.run(main())


def test_an_engine_behind_an_address_answers_chats_and_completions():
    engine: Any = Echo()
    service = Service(model="judge", engine=engine, prompter=PROMPTER, max_model_len=40)

    begun = TOKENIZER.decode(PROMPTER.encode_text("answer 123")[:2])

    async def scenario(client):
        assert await client.chat([{"role": "user", "content": "a question"}]) == "a question"
        assert await client.complete("answer 123", temperature=0.7, max_tokens=2) == begun
        assert client._model == "judge"
        with pytest.raises(AuxiliaryError, match=r"HTTP 400: .*max_model_len is 40"):
            await client.complete("1" * 50)
        with pytest.raises(AuxiliaryError, match="HTTP 404"):
            await client.classify("x")

    play(service, scenario)
    assert [asked["temperature"] for asked in engine.asked] == [0.0, 0.7]
    assert engine.asked[0]["max_tokens"] < 40, "what the client allows, but no more than there is room for"


def test_nobody_without_the_runs_key_is_served():
    engine: Any = Echo()
    service = Service(model="judge", engine=engine, prompter=PROMPTER, max_model_len=40)
    with pytest.raises(AuxiliaryError, match="HTTP 401"):
        play(service, lambda client: client.complete("x"), key="other")


@pytest.fixture(scope="module", params=[1, 3])
def classifier(request, tmp_path_factory):
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    labels: dict[str, Any] = {"num_labels": request.param}
    config = Qwen2Config(
        vocab_size=len(TOKENIZER), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=64, pad_token_id=TOKENIZER.pad_token_id, **labels,
    )  # fmt: skip
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return Classifier(str(folder), device="cpu", dtype="float32"), request.param


@pytest.mark.slow
def test_texts_that_come_together_get_the_scores_they_get_alone(classifier):
    model, num_labels = classifier
    texts = [f"a question {i} " + "and " * (i % 5) for i in range(40)]

    async def together():
        return await asyncio.gather(*map(model.classify, texts))

    found = asyncio.run(together())
    alone = [model._scores([text])[0] for text in texts]
    assert torch.tensor(found).shape == (40, num_labels)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), atol=1e-5, rtol=0)
    assert len({round(scores[0], 6) for scores in found}) > 20, "scores are of the texts"
    if num_labels > 1:
        torch.testing.assert_close(torch.tensor(found).sum(1), torch.ones(40))


def test_a_text_that_cannot_be_scored_fails_by_itself_and_the_next_is_scored(classifier, monkeypatch):
    model, _ = classifier
    with monkeypatch.context() as broken:
        broken.setattr(model, "_scores", lambda texts: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            asyncio.run(_once(model))
    assert asyncio.run(_once(model))


async def _once(model):
    model._busy = asyncio.Lock()  # a loop of its own
    return await model.classify("a")


def test_a_served_model_counts_as_a_process_of_the_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = load_config("quickstart", [f"env.models={{judge: {{path: {tmp_path}}}, far: {{url: 'http://a/v1'}}}}"])
    assert derive(config).processes["auxiliary model"] == 1
    assert derive(config).cpus_needed == derive(load_config("quickstart")).cpus_needed + 1
    assert "auxiliary model" not in derive(config, find_recipe("sft")).processes


class Gated(Echo):
    """Answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()

    async def generate(self, prompt_tokens: list[int], **sampling: Any) -> list[Any]:
        said = await super().generate(prompt_tokens, **sampling)
        await self.may.wait()
        return said


def test_copies_of_a_model_behind_one_address_share_its_requests_by_load(tmp_path, monkeypatch):
    """Each gets one of two; while one is still busy with it, the other gets the next ones."""
    engines = [Gated(), Gated()]
    monkeypatch.setattr("leeway.auxiliary.actor.Prompter", SimpleNamespace(load=lambda path: PROMPTER))
    served = AuxiliaryModel(path=str(tmp_path), max_model_len=40, num_engines=2)
    actors: list[Any] = [
        AuxiliaryActor(served, role=f"auxiliary-judge.{i}", log_file=tmp_path / f"{i}.log", log_level="INFO")
        for i in range(2)
    ]
    for actor, engine in zip(actors, engines, strict=True):
        actor._engine = engine
    second = SimpleNamespace(generate=SimpleNamespace(remote=actors[1].generate))

    async def main() -> None:
        client = AuxiliaryClient("judge", AuxiliaryModel(url=await actors[0].serve([second]), retries=0))
        asked = [asyncio.create_task(client.complete("answer")) for _ in range(2)]
        async with asyncio.timeout(200):
            while not all(engine.asked for engine in engines):
                await asyncio.sleep(0.01)
            engines[0].may.set()
            for _ in range(3):
                await client.complete("answer")
            assert [len(engine.asked) for engine in engines] == [4, 1]
            engines[1].may.set()
            assert await asyncio.gather(*asked) == ["answer"] * 2
        await actors[0]._server.stop()

    asyncio.run(main())


class FakeRemote:
    """In the place of Ray's class: makes actors that say what they were made with, and what was asked of them."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def options(self, *, num_gpus: int) -> Any:
        def make(model: AuxiliaryModel, *, role: str, **_: Any) -> Any:
            made: dict[str, Any] = {"role": role, "num_gpus": num_gpus, "model": model}
            self.made.append(made)

            async def start(**_: Any) -> dict[str, Any]:
                return {"pid": 0, "node": "elsewhere", "engine_pids": []}

            async def serve(others: list[Any]) -> str:
                made["others"] = [other.role for other in others]
                return f"http://{role}/v1"

            async def answer() -> tuple[str, int]:
                return "elsewhere", 0

            async def clock() -> float:
                return time.time()

            async def open_spans(path: Path, part: str, clock_offset_s: float) -> None:
                pass

            verbs = {"start": start, "serve": serve, "answer": answer, "clock": clock, "open_spans": open_spans}
            verbs |= {"wait_until_death": asyncio.Event().wait}
            return SimpleNamespace(role=role, **{name: SimpleNamespace(remote=verb) for name, verb in verbs.items()})

        return SimpleNamespace(remote=make)


def test_each_copy_is_an_actor_with_the_gpus_of_its_engine_and_the_first_one_serves_them(tmp_path, monkeypatch):
    judge = f"{{path: {tmp_path}, num_engines: 2, engine: {{tensor_parallel_size: 4}}}}"
    models = f"env.models={{judge: {judge}, scores: {{path: {tmp_path}, kind: classify}}, far: {{url: 'http://a/v1'}}}}"
    config = load_config("gsm8k_qwen2_5_1_5b", [models])
    remote = FakeRemote()
    monkeypatch.setattr("leeway.runtime.launch.AuxiliaryRemote", remote)

    async def main() -> Any:
        supervisor = Supervisor()
        launcher = Launcher(config, find_recipe("async_rl"), run_dir=tmp_path, supervisor=supervisor)
        await launcher._auxiliaries()
        supervisor.forget_all()
        return launcher

    launcher = asyncio.run(main())
    assert [(made["role"], made["num_gpus"], made.get("others")) for made in remote.made] == [
        ("auxiliary-judge", 4, ["auxiliary-judge.1"]),
        ("auxiliary-judge.1", 4, None),
        ("auxiliary-scores", 1, []),
    ]
    asked = launcher._config.env.models
    assert {name: model.url for name, model in asked.items()} == {
        "judge": "http://auxiliary-judge/v1",
        "scores": "http://auxiliary-scores/v1",
        "far": "http://a/v1",
    }
    assert set(launcher.parts.processes) == {"auxiliary-judge", "auxiliary-judge.1", "auxiliary-scores"}


def test_the_engines_of_served_models_count_with_all_their_devices(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    judge = f"{{path: {tmp_path}, num_engines: 2, engine: {{tensor_parallel_size: 2}}}}"
    models = f"env.models={{judge: {judge}, scores: {{path: {tmp_path}, kind: classify, num_engines: 3}}}}"
    bare, beside = load_config("gsm8k_qwen2_5_1_5b"), load_config("gsm8k_qwen2_5_1_5b", [models])
    assert derive(beside).processes["auxiliary model"] == 5
    assert derive(beside).gpus["auxiliary model"] == 2 * 2 + 3
    assert derive(beside).gpus_needed == derive(bare).gpus_needed + 7


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("{url: 'http://a/v1', num_engines: 2}", "m.num_engines: got 2, expected a model that the run serves; leave"),
        ("{url: 'http://a/v1', engine: {seed: 1}}", "env.models.m.engine: got"),
        ("{path: FOLDER, kind: classify, engine: {name: hf}}", "serves with kind generate; leave engine out"),
        ("{path: FOLDER, num_engines: 0}", "env.models.m.num_engines: got 0"),
        ("{path: FOLDER, engine: {tensor_parallel_size: 0}}", "engine.tensor_parallel_size: got 0"),
    ],
)
def test_engines_that_a_model_does_not_have_are_refused(tmp_path, model, said):
    with pytest.raises(ConfigError) as refused:
        load_config("quickstart", [f"env.models={{m: {model.replace('FOLDER', str(tmp_path))}}}"])
    assert said in str(refused.value)
