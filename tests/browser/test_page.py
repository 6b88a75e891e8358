"""The status page in a real Chromium: it keeps itself current, says when it cannot, and everybody can use it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import pytest
from chromium import serve
from scenes import HOSTILE, SCENES, Scene, busy, hostile, idle, peer, stale

expect = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed").expect
pytestmark = pytest.mark.browser

USUAL_MS = 2_000
"""Between two updates; the page's clock is the test's."""

Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Open pages whose time stands still; none may complain, and none may ask another host."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_one(url: str, *, width: int = 1_200, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        host = urlsplit(url).netloc
        page.on("request", lambda one: None if urlsplit(one.url).netloc == host else complaints.append(one.url))
        page.clock.install()
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    # A node that is gone is no fault of the page, be it before it answered or in the middle of an answer.
    gone = ("ERR_CONNECTION_REFUSED", "ERR_CONTENT_LENGTH_MISMATCH")
    assert [text for text in complaints if not any(cause in text for cause in gone)] == []


def update(page: Any) -> None:
    """Let the page's own timer fire once."""
    with page.expect_response(lambda answer: answer.request.resource_type == "fetch") as answer:
        page.clock.run_for(USUAL_MS)
    answer.value.finished()
    expect(page.locator("#connection")).to_have_text("Live")


def check_by_axe(page: Any) -> None:
    """Hold a page to rules of WCAG 2.2 AA and best practice, in both schemes: contrast, names, landmarks, tables."""
    pytest.importorskip("axe_playwright_python", reason="axe-core is not installed (pip install axe-playwright-python)")
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text())
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate("axe.run()")
        assert len(found["passes"]) > 20
        assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found["violations"]] == []


def test_what_changes_is_shown_without_loading_the_page_again(open_page: Open) -> None:
    scene = idle()
    with serve(scene) as url:
        page = open_page(url + "/")
        assert page.locator(".headline").inner_text().split("\n")[-1] == "Ready"
        page.evaluate("window.marker = 1")
        scene.fields |= {"version_lag": 2, "latest_seen_version": 419, "fetch_wanted_bytes": 1_000}
        scene.fields |= {"peer_list": [peer(1, received_bytes=3_000_000)]}
        scene.log("warning", "something happened")
        update(page)
        expect(page.locator(".headline")).to_contain_text("2 versions behind")
        assert page.title().startswith("2 versions behind")
        assert page.locator("progress").get_attribute("aria-label") == "Version 0.419"
        assert page.locator("#log-lines li").first.locator(".text").inner_text() == "something happened"
        assert "3.0 MB" in page.locator("#map").inner_text()
        assert page.evaluate("window.marker") == 1


def test_what_somebody_works_with_is_left_alone(open_page: Open) -> None:
    scene = busy()
    with serve(scene) as url:
        page = open_page(url + "/")
        page.locator("summary", has_text="Lag as a table").click()
        page.locator("input[name=text]").fill("version")
        page.evaluate("getSelection().selectAllChildren(document.querySelector('#figures'))")
        figures = page.locator("#figures").inner_text()
        scene.fields["peers"] = 77
        scene.log("info", "version 0.500 is new")
        page.clock.run_for(USUAL_MS)
        expect(page.locator("#log-lines")).to_contain_text("version 0.500")
        assert page.locator("#figures").inner_text() == figures
        assert page.evaluate("document.activeElement.name") == "text"
        assert page.locator("input[name=text]").input_value() == "version"
        assert page.locator("details[open] #rows-lag").is_visible()
        page.evaluate("getSelection().removeAllRanges()")
        update(page)
        expect(page.locator("#figures")).to_contain_text("77")


def test_a_node_that_is_gone_is_said_so_asked_less_often_and_taken_up_again(open_page: Open) -> None:
    scene = idle()
    with serve(scene) as url:
        page = open_page(url + "/")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(USUAL_MS)
    expect(page.locator("#connection")).to_contain_text("does not answer")
    assert page.locator("body.gone").count() == 1
    assert "Ready" in page.locator(".headline").inner_text()  # what was known is still shown
    check_by_axe(page)
    said = page.locator("#connection").inner_text()
    for _ in range(30):
        page.clock.run_for(10_000)
        page.wait_for_timeout(50)
    assert 5 <= len(asked) <= 15  # 150 at the usual pace of these five minutes
    assert page.locator("#connection").inner_text() == said  # said once: it is read aloud
    with serve(scene, port=int(urlsplit(url).port or 0)):
        page.evaluate("{ const ask = fetch; window.asked = 0; window.fetch = (...how) => (asked++, ask(...how)); } 0")
        while not page.evaluate("asked"):  # then the page's time stands still until the answer is here
            page.clock.run_for(1_000)
        expect(page.locator("#connection")).to_have_text("Live")
        assert page.locator("body.gone").count() == 0


def test_a_pause_lasts_until_it_is_ended(open_page: Open) -> None:
    with serve(idle()) as url:
        page = open_page(url + "/")
        page.get_by_role("button", name="Pause updates").click()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.clock.run_for(60_000)
        page.wait_for_timeout(100)
        assert asked == []
        assert page.locator("#connection").inner_text().startswith("Paused at ")
        assert page.locator("#pause").get_attribute("aria-pressed") == "true"
        page.locator("#pause").click()
        expect(page.locator("#connection")).to_have_text("Live")


def test_the_log_is_filtered_at_once_and_the_address_says_how(open_page: Open) -> None:
    with serve(busy()) as url:
        page = open_page(url + "/")
        page.get_by_label("Level").select_option("warning")
        page.clock.run_for(300)
        expect(page.locator("#log-lines li")).to_have_count(1)
        assert "level=warning" in page.url
        page.get_by_label("Text").fill("nothing has this")
        page.clock.run_for(300)
        expect(page.locator("#log-lines")).to_contain_text("No line passes")
        page.reload()
        assert page.get_by_label("Text").input_value() == "nothing has this"
        assert page.get_by_label("Level").input_value() == "warning"


def test_without_scripts_everything_can_be_read_and_filtered(open_page: Open) -> None:
    with serve(busy()) as url:
        page = open_page(url + "/", java_script_enabled=False)
        for text in ("2 versions behind", "12 s left", "Bandwidth", "Who feeds whom", "is being fetched from 2 peers"):
            assert text in page.locator("body").inner_text()
        assert page.get_by_text("Load it again").is_visible()
        assert not page.locator("#pause").is_visible()
        page.get_by_label("Level").select_option("warning")
        page.get_by_role("button", name="Filter").click()
        expect(page.locator("#log-lines li")).to_have_count(1)  # a new page, which may still be loading
        page.locator("summary", has_text="Bandwidth as a table").click()
        assert "MB/s" in page.locator("#rows-bandwidth").inner_text()


def test_what_strangers_name_is_shown_and_never_run(open_page: Open) -> None:
    scene = hostile()
    with serve(scene) as url:
        page = open_page(url + "/")
        scene.log("warning", HOSTILE + "again")
        update(page)
        expect(page.locator("#log-lines")).to_contain_text("again")
        assert page.title() != "taken"
        assert HOSTILE in page.locator("h1").inner_text()
        assert HOSTILE in page.locator("#log-lines").inner_text()
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 1


def test_a_script_put_into_the_page_is_refused_by_its_policy(browser: Any) -> None:
    with serve(idle()) as url:
        page = browser.new_page()
        refused: list[str] = []
        page.on("console", lambda message: refused.append(message.text))
        page.goto(url + "/")
        add = "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.taken = 1'}))"
        page.evaluate(add)
        assert page.evaluate("window.taken") is None
        assert "Content Security Policy" in " ".join(refused)
        page.close()


OPEN_ALL = "document.querySelectorAll('details').forEach(one => { one.open = true; })"


@pytest.mark.parametrize("name", SCENES)
def test_nothing_reaches_beyond_the_sides(name: str, open_page: Open) -> None:
    with serve(SCENES[name]()) as url:
        page = open_page(url + "/")
        for prepare in ("0", OPEN_ALL):
            page.evaluate(prepare)
            for width in (360, 768, 1_100, 1_600):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", SCENES)
def test_axe_finds_no_fault(name: str, open_page: Open) -> None:
    with serve(SCENES[name]()) as url:
        page = open_page(url + "/", width=1_000)
        page.evaluate(OPEN_ALL)
        check_by_axe(page)


def test_the_scheme_follows_the_system(open_page: Open) -> None:
    with serve(idle()) as url:
        grounds = {
            scheme: open_page(url + "/", color_scheme=scheme).evaluate(
                "getComputedStyle(document.body).backgroundColor"
            )
            for scheme in ("light", "dark")
        }
    light, dark = (sum(map(int, re.findall(r"\d+", grounds[scheme]))) for scheme in ("light", "dark"))
    assert light > 600
    assert dark < 150


def test_the_keyboard_reaches_everything_in_order_and_is_seen(open_page: Open) -> None:
    with serve(busy()) as url:
        page = open_page(url + "/")
        reached = []
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement === document.body"):
                break
            reached.append(
                page.evaluate(
                    "[document.activeElement.tagName, document.activeElement.innerText.slice(0, 30),"
                    " getComputedStyle(document.activeElement).outlineStyle,"
                    " document.activeElement.getBoundingClientRect().top + scrollY]"
                )
            )
        names = [(tag, text.split("\n")[0]) for tag, text, _, _ in reached]
        assert names[0] == ("A", "Skip to the state")
        assert names[1] == ("BUTTON", "Pause updates")
        assert [text for tag, text in names if tag == "SUMMARY"][:2] == ["Bandwidth as a table", "Lag as a table"]
        assert [tag for tag, _ in names if tag in ("SELECT", "INPUT")] == ["SELECT", "INPUT"]
        assert ("A", "metrics") in names
        assert all(outline != "none" for _, _, outline, _ in reached)


def test_little_is_read_aloud_by_itself(open_page: Open) -> None:
    with serve(stale()) as url:
        page = open_page(url + "/")
        spoken = page.locator("[aria-live], [role=status], [role=alert]").evaluate_all("all => all.map(one => one.id)")
        assert spoken == ["connection", "spoken"]
        assert page.locator("#spoken").inner_text() == "Stale: nobody says what is newest"


def test_a_scene_drawn_twice_is_the_same(open_page: Open) -> None:
    """What did not change is not replaced: a reader's place in it stays."""
    scene = Scene({}, samples=50)
    with serve(scene) as url:
        page = open_page(url + "/")
        page.evaluate("window.first = document.querySelector('#map').firstChild")
        update(page)
        assert page.evaluate("window.first.isConnected")
