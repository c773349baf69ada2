"""A config made by clicking, in a real browser: it is checked while it is made, and it runs."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..forked import Forked

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
AXE = Path(__file__).parents[1] / "vendor/axe.min.js"
DEADLINE_MS = 180_000
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    process = Forked("from leeway.cli.main import main; main()", "studio", "quickstart")
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    found = re.search(r"http://\S+", line)
    assert found, line
    yield found[0]
    process.send_signal(signal.SIGTERM)
    process.wait(120)


@pytest.fixture
def page() -> Iterator[Any]:
    playwright.expect.set_options(timeout=DEADLINE_MS)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(DEADLINE_MS)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        assert errors == []
        browser.close()


def test_a_config_made_by_clicking_validates_and_runs(address: str, page: Any, tmp_path: Path) -> None:
    expect = playwright.expect
    page.goto(address)
    says = page.locator("#says")
    expect(says).to_contain_text("The settings are right")
    assert "token" not in page.url, "it is in the cookie"

    page.get_by_label("train.groups_per_step", exact=True).fill("-1")
    expect(says).to_contain_text("train.groups_per_step: got -1")
    expect(page.get_by_role("button", name="Run it")).to_be_disabled()
    page.get_by_label("train.groups_per_step", exact=True).fill("")

    page.get_by_label("Find a setting").fill("stages")
    page.get_by_label("stages", exact=True).fill("{sft: {train: {steps: 3}}, async_rl: null}")
    page.get_by_label("Find a setting").fill("")
    page.get_by_label("name", exact=True).fill("clicked")
    page.get_by_label("All settings").check()
    page.get_by_label("model.dtype", exact=True).select_option("float32")
    page.get_by_label("optimizer.lr", exact=True).fill("<b>4</b>")
    expect(says).to_contain_text("optimizer.lr: got '<b>4</b>'")
    page.get_by_label("optimizer.lr", exact=True).fill("0.001")
    expect(says).to_contain_text("The settings are right")
    expect(page.locator("#diff")).to_contain_text("+name: clicked")
    expect(page.locator("#numbers")).to_contain_text("3 steps")
    with page.expect_download() as saving:
        page.get_by_role("link", name="Save as mine.yaml").click()
    assert "name: clicked" in Path(saving.value.path()).read_text(encoding="utf-8")

    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})")
    assert [(v["id"], [n["html"][:160] for n in v["nodes"][:3]]) for v in found["violations"]] == []

    page.get_by_role("button", name="Run it").click()
    expect(page.locator("#runs strong")).to_have_text("completed")
    summary = json.loads((tmp_path / "runs/leeway/clicked/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 3)
