"""vLLM's `AsyncLLM` under published weights, with logprobs that a trainer can reproduce."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ..collector.clock import RolloutClock
from ..collector.engine import EngineLost, EngineSettings, Heard, LoadTimes, SampledTokens, StagedWeights
from ..collector.progress import Progress, Sampled
from ..config.engines import VllmOptions
from ..config.inputs import LoraConfig
from ..failures import Refused
from ..runtime.forks import engine_forks, started_by
from ..transports.device_memory import places_to_json
from ..transports.leases import Lease
from ..transports.shared_memory import SharedFolder
from ..transports.transport import DevicePlace, Place
from ..weights import Canary, CanaryGap, Manifest
from . import vllm_worker_env as worker_env
from .shards import left_out
from .vllm_blocks import block_size
from .vllm_core import STAND_STILL, TAKE_STAGED
from .vllm_groups import GROUP, PASS, Groups, Member, is_of_group
from .vllm_sender import Sender
from .vllm_versions import Versions, engine_arguments
from .vllm_worker_env import MANIFEST

CANARY_PRIORITY = -1
"""The priority of a canary's requests; all others have 0, and are served in the order they came."""


class VllmEngine:
    """See `collector.engine.Engine`. It computes in a process of its own. Unless told otherwise it starts with random
    weights.
    """

    @classmethod
    async def start(cls, settings: EngineSettings) -> VllmEngine:
        engine = cls(settings)
        try:
            if settings.initial_version is not None:
                await engine._llm.update_weight_version(str(settings.initial_version))
            if settings.lora is not None:
                await engine._hold_adapters(settings.lora, settings.model_path)
        except BaseException:
            engine.shutdown()
            raise
        return engine

    def __init__(self, settings: EngineSettings) -> None:
        self._shared_memory = SharedFolder()
        try:
            self._start(settings)
        except BaseException:
            self._shared_memory.remove()
            raise
        self._request_ids = map(str, itertools.count())  # vLLM makes them unique
        self._read_back = settings.read_back
        self._none_left_out = self._num_ranks == 1
        self._sleep_level = settings.sleep_level
        self._is_asleep = False
        self._num_loads = 0
        self._lent: dict[str, bool] = {}  # names of files that hold a version: whether the engine's process closed them
        self._spare: _Spare | None = None
        self._cache_salt: str | None = None

    def _start(self, settings: EngineSettings) -> None:
        self._num_kept = settings.num_kept
        options = VllmOptions(**settings.options)
        self._double_buffer = options.double_buffer
        self._num_ranks = options.tensor_parallel_size
        os.environ[worker_env.MEMORY_ENV] = str(self._shared_memory.path)
        worker_env.prepare(
            device=settings.device,
            cores=settings.cores,
            num_ranks=self._num_ranks,
            eager=bool(settings.options.get("enforce_eager")),
        )
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.exceptions import EngineDeadError

        self._dead_error = EngineDeadError
        args: dict[str, Any] = dict(
            model=settings.model_path,
            dtype=settings.dtype,
            max_model_len=settings.max_model_len,
            seed=settings.seed,
            load_format="dummy" if settings.initial_version is None else "auto",
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            max_logprobs=max(20, self._num_kept),
            enable_prefix_caching=True,
            scheduling_policy="priority",  # a canary overtakes what waits: its time must not grow with the batch
            disable_log_stats=True,
            worker_extension_cls=worker_env.WORKER_EXTENSION,
            scheduler_cls=worker_env.SCHEDULER,
            trust_remote_code=False,
            enable_sleep_mode=settings.sleep_level is not None and settings.device == "cuda",
        )
        self._versions: Versions | None = None
        if settings.lora is not None:
            from vllm.lora.request import LoRARequest

            from ..trainer.lora import published_targets

            self._targets = published_targets(settings.model_path, settings.lora)
            self._versions = Versions(LoRARequest)
            slot_rank = options.slot_rank(settings.lora.rank)
            args |= engine_arguments(slot_rank=slot_rank, num_versions=settings.num_versions, targets=self._targets)
        arguments = options.arguments
        if settings.head_dtype is not None:
            arguments["hf_overrides"] = {**arguments.get("hf_overrides", {}), "head_dtype": settings.head_dtype}
        if settings.device == "cpu":
            args |= dict(
                distributed_executor_backend="mp" if self._num_ranks > 1 else "uni",
                kv_cache_memory_bytes=int(settings.kv_cache_gib * 2**30) // self._num_ranks,  # of each rank
            )
            if settings.seeded:
                # Prefilling a prompt in parts throws a sampled token away; vLLM then rewinds the request's
                # generator by an offset, which CPU generators do not have, and the engine dies.
                args |= dict(enable_chunked_prefill=False)
        engine_args = AsyncEngineArgs(**(args | arguments))
        if settings.device == "cpu" and engine_args.block_size is None:
            engine_args.block_size = block_size(engine_args)
        with engine_forks():
            self._llm = AsyncLLM.from_engine_args(engine_args)
        vllm_config = self._llm.vllm_config
        head_dtype = str(vllm_config.model_config.head_dtype).removeprefix("torch.")
        if settings.head_dtype not in (None, head_dtype):
            self._llm.shutdown()
            raise Refused(
                f"model.head_dtype: got {settings.head_dtype}, expected {head_dtype}, in which this vLLM computes the "
                "output head of this model; leave it out, or set rollout.engine.name=hf"
            )
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._num_kept = min(settings.num_kept, self._vocab_size)
        self._num_copies = vllm_config.parallel_config.data_parallel_size
        self.places = vllm_config.scheduler_config.max_num_seqs * self._num_copies
        self.cache_tokens = (vllm_config.cache_config.num_gpu_blocks or 0) * (vllm_config.cache_config.block_size or 0)
        self.progress = Progress()
        self._groups = Groups(self._llm.engine_core.abort_requests_async)
        self._sender = Sender(self._llm.engine_core, self._groups.fail)
        self._watch_passes()
        # Per request, on the processor that answers environments: a deep copy of these parameters would cost more than
        # all that is done with them.
        self._params = functools.partial(
            SamplingParams, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True
        )

    async def _hold_adapters(self, lora: LoraConfig, path: str) -> None:
        """Before the first version. Raises `Refused` for targets that vLLM computes in no layer of its own."""
        with self._calling():
            [absent] = await self._llm.collective_rpc("hold_adapters", args=(self._targets, lora.scaling))
        if absent:
            raise Refused(
                f"model.lora.target_modules: got {absent[0]} and {len(absent) - 1} others for which vLLM's form of the "
                f"model {path} has no layer of that kind; leave them out, or set rollout.engine.name=hf"
            )

    def _watch_passes(self) -> None:
        """Take from every pass what is of groups, and tell `progress` of all. Outputs reach this process with each
        pass; vLLM's own statistics, which would say less, cost each token more.
        """
        processor, groups, passed = self._llm.output_processor, self._groups, self.progress.passed
        under: str | None = None  # the version of the last pass
        process, requests, propagate = processor.process_outputs, processor.request_states, processor.propagate_error

        def process_outputs(outputs: list[Any], timestamp: float | None = None, *args: Any, **kwargs: Any) -> Any:
            nonlocal under
            sampled, others = [], []
            for o in outputs:
                if o.request_id == PASS:
                    sampled += groups.passed(o, kwargs["weight_version"])
                elif is_of_group(o.request_id):
                    assert o.finished, f"vLLM told of tokens of {o.request_id} outside of the record of a pass"
                    sampled += groups.ended(o.request_id, str(o.finish_reason))
                else:
                    others.append(o)
                    if (request := requests.get(o.request_id)) is not None:
                        name = request.external_req_id
                        sampled.append(Sampled(name, o.request_id, len(o.new_token_ids), o.finished))
            before, under = under, kwargs["weight_version"]
            passed(timestamp or time.monotonic(), sampled, after_load=under != before)
            return process(others, timestamp, *args, **kwargs)

        def propagate_error(error: Exception) -> None:
            groups.fail(error)
            propagate(error)

        processor.process_outputs = process_outputs  # type: ignore[method-assign]
        processor.propagate_error = propagate_error  # type: ignore[method-assign]

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        *,
        n: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        seed: int | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        min_tokens: int = 0,
        clock: RolloutClock | None = None,
        heard: Heard | None = None,
        version: int | None = None,
    ) -> list[SampledTokens]:
        if self._num_copies > 1 and n > 1 and temperature:  # each may be sampled by another copy of the model
            how: dict[str, Any] = dict(top_p=top_p, top_k=top_k, min_tokens=min_tokens, clock=clock, version=version)
            how |= dict(temperature=temperature, max_tokens=max_tokens, stop_token_ids=stop_token_ids)
            alone = [
                asyncio.ensure_future(
                    self.generate(
                        prompt_tokens,
                        n=1,
                        seed=None if seed is None else seed + index,
                        heard=None if heard is None else functools.partial(_heard_as, heard, index),
                        **how,
                    )
                )
                for index in range(n)
            ]
            try:
                return [completion for (completion,) in await asyncio.gather(*alone)]
            finally:  # where one of them fails, nobody waits for the others
                for call in alone:
                    call.cancel()
                await asyncio.wait(alone)
        params = self._params(
            n=n if temperature else 1,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            stop_token_ids=list(stop_token_ids),
            ignore_eos=True,  # the stop tokens above are the whole truth, and the trainer knows them
            logprobs=self._num_kept if top_k else 0,
            seed=seed,
        )
        request_id = f"{GROUP}{next(self._request_ids)}"

        async def send(adapter: Any) -> None:
            if self._llm.errored:
                raise self._dead_error()
            request = self._llm.input_processor.process_inputs(
                request_id, self._prompt(prompt_tokens), params, ("generate",), lora_request=adapter
            )
            self._llm._run_output_handler()
            if self._num_copies > 1:  # vLLM chooses which
                await self._llm.engine_core.add_request_async(request)
            else:
                self._sender.add(request)

        with self._under_way(request_id, len(prompt_tokens), params.n, clock=clock, version=version) as adapter:
            members = await self._groups.sample(
                request_id,
                functools.partial(send, adapter),
                n=params.n,
                num_kept=self._num_kept if top_k else 0,
                version=version,
                heard=heard,
            )
        barred = sorted(params.all_stop_token_ids) if min_tokens else ()
        vocab_size = self._vocab_size if top_k else 0
        completions = [_sampled_tokens(m, vocab_size=vocab_size, barred=barred) for m in members]
        return completions if temperature else completions * n  # greedy: n times the same, sampled once

    async def score(self, canary: Canary, *, version: int | None = None) -> CanaryGap:
        """The scored prompts by prompt logprobs, which never read the prefix cache; the other contexts read what an
        earlier version may have left there.
        """
        prompts = canary.prompts
        scored = [self._scored_gaps(s, lp, version) for s, lp in zip(prompts.scored, canary.logprobs, strict=True)]
        cached = zip(prompts.cached, canary.next_tokens, canary.next_logprobs, strict=True)
        gaps = await asyncio.gather(*scored, *(self._continued_gap(*c, version) for c in cached))
        at = len(scored)
        return CanaryGap.of([gap for of_prompt in gaps[:at] for gap in of_prompt], [gap for [gap] in gaps[at:]])

    def stage(self, manifest: Manifest, places: Sequence[Place] = ()) -> StagedWeights:
        """Files in shared memory, which the engine's process maps; memory of a device, which that process opens."""
        shared = self._shared_memory
        if on_device := [place for place in places if isinstance(place, DevicePlace)]:
            return self._stage_on_device(manifest, on_device)
        files = [place for place in places if isinstance(place, Path)]
        if files:
            name, buckets = shared.link_files(files)
            return StagedWeights(manifest, buckets, lambda: shared.remove_files(name), name)
        # To make new pages takes longer than to copy into them.
        spare, self._spare = self._spare, None
        if spare is not None and [bucket.nbytes for bucket in spare.buckets] != list(manifest.bucket_bytes):
            shared.remove_files(spare.name)
            spare = None
        spare = spare or _Spare(*shared.new_files(manifest.bucket_bytes))
        self._lent[spare.name] = False
        return StagedWeights(manifest, spare.buckets, functools.partial(self._leave, spare), spare.name)

    def _leave(self, files: _Spare) -> None:
        """To the next version, if the engine's process has closed them; what it may still read is removed."""
        is_closed = self._lent.pop(files.name)
        if not is_closed or self._is_asleep:
            self._shared_memory.remove_files(files.name)
            return
        if self._spare is not None:
            self._shared_memory.remove_files(self._spare.name)
        self._spare = files

    def _stage_on_device(self, manifest: Manifest, places: Sequence[DevicePlace]) -> StagedWeights:
        """Nothing is opened in this process: its lease alone keeps the version until the engine's process has one."""
        shared, lease = self._shared_memory, Lease(Path(places[0].lease), places[0].number)
        name = shared.new_name()

        def release() -> None:
            shared.remove_files(name)
            lease.end()

        try:
            (shared.path / name / worker_env.PLACES).write_text(places_to_json(places))
        except BaseException:
            release()
            raise
        staged = StagedWeights(manifest, [], release, name)
        return replace(staged, opened=_InWorker(functools.partial(self._check_on_device, staged)))

    async def _check_on_device(self, staged: StagedWeights) -> None:
        """Some tensors between two passes, so that generation continues."""
        await self._map(staged)
        while not all(await self._ask("check_some", staged.manifest)):
            pass

    async def _map(self, staged: StagedWeights) -> None:
        await self._ask("map_staged", staged.manifest, await self._folder_of(staged), self._double_buffer)

    async def _folder_of(self, staged: StagedWeights) -> str:
        """Where the engine's process finds it, with its manifest."""
        folder = self._shared_memory.path / staged.name
        await asyncio.to_thread((folder / MANIFEST).write_text, staged.manifest.to_json())
        return str(folder)

    async def load_weights(
        self,
        staged: StagedWeights,
        *,
        in_flight: str,
        paused: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> LoadTimes:
        manifest, started = staged.manifest, time.monotonic()
        if self._versions is not None:
            await self._load_adapter(self._versions, staged)
            return LoadTimes(drain_s=0.0, pause_s=0.0, ahead_s=time.monotonic() - started)
        await self._map(staged)
        while not all(await self._ask("load_ahead", manifest)):
            pass
        self._num_loads += 1
        asked = time.monotonic()
        with ExitStack() as pausing:
            if self._is_asleep:
                pausing.enter_context(paused())
                await self._ask("reclaim_memory", manifest)
                self._is_asleep = False
                await self._taken(manifest)
                pause_s = time.monotonic() - asked
            else:  # both at once: the engine goes on from one to the other, and waits for no turn of this process
                still = asyncio.ensure_future(self._stand_still(in_flight))
                taken = asyncio.ensure_future(self._taken(manifest, still))
                taken.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # `still` may fail first
                pausing.callback(taken.cancel)
                await still
                self.progress.pause()
                pausing.enter_context(paused())
                try:
                    pause_s = await taken
                except asyncio.CancelledError:
                    self.progress.resume()  # as the engine does, unless it fails
                    raise
            # Kept keys and values are for those who run. vLLM cannot clear a prefix cache that is in use: new requests
            # look for their prefixes under another name. What was sent before the news of the load still shares the
            # old ones, of versions that were new enough for it. The name is of the load, not of the version: the same
            # version is loaded again after a load that went wrong, and by another run on this engine.
            self._cache_salt = str(self._num_loads) if in_flight == "keep" else None
            self.progress.resume()
        return LoadTimes(ahead_s=asked - started, drain_s=time.monotonic() - asked - pause_s, pause_s=pause_s)

    async def _load_adapter(self, versions: Versions, staged: StagedWeights) -> None:
        """Some layers between two passes, into a slot that no request is of."""
        manifest = staged.manifest
        await self.drop(manifest.policy_version)
        request = versions.next_request(manifest.policy_version)
        await self._ask("map_adapter", manifest, await self._folder_of(staged), request.lora_int_id)
        while not all(await self._ask("load_ahead", manifest)):
            pass
        versions.hold(manifest.policy_version, request)

    async def drop(self, version: int) -> None:
        """Forget an adapter. The rollouts of what is still of it have ended, though the news may come after this."""
        assert self._versions is not None
        adapter_id, left = self._versions.drop(version)
        if adapter_id is None:
            return
        with self._calling():
            # vLLM takes calls in the order in which they were made
            await self._groups.give_up(left)
            await self._llm.abort([name for name in left if not is_of_group(name)])
            await self._llm.collective_rpc("drop_adapter", args=(adapter_id,))

    async def sleep(self, *, in_flight: str) -> int:
        await self._stand_still(in_flight)
        answers = _of_ranks(await self._all("collective_rpc", "release_memory", None, (self._sleep_level,)))
        self._is_asleep = True
        if self._spare is not None:
            self._shared_memory.remove_files(self._spare.name)
            self._spare = None
        self.progress.pause()
        if failures := [failure for _, failure in answers if failure is not None]:
            raise EngineLost(f"the inference engine cannot sleep: {failures[0][1]}")
        return sum(released for released, _ in answers)

    async def _taken(self, manifest: Manifest, still: Awaitable[None] | None = None) -> float:
        """Load what was staged into an engine that stands still, or is about to, and go on; seconds without generation.

        Of several copies of the model none goes on unless all have loaded.
        """
        version = str(manifest.policy_version)
        if self._num_copies == 1:
            [(answers, seconds)] = await self._all(TAKE_STAGED, version)
            self._checked([answers], manifest)
            return seconds
        if still is not None:
            await still
        since = time.monotonic()
        await self._ask("load_staged", manifest, version)
        await self._all("set_weight_version", version)
        await self._all("resume_scheduler")
        return time.monotonic() - since

    async def _stand_still(self, in_flight: str) -> None:
        await self._all(STAND_STILL, "wait" if in_flight == "off" else "keep", in_flight != "keep")

    async def read_back(self, staged: StagedWeights) -> None:
        """Some layers between two passes, so that generation continues."""
        while not all(await self._ask("read_back_some", staged.manifest, self._read_back)):
            pass
        if not self._none_left_out:
            of_copies = await self._all("collective_rpc", "parts_taken", None, ())
            self._checked(of_copies, staged.manifest)
            for answers in of_copies:
                if names := left_out(staged.manifest.entries, [parts for parts, _ in answers]):
                    raise staged.manifest.error("load", f"the ranks together did not take all of {', '.join(names)}")
            self._none_left_out = True  # which part is whose never changes
        if staged.name in self._lent:
            self._lent[staged.name] = True

    async def _ask(self, method: str, manifest: Manifest, *args: Any) -> list[Any]:
        """The answers of all ranks. Raises WeightSyncError for the first that failed, EngineLost if one is gone."""
        return self._checked(await self._all("collective_rpc", method, None, args), manifest)

    async def _all(self, call: str, *args: Any) -> list[Any]:
        """What the engine core of each copy of the model answers; `AsyncLLM` itself says what the first one does."""
        with self._calling():
            return await self._llm.engine_core.call_utility_all_async(call, *args)

    def _checked(self, answers: list[list[Any]], manifest: Manifest) -> list[Any]:
        ranks = _of_ranks(answers)
        for rank, (_, failure) in enumerate(ranks):
            if failure is not None:
                check, detail = failure
                raise manifest.error(check, detail if len(ranks) == 1 else f"rank {rank}: {detail}")
        return [result for result, _ in ranks]

    async def forget_prompts(self) -> bool:
        with self._calling():
            return await self._llm.reset_prefix_cache()

    def process_ids(self) -> list[int]:
        return started_by(psutil.Process())

    def shutdown(self) -> None:
        self._llm.shutdown()
        del self._llm  # its finaliser needs modules that are gone at interpreter exit
        self._shared_memory.remove()

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Raises EngineLost where vLLM says that one of the engine's processes died."""
        try:
            yield
        except self._dead_error as error:
            raise EngineLost(f"the inference engine died: {error}") from None

    @contextmanager
    def _calling(self) -> Iterator[None]:
        with self.progress.call(), self._alive():
            yield

    async def _scored_gaps(self, sequence: list[int], expected: list[float], version: int | None) -> list[float]:
        params = self._params(max_tokens=1, temperature=1.0, prompt_logprobs=0)
        asked: dict[str, Any] = {"priority": CANARY_PRIORITY, "version": version}
        scored = (await self._final_output(sequence, params, **asked)).prompt_logprobs
        got = [scored[t][sequence[t]].logprob for t in range(1, len(sequence))]
        return [abs(a - b) for a, b in zip(got, expected, strict=True)]

    async def _continued_gap(self, context: list[int], token: int, expected: float, version: int | None) -> list[float]:
        # In a pass with a request that asks for tokens by their ids, vLLM gives no other request its likeliest ones.
        asked: dict[str, Any] = {"logprobs": self._num_kept} if self._num_kept else {"logprob_token_ids": [token]}
        params = self._params(max_tokens=1, temperature=1.0, **asked)
        answer = await self._final_output(context, params, priority=CANARY_PRIORITY, version=version)
        output = answer.outputs[0]
        found = output.logprobs[0]
        if token not in found:  # the trainer's likeliest token is below the least of the engine's
            return [abs(expected - min(given.logprob for given in found.values()))]
        return [abs(found[token].logprob - expected)]

    async def _final_output(
        self, prompt_tokens: list[int], params: Any, *, priority: int = 0, version: int | None = None
    ) -> Any:
        final, request_id = None, next(self._request_ids)
        with self._under_way(request_id, len(prompt_tokens), params.n, version=version) as adapter:
            async for output in self._llm.generate(
                self._prompt(prompt_tokens), params, request_id=request_id, priority=priority, lora_request=adapter
            ):
                final = output
        assert final is not None, "vLLM ended a request without an output"
        return final

    def _prompt(self, prompt_tokens: Sequence[int]) -> Any:
        # With its type a prompt is taken as it is; without, vLLM hands it to another thread that would tokenise text.
        prompt: Any = {"type": "token", "prompt_token_ids": list(prompt_tokens)}
        if self._cache_salt is not None:
            prompt["cache_salt"] = self._cache_salt
        return prompt

    @contextmanager
    def _under_way(
        self,
        request_id: str,
        num_prompt_tokens: int,
        n: int,
        *,
        clock: RolloutClock | None = None,
        version: int | None = None,
    ) -> Iterator[Any]:
        """Around a request. Yields the adapter that it asks for."""
        work = self.progress.request(request_id, num_sequences=n, prompt_tokens=num_prompt_tokens, clock=clock)
        under = nullcontext() if self._versions is None else self._versions.under(version, request_id)
        with under as adapter, work, self._alive():
            yield adapter


def _of_ranks(answers: list[list[Any]]) -> list[Any]:
    """Of all copies of a model, one after the other."""
    return [answer for of_copy in answers for answer in of_copy]


@dataclass(frozen=True)
class _Spare:
    """Files in shared memory that hold no version any more. `buckets`: uint8, mapped in this process."""

    name: str
    buckets: list[np.ndarray]


@dataclass(frozen=True)
class _InWorker:
    """A version on the device of the engine's process, which checks it."""

    check: Callable[[], Awaitable[None]]


def _sampled_tokens(member: Member, *, vocab_size: int, barred: Sequence[int]) -> SampledTokens:
    """`vocab_size` 0: each token was drawn from all of them."""
    kept = [_kept(named, vocab_size=vocab_size) for named in member.kept] if vocab_size else None
    assert member.finish_reason is not None, "it has not ended"
    return SampledTokens(
        member.tokens, member.logprobs, member.versions, member.finish_reason, kept=kept, barred=barred
    )


def _heard_as(heard: Heard, index: int, _: int, *said: Any) -> None:
    heard(index, *said)


def _kept(named: dict[int, float], *, vocab_size: int) -> list[int]:
    """The ids that a token was drawn from, itself first. Raises RuntimeError unless they are all."""
    kept = [token for token, logprob in named.items() if logprob > float("-inf")]
    # They come likeliest first: once one that was cut is there, all that were left are.
    if len(kept) == len(named) < vocab_size:
        raise RuntimeError(
            f"vLLM left more than {len(kept)} tokens to draw from, because many have equal logits; expected all of "
            "them to be named; lower rollout.top_k"
        )
    return kept
