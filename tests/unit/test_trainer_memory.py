"""What a rank's tensors free stays with it, until others are to have it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, threading, torch
from leeway.trainer.memory import give_freed_back, keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(2):
        torch.ones(2**23)  # 32 MiB: 8,192 pages
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


@pytest.mark.parametrize("own", [{}, {"MALLOC_ARENA_MAX": "4"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}])
def test_freed_memory_is_kept_unless_the_user_decided_otherwise_and_given_back_when_asked(own: dict[str, str]) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    env |= own | {"THP_MEM_ALLOC_ENABLE": "0"}
    done = subprocess.run([sys.executable, "-c", FAULTS], env=env, capture_output=True, text=True, check=True)
    before, kept, given_back = map(int, done.stdout.split())
    assert before > 8_000
    if own:
        assert kept > 8_000
    else:
        assert kept < 100
        assert given_back > 8_000
