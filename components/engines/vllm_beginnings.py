"""What prompts begin with, computed once to the token: vLLM shares keys and values by whole blocks only.

What a prompt has after its last full block, up to 31 tokens on a CPU, each completion of a group would compute for
itself, and a system prompt that ends within a block each group. With short answers that can be most of what an engine
does. Here

- a group's others wait until a pass computes the first one's prompt. From the next pass on they begin at its last
  token;
- any other prompt begins where it differs from those that were computed last.

Either takes a copy of the block in which that is, by vLLM's own copying of blocks, in the pass that goes on from it. On
a GPU a pass takes as long with these few tokens as without: it is not done there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

MIN_TOKENS = 4
"""That a copy must save."""
NUM_KEPT = 8
"""Prompts that others are compared with: system prompts in use at a time, and more."""
MAX_USAGE = 0.9
"""Of the cache. Above it nothing is kept: what nobody computes with would not make room."""


@dataclass(frozen=True)
class _Prompt:
    """One that was computed. `tokens`: all but the last; `blocks`: where their keys and values are. `left`: who begins
    with all of them, and was not scheduled yet.
    """

    tokens: Sequence[int]
    blocks: list[KVCacheBlock]
    kind: tuple[Any, ...]
    left: set[str] = field(default_factory=set)


class Beginnings:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._size = scheduler.block_size
        self._are_shared = current_platform.is_cpu() and _can_share(scheduler)
        self._waiting: dict[str, list[Request]] = {}  # for a group's first one, by its id
        self._kept: OrderedDict[str, _Prompt] = OrderedDict()  # by the id of who computed it
        self._first_of: dict[str, str] = {}  # of those in some `left`

    def take(self, members: list[Request]) -> list[Request]:
        """Of a new group's members, those to schedule at once. The others come from `passed` or `ended`."""
        first, *others = members
        end = (first.num_prompt_tokens - 1) % self._size
        if not others or end < MIN_TOKENS or not self._may_share(first):
            return members
        self._waiting[first.request_id] = others
        return [first]

    def before_pass(self) -> None:
        if self._kept and self._manager.usage > MAX_USAGE:
            self.let_go()

    def passed(self, output: Any) -> list[Request]:
        """After a pass was scheduled. Those that may be scheduled from the next one on."""
        if not self._are_shared:
            return []
        if not output.total_num_scheduled_tokens and self._scheduler.waiting:
            self.let_go()
        names = [name for name in self._waiting if name in output.num_scheduled_tokens]
        for new in output.scheduled_new_reqs:
            if new.req_id in self._first_of:
                self._begun(new.req_id)
            elif new.req_id not in self._waiting:
                names.append(new.req_id)
        ready: list[Request] = []
        for name in names:
            request = self._scheduler.requests[name]
            if request.num_computed_tokens >= request.num_prompt_tokens:  # not one that is computed in parts
                others = self._waiting.pop(name, [])
                if self._may_share(request):
                    self._keep(request, others)
                ready += others
        return ready

    def found(self, request: Request, blocks: Any, num_tokens: int) -> tuple[Any, int]:
        """(blocks, number of tokens) that a request begins with. The arguments are those that vLLM found for it."""
        if not self._kept or request.num_output_tokens or not self._may_share(request):
            return blocks, num_tokens
        if (first := self._first_of.get(request.request_id)) is not None:
            prompt = self._kept[first]
            return self._manager.create_kv_cache_blocks((prompt.blocks,)), len(prompt.tokens)
        best, longest = None, num_tokens + MIN_TOKENS - 1
        full, kind = list(blocks.blocks[0]), _kind(request)
        assert request.prompt_token_ids is not None
        asked = request.prompt_token_ids[num_tokens : min(num_tokens + self._size, request.num_prompt_tokens - 1)]
        for prompt in self._kept.values():
            if prompt.kind == kind and prompt.blocks[: len(full)] == full:
                common = num_tokens + _common(asked, prompt.tokens[num_tokens : num_tokens + self._size])
                if common > longest:
                    best, longest = prompt, common
        if best is None:
            return blocks, num_tokens
        return self._manager.create_kv_cache_blocks((best.blocks[: len(full) + 1],)), longest

    def ended(self, ids: Iterable[str] | None) -> tuple[list[Request], list[Request]]:
        """These end before their time; None: all. Of those that the scheduler does not know yet: (those that end, too,
        those to schedule now because the first one of their group ends).
        """
        if ids is None:
            self.let_go()
            ending, self._waiting = [other for others in self._waiting.values() for other in others], {}
            return ending, []
        names = set(ids)
        ending: list[Request] = []
        ready: list[Request] = []
        for first, others in list(self._waiting.items()):
            ending += [other for other in others if other.request_id in names]
            others[:] = [other for other in others if other.request_id not in names]
            if first in names or not others:
                ready += self._waiting.pop(first)
        for name in names & self._first_of.keys():
            self._begun(name)
        return ending, ready

    def let_go(self) -> None:
        """Keep nothing any longer, such as before other weights are loaded: those that still wait compute it."""
        for prompt in self._kept.values():
            self._free(prompt)
        self._kept.clear()
        self._first_of.clear()

    def _may_share(self, request: Request) -> bool:
        return (
            self._are_shared
            and request.prompt_token_ids is not None
            and self._manager.prefix_cache_lookup_enabled(request)
        )

    def _keep(self, request: Request, others: list[Request]) -> None:
        assert request.prompt_token_ids is not None
        tokens = request.prompt_token_ids[:-1]
        blocks = list(self._manager.get_blocks(request.request_id).blocks[0][: -(-len(tokens) // self._size)])
        if not blocks:
            return
        self._manager.block_pool.touch(blocks)
        left = {other.request_id for other in others}
        self._kept[request.request_id] = _Prompt(tokens, blocks, _kind(request), left)
        self._first_of.update(dict.fromkeys(left, request.request_id))
        self._drop_old()

    def _begun(self, name: str) -> None:
        self._kept[self._first_of.pop(name)].left.discard(name)
        self._drop_old()

    def _drop_old(self) -> None:
        """The oldest first; those that somebody waits for stay."""
        unwanted = [name for name, prompt in self._kept.items() if not prompt.left]
        for name in unwanted[: max(0, len(unwanted) - NUM_KEPT)]:
            self._free(self._kept.pop(name))

    def _free(self, prompt: _Prompt) -> None:
        self._manager.block_pool.free_blocks(reversed(prompt.blocks))


def _can_share(scheduler: Scheduler) -> bool:
    """Whether all layers keep keys and values of all tokens, in blocks of one kind, and nobody else looks at these."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return (
        scheduler.connector is None
        and not scheduler.num_spec_tokens
        and [type(manager) for manager in managers] == [FullAttentionManager]
        and managers[0].block_size == scheduler.block_size
    )


def _kind(request: Request) -> tuple[Any, ...]:
    """Keys and values of the same tokens are the same where this is."""
    return request.cache_salt, request.lora_request and request.lora_request.lora_int_id


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    num = min(len(one), len(other))
    return next((i for i in range(num) if one[i] != other[i]), num)
