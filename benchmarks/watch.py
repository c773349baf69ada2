"""What `leeway watch` costs on a long run: processor time and memory of its server, and what each page asks of it.

    python benchmarks/watch.py [STEPS] [ROLLOUTS_PER_STEP]   (by default 100000 and 10: 1.5 GB of temporary files)
    python benchmarks/watch.py --browser [STEPS] [ROLLOUTS_PER_STEP]     when a headless Chromium shows what

Times are of this process, so a busy machine does not change them much. A first look reads every file once; a second one
goes on from the index that the first one kept. With --browser they are those of a wall clock, from the navigation on,
for an empty cache and a complete one, three times each: the first paint, the sentence with the last values,
and the first curve.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from leeway.watch.folder import RunFolder
from leeway.watch.watcher import Watcher

METRICS = 110
"""Numbers in the lines of one step, as many as a run of `async_rl` writes."""
CHARTED = 30


def main() -> None:
    given = [int(argument) for argument in sys.argv[1:] if argument != "--browser"]
    steps, per_step = (*given, *(100_000, 10)[len(given) :])
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        write_run(run, steps, per_step)
        if "--browser" in sys.argv:
            in_browser(run, Path(scratch) / "cache")
            return
        for look in ("first look", "second look"):
            measure(look, run, Path(scratch) / "cache")


def measure(look: str, run: Path, cache: Path) -> None:
    begun = time.process_time()
    watcher = Watcher([RunFolder(run)], cache)
    while watcher.look():
        pass
    read = time.process_time()
    names = [f"train/metric_{i}" for i in range(CHARTED)]
    for name in names:
        watcher.series(0, "async_rl", name, float("-inf"), float("inf"), 500)
    charts = time.process_time()
    index = watcher.stage(0, "async_rl").index
    found = index.find({"reward_min": 0.9, "lag_max": 1.0}, sort="newest", limit=50, offset=0)
    listed = time.process_time()
    index.lags()
    watcher.close()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{look}: read {read - begun:.2f} s, {CHARTED} curves {charts - read:.3f} s, a filtered list of "
        f"{found['total']:,} rollouts {listed - charts:.3f} s; at most {peak_mb:.0f} MB"
    )


def in_browser(run: Path, cache: Path) -> None:
    """Three pages on an empty index, three on a complete one; the server is begun anew for each."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        browser.new_page().goto("about:blank")  # its own start is not the page's
        for _ in range(3):
            shutil.rmtree(cache, ignore_errors=True)
            shown(browser, run, cache, "no index")
        watcher = Watcher([RunFolder(run)], cache / "leeway/watch")
        while watcher.look():
            pass
        watcher.close()
        for _ in range(3):
            shown(browser, run, cache, "complete index")
        browser.close()


def shown(browser: Any, run: Path, cache: Path, index: str) -> None:
    command = [sys.executable, "-c", "from leeway.cli.main import main; main()", "watch", str(run)]
    server = subprocess.Popen(
        command, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    found = re.search(r"http://\S+", server.stdout.readline())
    assert found is not None
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.set_default_timeout(120_000)
    try:
        page.goto(found[0], wait_until="commit")
        page.wait_for_selector("#last dd")
        sentence_ms = page.evaluate("performance.now()")
        page.wait_for_selector("#overview canvas")
        curve_ms = page.evaluate("performance.now()")
        paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        process = psutil.Process(server.pid)
        print(
            f"{index}: first paint {paint_ms / 1000:.2f} s, sentence and last values {sentence_ms / 1000:.2f} s, first "
            f"curve {curve_ms / 1000:.2f} s; server {process.memory_info().rss / 2**20:.0f} MB, processor "
            f"{sum(process.cpu_times()[:2]):.1f} s since its start",
            flush=True,
        )
    finally:
        page.context.close()
        server.terminate()
        server.wait(120)


def write_run(run: Path, steps: int, per_step: int) -> None:
    stage = run / "stages/async_rl"
    (stage / "rollouts").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    random.seed(0)
    with (stage / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row: dict[str, Any] = {"step": step, "time": 1.7e9 + step, "role": "trainer", "step/total_s": 1.0}
            row |= {"train/reward/mean": random.random(), "step/wait_for_batch_s": 0.5}
            file.write(json.dumps(row | {f"train/metric_{i}": random.random() for i in range(METRICS)}) + "\n")
    for step in range(1, steps + 1):
        rows = [
            {
                "group_id": 10 * step + i // 5,
                "task_id": f"task-{(7 * step + i // 5) % 20_000}",
                "sequence_id": i,
                "prompt_tokens": [1] * 16,
                "response_tokens": [2] * 8,
                "text": "8 8 8 8",
                "reward": random.random(),
                "advantage": 0.1,
                "finish_reason": "stop",
                "policy_versions": [step - 1 - i % 3] * 8,
                "behavior_logprobs": [-0.1] * 8,
                "loss_mask": [True] * 8,
                "metrics": {},
            }
            for i in range(per_step)
        ]
        (stage / f"rollouts/step-{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
