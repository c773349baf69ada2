"""What a collector holds its groups to. Apart from the collector: who starts one elsewhere need not load torchrl."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CollectorSettings:
    """What a collector holds its groups to: at most `max_in_flight` of them at a time, and as many as the engine holds.

    `timeout_s` does not count what a rollout waits in the engine's queue. An engine that is silent for `engine_stall_s`
    though it has work is lost.

    `seeded`: every request has its own seed, derived from the group (never with KV recomputed in flight on a CPU, where
    vLLM cannot rewind a request's generator). `greedy_baseline`: each group brings the reward of one more rollout,
    sampled greedily, under weights as new, and as proven, as the others.
    """

    group_size: int
    temperature: float
    max_prompt_tokens: int
    max_response_tokens: int
    max_model_len: int
    max_in_flight: int
    timeout_s: float
    engine_stall_s: float
    retries: int
    seed: int
    seeded: bool
    greedy_baseline: bool = False
