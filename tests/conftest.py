"""For all tests: what no test may do by accident."""

from __future__ import annotations

import os

# Its plugin loads it at the very end otherwise, when finalizers of an engine's sockets upset CPython 3.11's parser.
import hypothesis.internal.observability  # noqa: F401

# A Ray call outside of a run would start a cluster of its own inside pytest, and end pytest when that cluster goes.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
