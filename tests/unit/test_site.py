"""The documentation as a site: it is built, every link in it leads somewhere, and it fetches nothing."""

from __future__ import annotations

import runpy
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def builder() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs/site/build.py")))


@pytest.fixture(scope="module")
def site(builder: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    builder.build(folder)
    return folder


class Page(HTMLParser):
    """Where a page's links lead, what it loads, and the places in it that can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        if "id" in found:
            self.places.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        elif tag == "link" and "href" in found and found.get("rel") not in ("canonical", "prev", "next"):
            self.loads.add(found["href"])
        elif "src" in found:
            self.loads.add(found["src"])


def test_every_page_is_there_and_every_link_leads_somewhere(site: Path) -> None:
    pages = {path: Page(path) for path in site.glob("*.html")}
    sources = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    assert {path.stem for path in pages} >= sources | {"index", "api", "CONTRIBUTING", "CHANGELOG"}
    shown = (site / "index.html").read_text(encoding="utf-8")
    assert [name for name in sorted(sources) if f"{name}.html" not in shown] == [], "docs/site/zensical.toml: nav"
    for path, page in pages.items():
        if path.stem == "404":
            continue
        for target in page.links:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            assert there.is_file(), f"{path.name}: {target}"
            if parts.fragment and there in pages:
                assert unquote(parts.fragment) in pages[there].places | {"__toc"}, f"{path.name}: {target}"


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for path in site.glob("*.html"):
        for target in Page(path).loads:
            assert not urlsplit(target).netloc, f"{path.name} loads {target}"


def test_the_api_page_has_what_the_package_offers(site: Path) -> None:
    import leeway

    page = (site / "api.html").read_text(encoding="utf-8")
    assert [name for name in vars(leeway)["__all__"] if not name.startswith("_") and f">{name}" not in page] == []


def test_links_into_the_source_become_text(builder: SimpleNamespace) -> None:
    text = "[`a.py`](../components/a.py), [b](staleness.md#the-rule), [c](../README.md), [d](https://d.org)\n"
    code = "```\n[x](../components/x.py)\n```\n"
    names = {"staleness.md"}
    linked = builder._with_links(text + code, ROOT / "docs/design.md", names)
    assert linked == "`a.py`, [b](staleness.md#the-rule), [c](start.md), [d](https://d.org)\n" + code


def test_a_link_that_leads_nowhere_is_an_error(builder: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/README.md").write_text("# A\n\n[there](README.md#not-there)\n")
    (tmp_path / "zensical.toml").write_text('[project]\nsite_name = "A"\ndocs_dir = "pages"\n')
    with pytest.raises(SystemExit, match="anchor does not exist"):
        builder._run_zensical(tmp_path)
