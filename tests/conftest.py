"""For all tests: what no test may do by accident."""

from __future__ import annotations

import os

# A Ray call outside of a run would start a cluster of its own inside pytest, and end pytest when that cluster goes.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
