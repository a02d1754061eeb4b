"""The report page in a real browser: no error, no request, no script, phone and desk, light and dark.

Set SPECFOLD_SCREENSHOTS to a folder to keep what the browser showed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cluster.output.report import Report
from tests.cluster.finished_runs import PREFLIGHT, FinishedRun
from tests.cluster.test_report import AUDIT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip
HOSTILE = [
    "<script>window.pwned = 1</script>",
    "</script></style></title></pre><script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "\"><svg onload='window.pwned = 1'><animate onbegin='window.pwned = 1' attributeName=x dur=1s>",
    "<details open ontoggle='window.pwned = 1'>x</details>",
    "<iframe srcdoc=\"<script>parent.pwned = 1</script>\"></iframe>",
    "<body onload='window.pwned = 1'><style>body { display: none }</style>",
    "<meta http-equiv=refresh content='0;url=javascript:window.pwned=1'>",
    "unbroken" * 150,
    "\u202etxet desrever \u0301\u0301\u0301\u0301 \x00 \x1b[31m",
]  # fmt: skip
CHARTS = ["throughput", "workers", "acceptance", "folding", "runs", "forwards", "lengths", "finish", "prompts"]
POLICY = "Content-Security-Policy"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the library playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A good run, and one whose every text is hostile, with and without the page's own policy against scripts."""
    root = tmp_path_factory.mktemp("report")
    good = FinishedRun(root / "good", num_shards=24, drafts=8)
    good.fill(
        errors={3: ("too_long", "The prompt has 9,000 tokens, the model takes 4,096."), 70: ("nan_logits", "NaN.")}
    )
    Report(good.store).write(good.summary(audit=AUDIT), good.tally.parts())
    bad = FinishedRun(root / "bad", num_shards=3, model=HOSTILE[1], prompts=HOSTILE[2], system_prompt=HOSTILE[0])
    for index in range(3):
        texts = {index * 8 + i: text for i, text in enumerate(HOSTILE[index * 3 :][:8])}
        bad.add_part(index, texts, {index * 8 + 2: (HOSTILE[3], HOSTILE[index])}, column=HOSTILE[index])
    first = {HOSTILE[8]: {"row_id": 0, "error": HOSTILE[4]}}
    summary = bad.summary(
        flags={HOSTILE[8]: 3}, audit=AUDIT | {"error": HOSTILE[1]},
        preflight=PREFLIGHT | {"failed_by_kind": {HOSTILE[8]: 1}, "first_failed": first},
    )  # fmt: skip
    Report(bad.store).write(summary, bad.tally.parts())
    naked = root / "naked.html"
    naked.write_text((root / "bad/report.html").read_text().replace(POLICY, "x-none"))
    return {"good": root / "good/report.html", "bad": root / "bad/report.html", "naked": naked}


class Visit:
    """A page, opened; everything that it complained of or asked for."""

    def __init__(self, browser: Any, path: Path, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def keep(self, name: str) -> None:
        folder = os.environ.get("SPECFOLD_SCREENSHOTS")
        if folder:
            self.page.screenshot(path=f"{folder}/{name}.png", full_page=True)


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1280, "light"), (1280, "dark"), (360, "dark")])
def test_the_page_is_whole_at_every_width_and_in_both_schemes(
    browser: Any, pages: dict[str, Path], width: int, scheme: str
) -> None:
    with Visit(browser, pages["good"], width, scheme) as visit:
        page = visit.page
        visit.keep(f"report-{width}-{scheme}")
        assert not visit.complaints
        assert [url for url in visit.requests if not url.startswith(("file:", "data:"))] == []
        for chart in CHARTS:
            box = page.locator(f"#{chart} svg").bounding_box()
            assert box["width"] > 200, chart
            assert box["height"] > 40, chart
            assert page.locator(f"#{chart} svg rect, #{chart} svg path.line, #{chart} svg path.busy").count() > 0
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(map(int, ground.removeprefix("rgb(").rstrip(")").split(","))) / 3
        assert (light > 200) == (scheme == "light")
        assert page.evaluate(CONTRAST) >= 4.5


CONTRAST = """() => {
  const light = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
    .map(x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4); 
    return .2126 * v[0] + .7152 * v[1] + .0722 * v[2] };
  const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!c.startsWith('rgba(0, 0, 0, 0')) return c } };
  return Math.min(...[...document.querySelectorAll('h1, h2, h3, p, dt, dd, th, td, a, pre, summary, .x span, .y span')]
    .filter(e => !e.closest('.skip')).map(e => { const a = light(getComputedStyle(e).color), b = light(ground(e));
      return (Math.max(a, b) + .05) / (Math.min(a, b) + .05) })) }"""
"""The weakest contrast between a text and what lies behind it."""


@pytest.mark.parametrize(("name", "width"), [("bad", 360), ("naked", 1280)])
def test_hostile_text_does_nothing(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    with Visit(browser, pages[name], width) as visit:
        page = visit.page
        visit.keep(f"hostile-{name}-{width}")
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        page.wait_for_timeout(200)
        assert page.evaluate("window.pwned") is None
        assert page.locator("script, iframe, img").count() == 0
        assert not visit.complaints
        assert len(visit.requests) <= 2
        assert page.url == pages[name].as_uri()
        assert "<script>window.pwned = 1</script>" in page.locator("body").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_everything_is_reached_by_keyboard_and_told_to_a_screen_reader(browser: Any, pages: dict[str, Path]) -> None:
    with Visit(browser, pages["good"], 360) as visit:
        page = visit.page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the numbers"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        summary = page.locator("#throughput summary")
        summary.focus()
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.getAttribute('role')") == "region"
        levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => +h.tagName[1])")
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(b - a <= 1 for a, b in pairwise(levels))
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
        assert len(ids) == len(set(ids))
        assert page.locator("svg").count() == page.locator("svg[role=img] > title + desc").count() == len(CHARTS)
        assert page.locator("table th:not([scope])").count() == 0
        assert page.get_by_role("img", name="Acceptance by depth").count() == 1
        dangling = (
            "[...document.querySelectorAll('a[href^=\"#\"]')].filter(a => !document.querySelector(a.hash)).length"
        )
        assert page.evaluate(dangling) == 0
