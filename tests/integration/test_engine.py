"""vLLM under the contract of every engine, and against what can go wrong inside vLLM: each is refused by name."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from leeway.collector.progress import EngineHung
from leeway.config.sampling import kept_width
from leeway.engines import vllm_worker_env
from leeway.engines.vllm_blocks import block_size
from leeway.engines.vllm_core import STAND_STILL, TAKE_STAGED
from leeway.engines.vllm_engine import VllmEngine
from leeway.engines.vllm_products import in_few_shapes
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.trainer.canary import score_canary
from leeway.trainer.convert import convert
from leeway.trainer.linear import STEPS, num_rows
from leeway.trainer.trainer import Trainer
from leeway.weights import Canary, Publication, WeightSyncError

from ..engine_contract import TOLERANCE, EngineContract, Publisher, Served, check_masks
from ..trainers import batch_of, free_address, random_trajectories, settings_of

VLLM_OPTIONS = {"enforce_eager": True, "max_num_seqs": 64}
NUM_KEPT = kept_width(9)
pytestmark = pytest.mark.timeout(900)  # on a busy machine, an engine's start takes minutes


class ServedByVllm(Served):
    """`gap_at_start` and `gap_after_a_load`: from the canary of the weights that it started with."""

    gap_at_start: float
    gap_after_a_load: float

    def __init__(self, folder: Path, *, hidden_size: int = 64, **changes: Any) -> None:
        options = {"options": VLLM_OPTIONS, **changes}
        super().__init__(folder, lambda settings: VllmEngine(replace(settings, **options)), hidden_size=hidden_size)

    def rpc(self, method: str, *args: Any) -> Any:
        """Call a method of the engine's own processes, and return the first one's answer; see `engine_saboteur`."""
        return self.run(self.engine._llm.collective_rpc(method, args=args))[0]


@contextmanager
def sabotaged(folder: Path, **changes: Any) -> Iterator[ServedByVllm]:
    """An engine whose processes run our own extension with faults that can be armed; without one it is ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_worker_env, "WORKER_EXTENSION", "engine_saboteur.Saboteur")
        patch.syspath_prepend(here := str(Path(__file__).parent))
        patch.setenv("PYTHONPATH", os.pathsep.join([here, *sys.path]))
        served = ServedByVllm(folder, **changes)
        yield served
        served.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Canary]:
    """A model; a checkpoint of it, trained, saved in shards and converted; what the trainer computes with that."""
    folder = tmp_path_factory.mktemp("trained")
    publisher = Publisher(base := folder / "base")
    build_tokenizer(["12 + 34 = 46"]).save_pretrained(base)
    settings = settings_of(base, canary=publisher.prompts, lr=0.01, eps=1e-8, max_policy_lag=None)
    trainer = Trainer(settings, rank=0, init_method=free_address())
    try:
        for step in range(3):
            trainer.forward_backward(batch_of(random_trajectories(step, 4)))
            trainer.optim_step()
        trainer.save_state(str(folder / "run/checkpoints/step-000003/trainer"))
        canary = score_canary(trainer._model, publisher.prompts, torch.device("cpu"))
    finally:
        trainer.close()
    ((converted, written),) = convert(folder / "run", base_model=str(base))
    assert written
    return base, converted, canary


@pytest.fixture(scope="module")
def served(trained: tuple[Path, Path, Canary]) -> Iterator[ServedByVllm]:
    """It starts with the converted weights: those of the publisher are others.

    As the engine of a run in which no request has `top_k`, but for the test that asks for what tokens were drawn from.
    """
    base, converted, canary = trained
    with sabotaged(base, model_path=str(converted), initial_version=0, num_kept=NUM_KEPT) as served:
        served.engine._num_kept = 0
        served.gap_at_start = served.run(served.engine.score(canary)).largest
        served.recover()
        served.gap_after_a_load = served.run(served.engine.score(canary)).largest
        yield served


def test_a_converted_checkpoint_is_served_from_disk_and_agrees_with_the_trainer(served: ServedByVllm) -> None:
    """Trained, saved in shards, converted, loaded by an engine that starts: it computes what the trainer does."""
    assert served.gap_at_start <= TOLERANCE
    assert not served.gap_after_a_load <= TOLERANCE, "these are other weights"


class TestVllm(EngineContract):
    pass


def test_it_says_what_each_token_was_drawn_from(served: ServedByVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its logprobs are of the distribution over these."""
    monkeypatch.setattr(served.engine, "_num_kept", NUM_KEPT)
    served.recover()
    check_masks(served)


def test_a_group_is_one_message_and_so_is_a_pass(served: ServedByVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the engine goes on with nothing of a group that was given up."""
    from vllm.v1.engine import EngineCoreRequest

    engine, core, processor = served.engine, served.engine._llm.engine_core, served.engine._llm.output_processor
    served.recover()
    sent: list[str] = []
    records: list[list[str]] = []
    encode, process = core.encoder.encode, processor.process_outputs

    def encoded(message: Any) -> Any:
        if isinstance(message, EngineCoreRequest):
            sent.append(message.request_id)
        return encode(message)

    def process_outputs(outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        records.extend(o.kv_transfer_params["members"] for o in outputs)
        return process(outputs, *args, **kwargs)

    monkeypatch.setattr(core.encoder, "encode", encoded)
    monkeypatch.setattr(processor, "process_outputs", process_outputs)

    async def ask(n: int, max_tokens: int) -> Any:
        return await engine.generate([50, 51], n=n, temperature=1.0, max_tokens=max_tokens, stop_token_ids=[])

    async def give_one_up() -> None:
        given_up = asyncio.ensure_future(ask(4, 150))
        while not engine.progress.num_tokens:
            await asyncio.sleep(0.002)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        await ask(1, 20)

    assert [len(c.tokens) for c in served.run(ask(8, 6))] == [6] * 8
    assert len(sent) == 1
    assert 6 <= len(records) <= 8, "passes; the others' prompts may be read after the first one's"
    assert len(records[-1]) == 8
    served.run(give_one_up())
    assert {name.rpartition("/")[0] for name in records[-1]} == {sent[-1]}


def test_groups_that_begin_together_are_one_message_and_end_as_if_each_had_come_alone(
    served: ServedByVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is given up before it has left: its end is told after its beginning."""
    engine = served.engine
    served.recover()
    send, kinds = engine._sender._send, list[bytes]()

    def sent(message: Any, target: Any) -> Any:
        kinds.append(bytes(message[0]))
        return send(message, target)

    def ask(index: int) -> Any:
        how: dict[str, Any] = dict(temperature=1.0, max_tokens=5, stop_token_ids=[], seed=index)
        return engine.generate([50, 51 + index], n=3, **how)

    async def together() -> list[Any]:
        given_up = asyncio.ensure_future(ask(7))
        others = [asyncio.ensure_future(ask(index)) for index in range(5)]
        await asyncio.sleep(0)
        assert not kinds, "all of this turn of the loop wait for its end"
        given_up.cancel()
        answers = await asyncio.gather(*others)
        with pytest.raises(asyncio.CancelledError):
            await given_up
        return answers

    alone = [served.run(ask(index)) for index in range(5)]
    monkeypatch.setattr(engine._sender, "_send", sent)
    assert served.run(together()) == alone
    added, aborted = kinds
    assert (added, aborted) == (b"\x03", b"\x01"), "a call, then an abort"
    assert served.run(ask(7)) != alone[0]
    assert kinds[2:] == [b"\x00"], "one that comes alone is added as vLLM does"


def test_what_the_engine_core_cannot_add_ends_the_groups_of_that_message(
    served: ServedByVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served.engine
    served.recover()

    async def both(**how: Any) -> Any:
        asked = (engine.generate([50, 51], n=2, temperature=1.0, stop_token_ids=[], **how) for _ in range(2))
        return await asyncio.gather(*asked, return_exceptions=True)

    monkeypatch.setattr("leeway.engines.vllm_sender.ADD_GROUPS", "no_such_call")
    failures = served.run(both(max_tokens=3))
    assert len(failures) == 2
    assert all("no_such_call" in str(failure) for failure in failures)
    monkeypatch.undo()
    assert [len(completions) for completions in served.run(both(max_tokens=3))] == [2, 2]


@pytest.mark.parametrize("is_encoded", [False, True])
def test_a_request_that_is_never_added_fails_beside_one_that_goes_on(
    served: ServedByVllm, monkeypatch: pytest.MonkeyPatch, is_encoded: bool
) -> None:
    """Also where it is encoded, but not to be read there: what left in the same message goes on."""
    engine = served.engine
    served.recover()
    encoder, how = engine._llm.engine_core.encoder, dict[str, Any](n=2, temperature=1.0, stop_token_ids=[], seed=3)
    encode, fails_with = encoder.encode, 53 if is_encoded else np.int64(53)

    def encoded(message: Any) -> Any:
        frames = encode(message)
        is_broken = getattr(message, "prompt_token_ids", None) == [50, 53]
        return [b"\xc1"] if is_broken and is_encoded else frames

    processor, passes = engine._llm.output_processor, list[Any]()
    process = processor.process_outputs

    def process_outputs(outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        passes.extend(outputs)
        return process(outputs, *args, **kwargs)

    async def all_three() -> list[Any]:
        begun = asyncio.Event()
        first = engine.generate([50, 51], max_tokens=40, heard=lambda *_: begun.set(), **how)
        under_way = asyncio.ensure_future(first)
        await begun.wait()
        others = (engine.generate([50, last], max_tokens=150, **how) for last in (52, fails_with))
        return await asyncio.gather(under_way, *others, return_exceptions=True)

    async def passes_to_come() -> int:
        await asyncio.sleep(0.1)
        passes.clear()
        await asyncio.sleep(0.2)
        return len(passes)

    monkeypatch.setattr(encoder, "encode", encoded)
    monkeypatch.setattr(processor, "process_outputs", process_outputs)
    under_way, with_it, failed = served.run(all_three())
    assert [len(c.tokens) for c in under_way] == [40, 40]
    assert isinstance(failed, Exception)
    assert [len(c.tokens) for c in with_it] == [150, 150]
    assert not engine._groups._groups
    assert not engine._groups._members
    assert served.run(passes_to_come()) == 0


def test_copies_of_a_model_share_a_group(served: ServedByVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each completion goes to a copy of its own choice, and is what it would be among the others."""
    engine, sent, heard = served.engine, list[str](), dict[int, list[int]]()
    served.recover()

    def ask() -> Any:
        def listen(index: int, tokens: list[int], *_: Any) -> None:
            heard.setdefault(index, []).extend(tokens)

        how: dict[str, Any] = dict(temperature=1.0, max_tokens=5, stop_token_ids=[], seed=11, heard=listen)
        return served.run(engine.generate([50, 51], n=3, **how))

    together = ask()
    expected, core = dict(heard), engine._llm.engine_core
    heard.clear()
    add = core.add_request_async

    async def add_request_async(request: Any) -> None:
        sent.append(request.request_id)
        await add(request)

    monkeypatch.setattr(core, "add_request_async", add_request_async)
    monkeypatch.setattr(engine, "_num_copies", 2)
    assert ask() == together
    assert heard == expected == {i: c.tokens for i, c in enumerate(together)}
    assert len(set(sent)) == 3


def test_the_engine_forgets_a_group_with_its_last_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several engines, the front end is told which requests have ended: that is the group it sent."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.request import Request, RequestStatus

    from leeway.engines.vllm_scheduler import _OfGroups

    added: dict[str, Request] = {}
    monkeypatch.setattr(Scheduler, "add_request", lambda self, request: added.update({request.request_id: request}))
    monkeypatch.setattr(Scheduler, "finish_requests", lambda self, names, status: [added[name] for name in names])
    scheduler: Any = object.__new__(_OfGroups)
    scheduler._left, scheduler.finished_req_ids_dict = {}, {0: set()}
    scheduler._beginnings = SimpleNamespace(take=lambda members: members, ended=lambda names: ([], []))

    def ask(name: str) -> None:
        params = SamplingParams(n=2, seed=7, max_tokens=3)
        scheduler.add_request(
            Request(request_id=name, prompt_token_ids=[1], sampling_params=params, pooling_params=None)
        )

    def passed(*members: tuple[str, FinishReason | None]) -> EngineCoreOutputs:
        row = LogprobsLists(np.array([[5]]), np.array([[-0.5]]), np.array([1]))
        outputs = [EngineCoreOutput(name, [5], row, finish_reason=reason) for name, reason in members]
        of_client = EngineCoreOutputs(outputs=outputs, finished_requests=set())
        monkeypatch.setattr(Scheduler, "update_from_output", lambda self: {0: of_client})
        assert scheduler.update_from_output() == {0: of_client}
        return of_client

    ask("group-1")
    ask("group-2")
    ask("17")
    assert list(added) == ["group-1/0", "group-1/1", "group-2/0", "group-2/1", "17"]
    of_one = [params for name, request in added.items() if "group-1" in name and (params := request.sampling_params)]
    assert [(params.n, params.seed) for params in of_one] == [(1, 7), (1, 8)], "as vLLM's own front end does"

    told = passed(("group-1/0", FinishReason.STOP), ("17", None), ("group-1/1", None))
    assert [o.request_id for o in told.outputs] == ["17", "pass"]
    assert told.outputs[1].new_token_ids == [5, 5]
    assert told.finished_requests == set()
    assert passed(("group-1/1", FinishReason.LENGTH)).finished_requests == {"group-1"}

    ended = scheduler.finish_requests(["group-2", "17"], RequestStatus.FINISHED_ABORTED)
    assert {request.request_id for request in ended} == {"group-2/0", "group-2/1", "17"}
    assert scheduler.finished_req_ids_dict == {0: {"group-2"}}
    assert scheduler._left == {}


@pytest.mark.parametrize(("head_size", "block"), [(48, 16), (32, 32)])
def test_prompts_share_what_they_begin_with(
    request: pytest.FixtureRequest, tmp_path: Path, head_size: int, block: int
) -> None:
    """Blocks of 16 tokens where vLLM's kernel computes these and of 32 else; and the last one as far as it is the
    same, unless that is three tokens or fewer.
    """
    if head_size == 32:
        served: ServedByVllm = request.getfixturevalue("served")
    else:
        served = ServedByVllm(tmp_path, hidden_size=2 * head_size)
        request.addfinalizer(served.close)
    served.recover()  # logprobs of scored prompts agree with the trainer's

    async def cached(num_tokens: int) -> int | None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = []
        for number in range(2):
            prompt = {"prompt_token_ids": list(range(2, 2 + num_tokens)), "cache_salt": f"of {num_tokens}"}
            outputs += [o async for o in served.engine._llm.generate(prompt, params, f"{num_tokens}-{number}")]
        return outputs[-1].num_cached_tokens

    assert [served.run(cached(n)) for n in (block, block + 4, 2 * block + 1)] == [block - 1, block, 2 * block]


def test_an_engine_asks_for_products_in_few_shapes(served: ServedByVllm) -> None:
    served.rpc("rows_of_products")
    prompt = [2 + i % 30 for i in range(131)]
    served.run(served.engine.generate(prompt, n=3, temperature=1.0, max_tokens=4, stop_token_ids=[]))
    rows = served.rpc("rows_of_products")
    assert max(rows) >= num_rows(131) > 131
    assert [number for number in rows if num_rows(number) != number] == []


def test_a_model_that_is_compiled_as_a_whole_keeps_its_number_of_rows_open(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops as ops

    monkeypatch.setattr(ops, "onednn_mm", lambda handler, x, bias: x * 2)
    in_few_shapes()
    compiled = torch.compile(lambda x: ops.onednn_mm(None, x, None), backend="eager", fullgraph=True)
    for number in (131, 140):
        x = torch.randn(number, 4)
        torch._dynamo.mark_dynamic(x, 0)  # refused where a number became a constant
        assert torch.equal(compiled(x), x * 2)


def test_products_of_any_number_of_rows_are_few_kernels_and_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops as ops

    plain, asked = ops.onednn_mm, set[int]()

    def product(handler: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        asked.add(len(x))
        return plain(handler, x, bias)

    monkeypatch.setattr(ops, "onednn_mm", product)
    in_few_shapes()  # what it sets is put back with the other
    weight, bias = torch.randn(48, 32), torch.randn(48)
    handler = ops.create_onednn_mm(weight.t(), 32)
    for number in (2, 17, 100, *range(257, 513)):
        x = torch.randn(number, 32)
        assert torch.equal(ops.onednn_mm(handler, x, bias), plain(handler, x, bias))
    assert len(asked) == 3 + STEPS
    folded = torch.randn(3, 37, 32)
    assert torch.equal(ops.onednn_mm(handler, folded, None), plain(handler, folded, None))


@pytest.mark.parametrize("what", ["is_hybrid", "is_attention_free", "use_mla"])
def test_vllm_chooses_the_blocks_of_what_is_not_plain_attention(what: str) -> None:
    plain = {"is_hybrid": False, "is_attention_free": False, "use_mla": False, "dtype": torch.float32}
    model = SimpleNamespace(**plain | {what: True}, get_head_size=lambda: 48)
    args: Any = SimpleNamespace(create_model_config=lambda: model)
    assert block_size(args) is None
    setattr(model, what, False)
    assert block_size(args) == 16


MLP = "model.layers.0.mlp.gate_proj.weight"
UP, OTHER_LAYER = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("fault", "module", "index", "bit", "check", "names"),
    [
        ("flip", "model.embed_tokens", 3, 30, "load", "model.embed_tokens"),  # token 0: in no canary prompt
        ("flip", "model.embed_tokens", 40 * 64, 31, "load", "model.embed_tokens"),
        ("flip", "lm_head", 95 * 64 + 1, 31, "load", "lm_head"),
        ("flip", "lm_head", 77, 0, "load", "lm_head"),  # the last bit of one weight, which no canary can see
        ("flip", "model.norm", 9, 31, "load", "model.norm"),
        ("flip", "model.layers.1.input_layernorm", 0, 23, "load", "model.layers.1"),
        ("flip", "model.layers.0.self_attn.qkv_proj", 1000, 26, "load", "model.layers.0"),
        ("flip", "model.layers.1.self_attn.o_proj", 2000, 31, "load", "model.layers.1"),
        ("flip", "model.layers.0.mlp.gate_up_proj", 3000, 10, "load", "model.layers.0"),
        ("flip", "model.layers.1.mlp.down_proj", 4000, 30, "load", "model.layers.1"),
        ("half", "model.layers.1.mlp.down_proj", 0, 0, "load", "model.layers.1"),
        ("half", "model.embed_tokens", 0, 0, "load", "model.embed_tokens"),
        ("half", "lm_head", 0, 0, "load", "lm_head"),
        ("swap", f"{MLP} {OTHER_LAYER}", 0, 0, "load", "model.layers.0, model.layers.1"),
        ("swap", f"{MLP} {UP}", 0, 0, "compute", "scored prompts"),  # within a layer: sums are equal, the function not
    ],
)
def test_a_load_that_went_wrong_inside_the_engine_is_refused_by_name(
    served: ServedByVllm, fault: str, module: str, index: int, bit: int, check: str, names: str
) -> None:
    served.rpc("arm", fault, module, index, bit)
    manifest, buckets = served.publisher.next()
    with pytest.raises(WeightSyncError) as refused:
        served.give(manifest, buckets)
    served.rpc("disarm")
    assert (refused.value.check, refused.value.policy_version) == (check, manifest.policy_version)
    assert names in str(refused.value)
    served.recover()


def test_a_load_in_place_raises_no_false_alarm(served: ServedByVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, at every pull. Rotary embeddings have no weights that anybody could publish."""
    monkeypatch.setattr(served.engine, "_double_buffer", False)
    assert served.rpc("heard_of_loads") == []
    served.give(*served.publisher.next())
    assert served.rpc("heard_of_loads") == []


def test_what_is_read_back_is_what_the_engine_computes_with(served: ServedByVllm) -> None:
    """A weight changed where the read-back looks changes the function: it does not look at a copy."""
    token = served.publisher.prompts.scored[0][2]
    canary = served.publisher.canary()
    assert served.run(served.engine.score(canary)).largest <= TOLERANCE
    modules = {"model.embed_tokens": token * 64, "lm_head": token * 64, "model.norm": 1}
    for module, index in {**modules, **dict.fromkeys(PACKED, 100)}.items():
        served.rpc("flip", module, index, 31)
        assert not served.run(served.engine.score(canary)).largest <= TOLERANCE, module
        served.rpc("flip", module, index, 31)
    assert served.run(served.engine.score(canary)).largest <= TOLERANCE


PACKED = [
    f"model.layers.{i}.{part}"
    for i in (0, 1)
    for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
]


def test_plain_weights_that_are_computed_with_are_read_as_they_lie(served: ServedByVllm) -> None:
    served.rpc("without_kernels", True)
    served.recover()
    assert all(served.rpc("plain", module) for module in PACKED)
    for module, index, bit in ((PACKED[0], 1000, 0), (PACKED[3], 4000, 31), ("lm_head", 77, 0)):
        served.rpc("arm", "flip", module, index, bit)
        with pytest.raises(WeightSyncError, match=f"differ from those published in {layer_of(f'{module}.weight')}"):
            served.give(*served.publisher.next())
        served.recover()
    served.rpc("without_kernels", False)
    served.recover()
    assert not any(served.rpc("plain", module) for module in PACKED)


def test_where_graphs_hold_tensors_a_load_ahead_leaves_them_where_they_are(served: ServedByVllm) -> None:
    """As on a GPU. What is packed anew for its kernel cannot be copied, and is loaded in the pause."""
    served.rpc("with_graphs", True)
    assert served.rpc("num_in_place") == 0
    served.recover()
    assert served.rpc("num_in_place") == 1
    served.rpc("without_kernels", True)
    served.rpc("with_graphs", False)
    served.recover()  # without packed weights
    served.rpc("with_graphs", True, False)
    at_first = [served.rpc("address", module) for module in COPIED]
    for num_planned in (0, 1, 2):  # the first one shows where vLLM's loaders put what
        served.recover()  # a version with weights of its own, read back, and scored as the trainer scores it
        assert served.rpc("num_by_plan") == num_planned
    assert [served.rpc("address", module) for module in COPIED] == at_first
    assert served.rpc("num_in_place") == 1
    served.rpc("arm", "flip", PACKED[1], 100, 0)
    with pytest.raises(WeightSyncError, match=r"differ from those published in model\.layers\.0"):
        served.give(*served.publisher.next())
    served.recover()
    assert (served.rpc("num_by_plan"), served.rpc("num_in_place")) == (3, 2), "it is not used again after that"
    served.rpc("with_graphs", False)
    served.recover()
    assert [served.rpc("address", module) for module in COPIED] != at_first
    served.rpc("without_kernels", False)
    served.recover()


COPIED = [*PACKED, "model.embed_tokens", "model.norm"]


def layer_of(name: str) -> str:
    return ".".join(name.split(".")[:3]) if ".layers." in name else name.rpartition(".")[0]


def test_an_engine_that_stands_still_is_found_out_and_may_go_on(served: ServedByVllm) -> None:
    process = psutil.Process(served.rpc("process_id"))
    progress = served.engine.progress

    async def hang() -> None:
        watching = asyncio.create_task(progress.watch(1.0))
        asking = asyncio.create_task(
            served.engine.generate([5] * 4, n=2, temperature=1.0, max_tokens=200, stop_token_ids=[])
        )
        await asyncio.sleep(0.1)
        process.suspend()
        try:
            with pytest.raises(EngineHung, match="it has 2 sequences to answer"):
                await watching
        finally:
            process.resume()
        await asking
        assert progress.silent_s() == 0

    served.run(hang())


def test_only_the_version_that_was_staged_is_loaded(served: ServedByVllm) -> None:
    """A call that comes late, of a load that was given up, finds another version, or none, or half of one."""
    served.recover()
    result, (check, why) = served.rpc("load_staged", "99")
    assert (result, check) == (None, "load")
    assert "told to load version 99, while None is staged" in why

    async def half_loaded() -> Any:
        staged, _ = await served.weight_sync("off")._staged(Publication(*served.publisher.next()))
        await served.engine._map(staged)
        answers = [
            await served.engine._llm.collective_rpc("load_staged", args=(version,))
            for version in ("99", str(served.publisher.version))
        ]
        staged.release()
        return answers

    for [(_, (check, why))] in served.run(half_loaded()):
        assert check == "load"
        assert f"while {served.publisher.version} is staged" in why
    served.recover()


@pytest.mark.parametrize("in_flight", ["off", "keep"])
def test_an_engine_that_stands_still_waits_for_no_turn_of_the_collector(
    served: ServedByVllm, in_flight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads and goes on while the collector's loop is busy with other things: what is in flight, or was asked before
    the load, has its next pass meanwhile.
    """
    served.recover()
    engine, versions, asked = served.engine, list[int](), asyncio.Event()
    passes, busy_until = list[tuple[float, int]](), 0.0
    core, processor = engine._llm.engine_core, engine._llm.output_processor
    call, process = core.call_utility_all_async, processor.process_outputs

    async def note(name: str, *args: Any) -> Any:
        if name == TAKE_STAGED:
            asyncio.get_running_loop().call_later(0.05, asked.set)
        return await call(name, *args)

    def note_pass(outputs: list[Any], ended: float, *args: Any, weight_version: Any, **kwargs: Any) -> Any:
        passes.append((ended, int(weight_version)))  # by the clock of the engine's own process
        return process(outputs, ended, *args, weight_version=weight_version, **kwargs)

    @contextmanager
    def busy() -> Iterator[None]:
        nonlocal busy_until
        time.sleep(4)
        busy_until = time.monotonic()
        yield

    def listen(_: int, tokens: list[int], __: Any, version: int) -> None:
        versions.extend([version] * len(tokens))

    def ask() -> asyncio.Task[Any]:
        how: dict[str, Any] = dict(n=1, temperature=1.0, max_tokens=240, stop_token_ids=[], heard=listen)
        return asyncio.create_task(engine.generate([5] * 4, **how))

    async def load() -> None:
        staged, _ = await served.weight_sync(in_flight)._staged(Publication(*served.publisher.next()))
        # Some of them wait for a place: however late this process hears of a pass, not all have ended by the load.
        asks = [ask() for _ in range(1 if in_flight == "off" else 2 * engine.places)]
        while not versions:
            await asyncio.sleep(0)
        loading = asyncio.create_task(engine.load_weights(staged, in_flight=in_flight, paused=busy))
        if in_flight == "off":
            await asked.wait()
            asks.append(ask())
        await loading
        await asyncio.wait_for(asyncio.gather(*asks), 120)
        await engine.read_back(staged)
        staged.release()

    monkeypatch.setattr(core, "call_utility_all_async", note)
    monkeypatch.setattr(processor, "process_outputs", note_pass)
    served.run(load())
    assert versions[-1] == served.publisher.version
    first_after = min(ended for ended, version in passes if version == served.publisher.version)
    assert first_after < busy_until, "it waited to be told to go on"
    served.recover()


def test_a_prefix_cache_kept_across_versions_is_refused(served: ServedByVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary's second route: prompt logprobs never read the cache, the continuation of a cached context does."""
    served.recover()  # leaves the canary's contexts in the prefix cache
    core = served.engine._llm.engine_core
    call = core.call_utility_all_async
    kept = lambda name, *args: call(name, *([args[0], False] if name == STAND_STILL else args))  # noqa: E731
    monkeypatch.setattr(core, "call_utility_all_async", kept)
    with pytest.raises(WeightSyncError, match=r"compute check: .* \d\.?\d*e-\d+ nats on scored .* prefix cache"):
        served.give(*served.publisher.next())
    monkeypatch.undo()
    served.recover()
