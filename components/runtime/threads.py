"""How the compute threads of a CPU process wait for each other."""

from __future__ import annotations

from collections.abc import Mapping


def yielding(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that make waiting threads sleep; set them before loading torch. {} if the user has set them.

    OpenMP's threads spin while they wait for the slowest one. If another process has that thread's core, they spin
    until the system gives it back: a small load next to a run costs several times its share.
    """
    if any(name in environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        return {}
    # The first is for GNU OpenMP (which torch and vLLM load here) and all others; LLVM's and Intel's also read the 2nd.
    return {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
