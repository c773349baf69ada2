"""How fast a step could be on this hardware, and how close a run comes to that.

    T_step >= max(Wg / Ng, Wt / Nt, (Lmax + Tt + Ts) / (L + 1))

Wg / Ng: all generators together make one batch's tokens, whatever environments do meanwhile. Wt / Nt: the trainer makes
one step. The third term: with lag bound L, a batch can be no further behind than L + 1 steps, each at least its longest
trajectory, its environment's time included, one training and one stop for weights long.

Where both sides have the same devices, in turns, the first two and the stop for weights are added up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

PROBE_TOKENS = 64
"""Engine speeds are measured on answers cut at this many tokens."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Measured at the start of a run, each side with the other idle.

    `generate_*`: of all engines, kept full: seconds per sequence until its first token, and for each further token.
    Where answers to one prompt share the rows of a pass until they differ: per group, and for each further row.
    `serial_*` along one trajectory alone, after `first_token_s`.
    """

    generate_s_per_sequence: float
    generate_s_per_token: float
    train_s_per_token: float
    optim_s: float
    first_token_s: float
    serial_s_per_token: float
    weight_sync_s: float


class LimitMeter:
    """The limit of each optimizer step, and how close the last `WINDOW` steps together came to it.

    Single steps mean little: a batch that was ready early makes its step look too fast, and the one before too slow.
    """

    WINDOW = 20

    def __init__(self, speeds: Speeds, *, max_policy_lag: int, in_turns: bool = False) -> None:
        self._speeds = speeds
        self._in_turns = in_turns
        self._max_policy_lag = max_policy_lag
        self._recent: deque[tuple[float, float]] = deque(maxlen=self.WINDOW)

    def step(
        self,
        *,
        sequences: float,
        response_tokens: float,
        trained_tokens: float,
        longest_response_tokens: float,
        longest_environment_s: float,
        step_s: float,
        generators: float = 1.0,
    ) -> dict[str, float]:
        """`limit/*` of a step: `response_tokens` of `sequences` to generate, `trained_tokens` through the trainer.

        Where answers share rows, `response_tokens` are rows of all passes, and `sequences` groups.
        `longest_environment_s`: most seconds that a group of it spent outside the engine. `generators`: how many there
        are for each one that was measured.
        """
        speeds = self._speeds
        further_tokens = max(0.0, response_tokens - sequences)
        generate_s = speeds.generate_s_per_sequence * sequences + speeds.generate_s_per_token * further_tokens
        generate_s /= generators
        train_s = speeds.train_s_per_token * trained_tokens + speeds.optim_s
        # The longest answer and the longest wait may belong to different groups: only the longer of the two is certain.
        longest_s = speeds.first_token_s + max(
            speeds.serial_s_per_token * (longest_response_tokens - 1), longest_environment_s
        )
        serial_s = (longest_s + train_s + speeds.weight_sync_s) / (self._max_policy_lag + 1)
        limit_s = max(generate_s, train_s, serial_s)
        if self._in_turns:
            limit_s = max(generate_s + train_s + speeds.weight_sync_s, serial_s)
        self._recent.append((limit_s, step_s))
        return {
            "limit/generate_s": generate_s,
            "limit/train_s": train_s,
            "limit/serial_s": serial_s,
            "limit/first_token_s": speeds.first_token_s,
            "limit/token_s": speeds.serial_s_per_token,
            "limit/step_s": limit_s,
            "limit/efficiency": sum(limit for limit, _ in self._recent) / sum(seconds for _, seconds in self._recent),
        }
