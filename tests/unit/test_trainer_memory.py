"""What a rank's tensors free stays with it, until others are to have it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

from leeway.trainer.offload import Offload

FAULTS = """
import ctypes, resource, threading
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no large pages: few faults would say little
import numpy as np
from leeway.trainer.memory import give_freed_back, keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    [np.ones(2**22) for _ in range(4)]  # of 32 MiB: 8,192 pages; the end of a thread's heap is never given back
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

def settled():
    # At first, heaps are begun, and what was freed may be too small by a few bytes.
    return [faults() for _ in range(10)][-1]

def rank():
    before = settled()
    keep_freed_memory()
    kept = settled()
    give_freed_back()
    print(before, kept, faults())

rank = threading.Thread(target=rank)  # ranks compute in a thread of their own
rank.start()
rank.join()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the memory of glibc")
@pytest.mark.parametrize("own", [{}, {"MALLOC_ARENA_MAX": "4"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}])
def test_freed_memory_is_kept_unless_the_user_decided_otherwise_and_given_back_when_asked(own: dict[str, str]) -> None:
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))
    }
    env |= own | {"NUMPY_MADVISE_HUGEPAGE": "0"}
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
    before, kept, given_back = map(int, done.stdout.split())
    pages = 4 * 2**25 // os.sysconf("SC_PAGESIZE")
    assert before > pages / 2
    if own:
        assert kept > pages / 2
    else:
        assert kept < pages / 10
        assert given_back > pages / 4


def test_a_rank_on_a_cpu_gives_it_back_where_engines_have_their_turn() -> None:
    with patch("leeway.trainer.offload.give_freed_back") as give:
        Offload([], [], torch.device("cpu")).leave(for_others=False)
        give.assert_not_called()
        Offload([], [], torch.device("cpu")).leave()
        give.assert_called_once()
