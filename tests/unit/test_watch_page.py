"""The page of `leeway watch` in a real browser: what people click, what hostile text must not do, and who can use it.

Skipped by name where there is no Chromium or no playwright. The browser waits for minutes before a test fails.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..forked import Forked
from ..watched_run import append_lines, make_run, rollout_row, rows_of, write_rollouts, write_spans, write_tokenizer

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
AXE = Path(__file__).parents[1] / "vendor/axe.min.js"
DEADLINE_MS = 120_000
PWNED = "<script>window.pwned=1</script><img src=x onerror=window.pwned=1><b onmouseover=window.pwned=1>bold</b>"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=DEADLINE_MS)
    with sync_playwright() as started:
        # One process shows all pages, one after the other: a new one compiles the page's programs again.
        args = ["--no-sandbox", "--disable-dev-shm-usage", "--renderer-process-limit=1"]
        browser = started.chromium.launch(executable_path=CHROMIUM, args=args)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in ("first", "second"):
        write_spans(make_run(folder / name) / "stages/async_rl")
        write_tokenizer(folder / name / "model")
    dead = make_run(folder / "dead", status="failed", cause="generator-0: its engine died: out of memory")
    write_spans(dead / "stages/async_rl")
    (dead / "stages/async_rl/logs/generator-0.log").write_text(f"started\n{PWNED}\x1b[2J\nEngineDead: out of memory\n")
    hostile = make_run(folder / "hostile", steps=8)
    stage = hostile / "stages/async_rl"
    write_tokenizer(hostile / "model")
    rows = [
        rollout_row(9, 0, text=PWNED, task_id=PWNED, finish_reason=PWNED, metrics={PWNED: 1.0}),
        rollout_row(9, 1, text="\u202egnorts\u202c\x1b]0;title\x07\x00", response_tokens=[99, 98], task_id="\u2066x"),
        rollout_row(9, 2, text="A" * 10_000_000, response_tokens=[99]),
        rollout_row(9, 3, text="", response_tokens=[5] * 2_000_000, policy_versions=[8] * 10, loss_mask=[True] * 10),
    ]
    write_rollouts(stage, 9, rows)
    append_lines(stage / "metrics.jsonl", [{"step": 9, "time": 1.0, "role": "x", f"eval/{PWNED}/exact_match": 0.5}])
    (hostile / "run.json").write_text('{"parts": [{"command": "<b>"}]}')
    return folder


@pytest.fixture(scope="module")
def serve(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The address of a page about these runs: the command itself, in a process."""
    processes: dict[tuple[str, ...], tuple[Forked, str]] = {}

    def start(*names: str) -> str:
        if names not in processes:
            env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
            folders = [str(runs / name) for name in names]
            process = Forked("from leeway.cli.main import main; main()", "watch", *folders, env=env)
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            found = re.search(r"http://\S+", line)
            assert found, line
            processes[names] = process, found[0]
        return processes[names][1]

    yield start
    for process, _ in processes.values():
        process.send_signal(signal.SIGTERM)
    for process, _ in processes.values():
        process.wait(120)


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(DEADLINE_MS)
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("dialog", lambda dialog: page.errors.append(f"dialog: {dialog.message}"))
    yield page
    assert page.errors == []
    context.close()


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect

    return expect(locator)


def opened(page: Any, address: str, view: str = "") -> None:
    page.goto(address)
    expect(page.locator("#runs .run").first).to_be_visible()
    if view:
        page.get_by_role("link", name=view, exact=True).click()


def test_the_page_says_who_waits_and_draws_the_curves(page: Any, serve: Any) -> None:
    opened(page, serve("first"))
    expect(page.locator("#sentence")).to_contain_text("The trainer waits 60 % of its time for a batch")
    expect(page.locator("#advice code")).to_have_text("rollout.num_generators")
    expect(page.locator("#last")).to_have_text("reward0.4entropy3.99e-4lag1step1 s", use_inner_text=False)
    expect(page.get_by_role("heading", name="Entropy has collapsed")).to_be_visible()
    expect(page.get_by_role("img", name="Reward: now training reward 0.4")).to_be_visible()
    words = page.locator("article", has_text="Entropy").get_by_text("How to read it")
    words.click()
    expect(page.get_by_text("Mean entropy of the policy on trained tokens")).to_be_visible()
    assert "token" not in page.url, "it is in the cookie"


def test_rollouts_are_filtered(page: Any, serve: Any) -> None:
    opened(page, serve("first"), "Rollouts")
    status = page.locator("#rollouts .tools [role=status]")
    expect(status).to_have_text("1 to 50 of 160")
    page.get_by_label("Reward at least").fill("1")
    page.get_by_role("button", name="Filter").click()
    expect(status).to_have_text("1 to 50 of 80")
    page.get_by_label("Ended by").select_option("length")
    expect(status).to_have_text("1 to 40 of 40")
    page.get_by_label("Step at most").fill("10")
    page.get_by_label("Step at most").press("Enter")
    expect(status).to_have_text("1 to 10 of 10")
    page.get_by_role("button", name="Clear").click()
    expect(status).to_have_text("1 to 50 of 160")
    page.get_by_role("button", name="Next").click()
    expect(status).to_have_text("51 to 100 of 160")
    page.get_by_label("Reward at least").fill("much")
    page.get_by_role("button", name="Filter").click()
    expect(page.get_by_role("alert")).to_have_text("reward_min: got 'much', expected a number")


def test_a_group_is_read_side_by_side_with_its_tokens_coloured(page: Any, serve: Any) -> None:
    opened(page, serve("first"), "Rollouts")
    page.get_by_label("Group", exact=True).fill("400")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("#rollouts .tools [role=status]")).to_have_text("1 to 4 of 4")
    page.get_by_role("button", name="group", exact=True).first.click()
    expect(page.locator(".columns article.rollout")).to_have_count(4)
    first = page.locator("article.rollout").first
    expect(first.locator(".turn.given").nth(1)).to_contain_text("Environment (masked: not trained on)")
    expect(first.locator(".turn.sampled .token").first).to_have_class("token cool-1")
    expect(first.locator(".turn.sampled .token").nth(1)).to_have_class("token warm-1")
    page.get_by_label("logprob", exact=True).check()
    expect(first.locator(".turn.sampled .token").first).to_have_class("token warm-1")
    page.get_by_label("trainer minus engine").check()
    expect(page.locator(".scale")).to_contain_text("the trainer finds it less likely by 0.3 nats and more")
    tokens = first.locator(".tokens .token")
    expect(tokens.nth(0)).to_have_class("token")
    expect(tokens.nth(1)).to_have_class("token")  # the environment's: no policy said it
    expect(tokens.nth(2)).to_have_class("token warm-4")
    expect(tokens.nth(3)).to_have_class("token cool-2")
    expect(first.locator(".difference")).to_contain_text("most −0.2 at token 2 (“two”), +0.02 at token 3")
    tokens.nth(2).focus()
    expect(page.locator(".under")).to_contain_text("trainer minus engine −0.2 nats")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".under")).to_contain_text("trainer minus engine +0.02 nats")
    page.get_by_label("advantage").check()
    expect(first.locator(".turn.sampled .token").first).to_have_class("token cool-2")
    expect(first.locator(".turn.sampled .token").first).to_have_text(" one", use_inner_text=False)
    page.get_by_label("token ids").check()
    expect(first.locator(".turn.sampled .token").first).to_have_text("3 ")
    first.locator(".turn.sampled .token").first.hover()
    expect(page.locator(".under")).to_contain_text("version 39 (lag 0)")


def test_a_task_is_compared_at_two_steps(page: Any, serve: Any) -> None:
    opened(page, serve("first"), "Rollouts")
    page.get_by_role("button", name="same task").first.click()
    expect(page.locator("article.rollout")).to_have_count(2)
    expect(page.locator("article.rollout h4").first).to_contain_text("Step 5,")
    expect(page.locator("article.rollout h4").nth(1)).to_contain_text("Step 40,")


def test_a_wait_is_followed_to_its_cause(page: Any, serve: Any) -> None:
    opened(page, serve("first"))
    page.get_by_role("link", name="Show the moment").click()
    expect(page.locator(".detail")).to_contain_text("driver waits for a batch")
    page.get_by_role("button", name="Follow: generator-0, generate").click()
    expect(page.locator(".detail")).to_contain_text("generator-0 generate")
    page.locator(".wait-row", has_text="replay waits").first.click()
    expect(page.locator(".detail")).to_contain_text("replay waits for generator-0")
    before = page.locator("#timeline .tools .quiet").inner_text()
    page.get_by_role("button", name="Zoom in").click()
    expect(page.locator("#timeline .tools .quiet")).not_to_have_text(before)
    page.locator("#timeline canvas").first.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#timeline .tools .quiet")).to_contain_text("after the first span")


def test_two_runs_are_overlaid(page: Any, serve: Any) -> None:
    opened(page, serve("first", "second"))
    reward = page.locator("article", has=page.get_by_role("heading", name="Reward"))
    expect(reward.locator(".legend li")).to_have_count(2)
    expect(reward.locator(".legend")).to_contain_text("second: training reward")
    page.get_by_role("checkbox", name="second").uncheck()
    expect(reward.locator(".legend li")).to_have_count(1)
    last = page.get_by_role("checkbox", name="first")
    last.click()
    expect(last).to_be_checked()  # one is always shown


def test_a_dead_run_opens_on_its_cause(page: Any, serve: Any) -> None:
    opened(page, serve("dead"))
    expect(page.locator("#sentence")).to_have_text("generator-0: its engine died: out of memory")
    death = page.locator("#death")
    expect(death).to_contain_text("the trainer waited for the groups that it held")
    expect(death).to_contain_text("generate group 400, version 39, tokens 16")
    expect(death.locator("pre")).to_contain_text("EngineDead: out of memory")
    expect(death.locator("pre")).to_contain_text("\\x1b[2J")
    assert page.locator("#death img, #death script, #death b").count() == 0


def test_a_late_answer_does_not_replace_that_to_a_later_question(page: Any, serve: Any) -> None:
    opened(page, serve("first"), "Rollouts")
    first = page.locator("#rollouts tbody tr").first
    expect(first).to_be_visible()
    late: list[Any] = []
    page.route("**/api/rollouts?*sort=oldest*", lambda route: late.append(route))
    with page.expect_request("**/api/rollouts?*sort=oldest*"):
        page.get_by_label("Order").select_option("oldest")
    with page.expect_response("**/api/rollouts?*sort=newest*"):
        page.get_by_label("Order").select_option("newest")
    shown = first.inner_text()
    with page.expect_event("requestfinished", lambda request: "sort=oldest" in request.url):
        late[0].continue_()
    page.evaluate("new Promise(done => setTimeout(done, 100))")  # in which it would be drawn
    assert first.inner_text() == shown


def test_lanes_that_come_late_do_not_replace_those_of_a_later_question(page: Any, serve: Any) -> None:
    opened(page, serve("first"), "Timeline")
    when = page.locator("#timeline .tools .quiet")
    expect(when).not_to_be_empty()
    shown = when.inner_text()
    late: list[Any] = []
    page.route("**/api/lanes?*", lambda route: late.append(route), times=1)
    with page.expect_request("**/api/lanes?*"):
        page.get_by_role("button", name="Zoom in").click()
    with page.expect_response("**/api/lanes?*"):
        page.get_by_role("button", name="Zoom out").click()
    with page.expect_event("requestfinished"):
        late[0].continue_()
    page.evaluate("new Promise(done => setTimeout(done, 100))")  # in which it would be drawn
    assert when.inner_text() == shown


def test_hostile_text_is_text(page: Any, serve: Any) -> None:
    opened(page, serve("hostile"), "Rollouts")
    rows = page.locator("#rollouts tbody tr")
    expect(rows.first).to_be_visible()
    page.get_by_label("Step at least").fill("9")
    page.get_by_role("button", name="Filter").click()
    expect(rows).to_have_count(4)
    page.get_by_role("button", name="group", exact=True).first.click()
    expect(page.locator("article.rollout")).to_have_count(4)
    expect(page.get_by_text("The last 1,995,904 tokens of the answer are not shown.")).to_be_visible()
    everything = page.locator("main").inner_text()
    assert "<script>window.pwned=1</script>" in everything
    assert "\\u202egnorts" in everything or "\\u2066x" in everything
    assert not set(everything) & set("\u202e\u2066\x1b\x00\x07")
    assert len(everything) < 200_000
    for view in ("Overview", "Timeline"):
        page.get_by_role("link", name=view, exact=True).click()
        expect(page.locator(f"#{view.lower()}")).to_be_visible()
    assert page.evaluate("window.pwned") is None
    assert page.locator("main img, main script, main b[onmouseover]").count() == 0


def test_a_live_page_shows_what_comes(page: Any, serve: Any, runs: Path) -> None:
    opened(page, serve("second"))
    expect(page.locator("#state")).to_contain_text("step 40 of 40")
    append_lines(runs / "second/stages/async_rl/metrics.jsonl", rows_of(41))
    expect(page.locator("#state")).to_contain_text("step 41 of 40")
    expect(page.get_by_role("img", name="Reward: now training reward 0.41")).to_be_visible()


def test_words_that_come_late_are_shown_and_stay_open(page: Any, serve: Any, runs: Path) -> None:
    """Curves that wait to be drawn anew when the words come are drawn with them, and what is read stays open."""
    late: list[Any] = []
    page.route("**/api/words?*", lambda route: late.append(route))
    opened(page, serve("second"))
    metrics = runs / "second/stages/async_rl/metrics.jsonl"
    reward = page.locator("article", has=page.get_by_role("heading", name="Reward"))
    expect(reward).to_be_visible()
    append_lines(metrics, rows_of(42))
    expect(page.locator("#state")).to_contain_text("step 42 of 40")  # the next drawing is three seconds after the first
    late[0].continue_()
    words = reward.get_by_text("How to read it")
    words.click()
    shown = reward.locator(".words dd").first
    expect(shown).to_be_visible()
    append_lines(metrics, rows_of(43))
    expect(page.get_by_role("img", name="Reward: now training reward 0.43")).to_be_visible()
    expect(shown).to_be_visible()
    expect(reward.locator("summary")).to_be_focused()


def test_everybody_can_use_it(page: Any, serve: Any) -> None:
    """Names, roles, contrast: axe-core, WCAG 2 A and AA, on every view; in the other colours, what colours decide."""
    everything = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
    of_colours = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
    page.emulate_media(color_scheme="dark")
    for address, view in [
        (serve("first", "second"), "Overview"),
        (serve("first"), "Timeline"),
        (serve("first"), "Rollouts"),
        (serve("dead"), "Overview"),
    ]:
        opened(page, address, view)
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        if view == "Rollouts":
            page.get_by_role("button", name="group", exact=True).first.click()
            expect(page.locator("article.rollout").first).to_be_visible()
        else:
            expect(page.locator(f"#{view.lower()} canvas").first).to_be_visible()
        page.evaluate(AXE.read_text(encoding="utf-8"))
        for theme, rules in (("dark", of_colours), ("light", everything)):
            expect(page.locator("html")).to_have_attribute("data-theme", theme)
            found = page.evaluate("rules => axe.run(document, rules)", rules)
            wrong = [(v["id"], [n["html"][:160] for n in v["nodes"][:3]]) for v in found["violations"]]
            assert wrong == [], f"{view}, {theme}"
            page.locator("#theme").click()


def test_the_keyboard_reaches_everything(page: Any, serve: Any) -> None:
    opened(page, serve("first"))
    page.evaluate("location.hash = '/rollouts'")
    expect(page.locator("#rollouts tbody tr").first).to_be_visible()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.textContent.slice(0, 20) || document.activeElement.name"))
    assert {"Skip to content", "Dark", "Overview", "Timeline", "Rollouts", "reward_min", "Filter", "step 40"} <= reached
