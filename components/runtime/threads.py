"""How the threads of a process that computes on a CPU wait for each other."""

from __future__ import annotations

from collections.abc import Mapping


def yielding(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that make waiting threads sleep; to be set before torch is loaded. {} where the user decided.

    OpenMP's threads spin while they wait for the slowest one. Where another process has its core, they spin all the
    time that it takes the system to give it back: a little load beside a run costs several times its share.
    """
    if any(name in environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        return {}
    # The first is GNU's (what torch and vLLM load here) and every other's; LLVM's and Intel's go by the second as well.
    return {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
