"""What a session of tests runs: see "Tests" in docs/design.md.

`make test-unit` leaves out the marker `slow` and tests/integration; `make test` has both; `make test-long` also
runs what is marked `long`, and gives sampled properties their full number.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
LONG = bool(os.environ.get("LEEWAY_LONG_TESTS"))


def sample(quick: T, whole: T) -> T:
    """How much to try: `whole` in `make test-long`, otherwise `quick`."""
    return whole if LONG else quick
