"""The environment of what tests start: pytest's own, without what libraries set in it once they are imported."""

from __future__ import annotations

import os

# A Ray call outside of a run would start a cluster of its own inside pytest, and end pytest when that cluster goes.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
# Of all processes that tests start, engines too: they share the cores, and threads that wait for each other spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

AT_START = dict(os.environ)
SET_BY_TESTS = ("TMPDIR", "SERVE_TOKENS")
"""Variables that tests set for a run."""


def of_a_run() -> dict[str, str]:
    """A user's: without what tensordict, Ray and vLLM have left in this process."""
    return {**AT_START, **{name: os.environ[name] for name in SET_BY_TESTS if name in os.environ}}
