"""The verdict on settings: `leeway validate` in a process of its own, which imports what the settings name."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import sys
from collections.abc import Sequence
from typing import Any

LIMIT_S = 120.0
COMMAND = [sys.executable, "-c", "from leeway.cli.main import main; main()", "validate"]


class Checker:
    """Checks one after the other. `check` raises TimeoutError after `LIMIT_S`."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._presets: dict[str, str] = {}  # YAML of each, unchanged

    async def check(self, config: str, overrides: Sequence[str], *, whole: bool) -> dict[str, Any]:
        """What `leeway validate --json` says, with `diff`: lines of the YAML that are other than the config's own.

        `whole`: read data and models, and import the user's code, too.
        """
        async with self._turn:
            found = await _validate(config, overrides, whole=whole)
            if found["ok"] and config not in self._presets:
                plain = await _validate(config, (), whole=False)
                self._presets[config] = plain.get("yaml", "")
        if found["ok"]:
            own = self._presets[config].splitlines(), found["yaml"].splitlines()
            found["diff"] = [line for line in difflib.unified_diff(*own, n=2, lineterm="")][2:]
        return found


async def _validate(config: str, overrides: Sequence[str], *, whole: bool) -> dict[str, Any]:
    arguments = [*COMMAND, "--json", *([] if whole else ["--quick"]), "--", config, *overrides]
    process = await asyncio.create_subprocess_exec(
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    try:
        return json.loads(said.splitlines()[-1])
    except (ValueError, IndexError):  # it printed something else: an error of its own, or of the user's code
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["it ended without a word"]
        return {"ok": False, "refused": last, "key": None}
