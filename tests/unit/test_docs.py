"""The documents say what is so: links lead somewhere, keys exist, tables are what the code computes."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path
from typing import get_args, get_origin

import pytest

from leeway.config import Config, load_config
from leeway.config.engines import ENGINES
from leeway.config.keys import all_keys, is_free_form
from leeway.replay.admission import AdmissionRule
from leeway.replay.stats import BufferStats
from leeway.section import Section, sections_in

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
KEY = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:=[^`]*)?`")
ASSIGNMENT = re.compile(r"(?<![\w./])((?:stages\.\w+\.)?[a-z_]+\.[a-z_.]+)=[^=\s]")
METRIC = re.compile(r'"((?:train|collector|param_server|replay|step|limit|reward_hacking)/[a-z_/]*[a-z])"')
HEADING = re.compile(r"### P = (\d+), u = (\d+), n = (\d+), W = (\d+), T = (\d+), L = (\d+)\n(.*?)(?=\n##)", re.DOTALL)


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.mark.parametrize(
    ("page", "generator"),
    [
        ("configuration.md", "generate_config_reference.py"),
        ("metrics.md", "generate_metrics_page.py"),
        ("keys_elsewhere.md", "generate_elsewhere_page.py"),
    ],
)
def test_a_generated_page_is_what_the_program_reads(page: str, generator: str) -> None:
    generated = runpy.run_path(str(ROOT / "docs" / generator))["page"]()
    fix = f"PYTHONPATH=src python docs/{generator} > docs/{page}"
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == generated, fix


def test_the_configuration_page_has_every_key() -> None:
    written = set(re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs/configuration.md").read_text(encoding="utf-8"), re.M))
    sections = {key for key in all_keys() if any(other.startswith(f"{key}.") for other in all_keys())}
    of_engines = {f"rollout.engine.{option}" for kind in ENGINES.values() for option in kind.options.model_fields}
    assert written - sections == (set(all_keys()) | of_engines) - sections


def test_the_configuration_page_has_what_each_entry_of_a_mapping_may_set() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    entries = {
        f"{section}.{name}": get_args(field.annotation)[1]
        for section, of in Config.model_fields.items()
        if isinstance(of.annotation, type) and issubclass(of.annotation, Section)
        for name, field in of.annotation.model_fields.items()
        if get_origin(field.annotation) is dict and sections_in(get_args(field.annotation)[1])
    }
    assert {"task.mix", "eval.tasksets", "env.by_taskset", "replay.buffers"} <= entries.keys()
    for key, section in entries.items():
        assert [name for name in section.model_fields if f"\n| `{key}.<name>.{name}` |" not in page] == []


def test_links_lead_to_files_of_the_project(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"https?://|mailto:|#", target):
            continue
        file = (page.parent / target.partition("#")[0]).resolve()
        assert file.is_relative_to(ROOT), f"{page.name}: {target} leaves the project"
        assert file.exists(), f"{page.name}: {target} does not exist"


def test_settings_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in [*KEY.findall(text), *ASSIGNMENT.findall(text)]:
        key = re.sub(r"^stages\.\w+\.", "", name)
        if key.partition(".")[0] not in Config.model_fields or key.startswith("stages.") or key.endswith(".py"):
            continue  # a file, a module, or NAME.key in words
        parts = key.split(".")
        known = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        assert any(k in all_keys() and (k == key or is_free_form(k)) for k in known), f"{page.name}: no setting {name}"


def test_the_checkpoint_of_the_readmes_run_is_the_one_that_the_quickstart_leaves() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    steps = load_config("quickstart").train.steps
    assert re.findall(r"checkpoints/ +(step-\d+)", readme) == [f"step-{steps:06d}"]


def test_every_metric_that_is_logged_is_explained() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    sources = [*(ROOT / "recipes").glob("*.py")]
    for part in ("algorithms", "collector", "driver", "replay", "runtime", "trainer"):
        sources += (ROOT / "components" / part).glob("*.py")
    logged = {f"replay/{field.name}" for field in dataclasses.fields(BufferStats)}
    for file in sources:
        logged |= set(METRIC.findall(file.read_text(encoding="utf-8")))
    assert len(logged) > 50
    assert sorted(name for name in logged if f"`{name}`" not in page) == []


def test_the_readme_names_every_part() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for entry in (ROOT / "components").iterdir():
        if entry.name.startswith("_") or entry.name == "py.typed":
            continue
        assert f"(components/{entry.name})" in readme, f"README.md: Where things are has no {entry.name}"


def test_the_examples_of_the_admission_rule_are_what_it_computes() -> None:
    examples = HEADING.findall((ROOT / "docs/staleness.md").read_text(encoding="utf-8"))
    assert len(examples) == 4
    for *letters, text in examples:
        P, u, n, W, T, L = map(int, letters)
        rule = AdmissionRule(
            groups_per_batch=P, updates_per_batch=u, publish_every=n, reorder_window=W, target_lag=T, max_lag=L
        )
        rows = [list(map(int, re.findall(r"\d+", line))) for line in text.splitlines() if re.match(r"\| \d", line)]
        assert len(rows) >= 5
        for queue_index, batch, last_use, oldest, starts in rows:
            assert [batch, last_use, oldest] == [
                rule.last_batch(queue_index),
                rule.last_use(queue_index),
                rule.min_policy_version(queue_index),
            ]
            assert rule.may_admit(queue_index, published=starts)
            assert starts == 0 or not rule.may_admit(queue_index, published=starts - 1)


def test_the_least_target_lags_are_what_the_rule_computes() -> None:
    text = (ROOT / "docs/staleness.md").read_text(encoding="utf-8").split("| P | u | n | W | least T |")[1]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text.split("\n## ")[0], re.M)
    assert rows
    for P, u, n, W, least in (map(int, row) for row in rows):
        rule = AdmissionRule(
            groups_per_batch=P, updates_per_batch=u, publish_every=n, reorder_window=W, target_lag=least, max_lag=least
        )
        assert rule.min_target_lag == least
