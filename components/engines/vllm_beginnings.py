"""What prompts begin with, computed once to the token: vLLM shares keys and values by whole blocks only.

Without this, each completion of a group computes what follows the prompt's last full block (up to 31 tokens on a CPU),
and each group the end of a system prompt that ends within a block. With short answers that can be most of what an
engine does. Here

- a group's others wait until a pass computes the first one's prompt. From the next pass on they begin at its last
  token;
- any other prompt begins where it differs from those that were computed last.

Either takes a copy of the block in which that is, by vLLM's own copying of blocks, in the pass that goes on from it. On
a GPU a pass takes as long with these few tokens as without: it is not done there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from ..shared_rows import num_same

LEAST_TOKENS = 4
"""That are worth a copy."""
MOST_PROMPTS = 8
"""That are kept, beside those that somebody waits for."""
MOST_USAGE = 0.9
"""Of the cache, with prompts in it that nobody else computes with: vLLM cannot make room of kept blocks."""


@dataclass(frozen=True)
class _Prompt:
    """One that was computed. `tokens`: all but the last; `blocks`: where their keys and values are. `unscheduled`: who
    begins with all of them, and was in no pass yet.
    """

    tokens: list[int]
    blocks: list[KVCacheBlock]
    kind: tuple[Any, ...]
    unscheduled: set[str] = field(default_factory=set)


class Beginnings:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._size = scheduler.block_size
        self._are_shared = current_platform.is_cpu() and _can_share(scheduler)
        self._held_back: dict[str, list[Request]] = {}  # by the id of their group's first one
        self._computing: set[str] = set()  # in some pass, perhaps not with their whole prompt yet
        self._kept: OrderedDict[str, _Prompt] = OrderedDict()  # by the id of who computed it
        self._begins_with: dict[str, str] = {}  # of those that are unscheduled

    def take(self, members: list[Request]) -> list[Request]:
        """Of a group's members, those to schedule at once. The others come from `passed` or `ended`."""
        first, *others = members
        end = (first.num_prompt_tokens - 1) % self._size
        if not others or end < LEAST_TOKENS or not self._may_share(first):
            return members
        self._held_back[first.request_id] = others
        return [first]

    def before_pass(self) -> None:
        """Make room for a block more of each that runs."""
        free = self._manager.block_pool.get_num_free_blocks()
        if self._kept and (self._manager.usage > MOST_USAGE or free < len(self._scheduler.running)):
            self._let_go_of_unused()

    def passed(self, output: SchedulerOutput) -> list[Request]:
        """After a pass was scheduled. Those that may be scheduled from the next one on."""
        if not self._are_shared:
            return []
        for new in output.scheduled_new_reqs:
            if new.req_id in self._begins_with:
                self._begun(new.req_id)
            elif new.req_id not in self._kept:
                self._computing.add(new.req_id)
        self._make_room(output.total_num_scheduled_tokens)
        ready: list[Request] = []
        for name in list(self._computing):
            request = self._scheduler.requests.get(name)
            if request is not None and request.num_computed_tokens < request.num_prompt_tokens:
                continue
            self._computing.discard(name)
            if request is not None:
                others = self._held_back.pop(name, [])
                if self._may_share(request):
                    self._keep(request, others)
                ready += others
        return ready

    def extended(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> tuple[KVCacheBlocks, int]:
        """(blocks, number of tokens) that a request begins with. The arguments are those that vLLM found for it."""
        if not self._kept or request.num_output_tokens or not self._may_share(request):
            return blocks, num_tokens
        if (computed_by := self._begins_with.get(request.request_id)) is not None:
            prompt = self._kept[computed_by]
            return self._manager.create_kv_cache_blocks((prompt.blocks,)), len(prompt.tokens)
        best, most = None, num_tokens + LEAST_TOKENS - 1
        full, kind = list(blocks.blocks[0]), _kind(request)
        assert request.prompt_token_ids is not None
        asked = request.prompt_token_ids[num_tokens : min(num_tokens + self._size, request.num_prompt_tokens - 1)]
        for prompt in self._kept.values():
            if prompt.kind == kind and prompt.blocks[: len(full)] == full:
                same = num_tokens + num_same(asked, prompt.tokens[num_tokens : num_tokens + self._size])
                if same > most:
                    best, most = prompt, same
        if best is None:
            return blocks, num_tokens
        return self._manager.create_kv_cache_blocks((best.blocks[: len(full) + 1],)), most

    def ended(self, ids: Iterable[str] | None) -> tuple[list[Request], list[Request]]:
        """These end before their time; None: all. Of those that the scheduler does not know yet: (those that end, too,
        those to schedule now because the first one of their group ends).
        """
        if ids is None:
            self.let_go()
            ending, self._held_back = [other for others in self._held_back.values() for other in others], {}
            return ending, []
        names = set(ids)
        ending: list[Request] = []
        ready: list[Request] = []
        for first, others in list(self._held_back.items()):
            ending += [other for other in others if other.request_id in names]
            others[:] = [other for other in others if other.request_id not in names]
            if first in names or not others:
                del self._held_back[first]
                ready += self.take(others) if others else []
        for name in names & self._begins_with.keys():
            self._begun(name)
        return ending, ready

    def let_go(self) -> None:
        """Keep nothing any longer, such as before other weights are loaded: those that still wait compute it."""
        for name in list(self._kept):
            self._drop(name)

    def _make_room(self, num_scheduled: int) -> None:
        """Where requests wait although the pass had places and tokens left, what is kept may be what they wait for."""
        scheduler = self._scheduler
        if not scheduler.waiting:
            return
        if not num_scheduled and not scheduler.running:
            self.let_go()
        elif (
            len(scheduler.running) < scheduler.max_num_running_reqs
            and num_scheduled < scheduler.max_num_scheduled_tokens
            and scheduler.pause_state == PauseState.UNPAUSED
        ):
            self._let_go_of_unused()

    def _let_go_of_unused(self) -> None:
        """Of prompts of which some block is in use nowhere else."""
        for name in [name for name, prompt in self._kept.items() if any(b.ref_cnt == 1 for b in prompt.blocks)]:
            self._drop(name)

    def _may_share(self, request: Request) -> bool:
        return (
            self._are_shared
            and request.prompt_token_ids is not None
            and request.prompt_embeds is None
            and not request.mm_features
            and self._manager.prefix_cache_lookup_enabled(request)
        )

    def _keep(self, request: Request, others: list[Request]) -> None:
        assert request.prompt_token_ids is not None
        name, tokens, kind = request.request_id, request.prompt_token_ids[:-1], _kind(request)
        same = next((n for n, prompt in self._kept.items() if prompt.kind == kind and prompt.tokens == tokens), None)
        if same is None:
            num_blocks = -(-len(tokens) // self._size)
            if not num_blocks:
                return
            blocks = list(self._manager.get_blocks(name).blocks[0][:num_blocks])
            self._manager.block_pool.touch(blocks)
            self._kept[name] = _Prompt(tokens, blocks, kind)
            same = name
        self._kept.move_to_end(same)
        for other in others:
            self._kept[same].unscheduled.add(other.request_id)
            self._begins_with[other.request_id] = same
        self._drop_old()

    def _begun(self, name: str) -> None:
        self._kept[self._begins_with.pop(name)].unscheduled.discard(name)
        self._drop_old()

    def _drop_old(self) -> None:
        unwanted = [name for name, prompt in self._kept.items() if not prompt.unscheduled]
        for name in unwanted[: max(0, len(unwanted) - MOST_PROMPTS)]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        prompt = self._kept.pop(name)
        for other in prompt.unscheduled:
            del self._begins_with[other]
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
