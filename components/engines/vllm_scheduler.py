"""vLLM's scheduler, asked for whole groups and answering with whole passes. It runs in the engine's own process.

vLLM's front end sends n requests for n completions of a prompt, and is sent a record for each token of each of them.
With short answers these messages take a noticeable share of both processes. Here a request whose id begins with `GROUP`
stands for its n completions, and what a pass sampled for all such requests is one record of arrays. The other end of
both is `vllm_groups.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from copy import copy
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from .vllm_beginnings import Beginnings
from .vllm_core import add_calls
from .vllm_groups import COUNTS, ENDED, MEMBERS, PASS, REASONS, group_of, is_of_group, member_id


class _OfGroups(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._left: dict[str, set[str]] = {}  # members that have not ended, by group
        self._beginnings = Beginnings(self)

    def add_request(self, request: Request) -> None:
        if not is_of_group(request.request_id):
            super().add_request(request)
            return
        params = request.sampling_params
        assert params is not None
        own = copy(params)
        own.n = 1
        members: list[Request] = []
        for index in range(params.n):
            if params.seed is not None:
                own = copy(own)
                own.seed = params.seed + index
            member = Request(
                request_id=member_id(request.request_id, index),
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=own,
                pooling_params=None,
                client_index=request.client_index,
                arrival_time=request.arrival_time,
                lora_request=request.lora_request,
                cache_salt=request.cache_salt,
                priority=request.priority,
            )
            # Of the prompt they are the same for all, and were computed beside the last pass.
            member.block_hashes, member._block_hasher = list(request.block_hashes), request._block_hasher
            members.append(member)
        self._left[request.request_id] = {member.request_id for member in members}
        for member in self._beginnings.take(members):
            super().add_request(member)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._beginnings.before_pass()
        output = super().schedule(*args, **kwargs)
        for member in self._beginnings.passed(output):
            super().add_request(member)
        return output

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[Any, int, int, bool]:
        blocks, num_tokens, boundary, has_diverged = super()._get_local_prefix_cache_hit(request)
        return *self._beginnings.extended(request, blocks, num_tokens), boundary, has_diverged

    def set_pause_state(self, pause_state: Any) -> None:
        self._beginnings.let_go()
        super().set_pause_state(pause_state)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._beginnings.let_go()
        return super().reset_prefix_cache(*args, **kwargs)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Request]:
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        if request_ids is not None:
            request_ids = [one for name in request_ids for one in self._left.get(name, (name,))]
        unscheduled, ready = self._beginnings.ended(request_ids)
        for request in unscheduled:
            request.status = finished_status
        ended = [*super().finish_requests(request_ids, finished_status), *unscheduled]
        for request in ready:
            super().add_request(request)
        for request in ended:
            group = self._ends(request.request_id)
            if group is not None and self.finished_req_ids_dict is not None:
                self.finished_req_ids_dict[request.client_index].add(group)
        return ended

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, Any]:
        outputs = super().update_from_output(*args, **kwargs)
        for of_client in outputs.values():
            of_client.outputs, of_groups = _apart(of_client.outputs)
            if of_groups:
                of_client.outputs.append(_as_one(of_groups))
            ended = [self._ends(o.request_id) for o in of_groups if o.finish_reason is not None]
            if of_client.finished_requests is not None:
                of_client.finished_requests.update(group for group in ended if group is not None)
        return outputs

    def _ends(self, member: str) -> str | None:
        """The group, if this was its last member."""
        group = group_of(member)
        left = self._left.get(group)
        if left is None:
            return None
        left.discard(member)
        if left:
            return None
        del self._left[group]
        return group


class _OfGroupsAsync(_OfGroups, AsyncScheduler):
    pass


def scheduler(*, vllm_config: Any, **kwargs: Any) -> Scheduler:
    """In the place of a class: `scheduler_cls` is named before vLLM decides which kind it needs."""
    add_calls()  # this is the one place that vLLM calls in the process of its engine core
    kind = _OfGroupsAsync if vllm_config.scheduler_config.async_scheduling else _OfGroups
    return kind(vllm_config=vllm_config, **kwargs)


def _apart(outputs: list[Any]) -> tuple[list[Any], list[Any]]:
    apart = defaultdict[bool, list[Any]](list)
    for o in outputs:
        apart[is_of_group(o.request_id)].append(o)
    return apart[False], apart[True]


def _as_one(outputs: list[Any]) -> EngineCoreOutput:
    """The record of a pass: new tokens one member after the other, each with its row of logprobs."""
    rows = [o.new_logprobs for o in outputs if o.new_logprobs is not None and o.new_token_ids]
    ended = [i for i, o in enumerate(outputs) if o.finish_reason is not None]
    return EngineCoreOutput(
        request_id=PASS,
        new_token_ids=[token for o in outputs for token in o.new_token_ids],
        new_logprobs=LogprobsLists(
            np.concatenate([row.logprob_token_ids for row in rows]),
            np.concatenate([row.logprobs for row in rows]),
            np.empty(0, np.int64),
        )
        if rows
        else None,
        kv_transfer_params={
            MEMBERS: [o.request_id for o in outputs],
            COUNTS: [len(o.new_token_ids) for o in outputs],
            ENDED: ended,
            REASONS: [str(outputs[i].finish_reason) for i in ended],
        },
    )
