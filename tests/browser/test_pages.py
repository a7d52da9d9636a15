"""Every page, in a real browser: it shows its data, fits narrow screens, can be read and used without a mouse."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.chromium import AXE
from tests.browser.conftest import Visit

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

PAGES = {
    "/ui/": "Overview",
    "/ui/runs": "Runs",
    "/ui/run/{failures}": "nightly-crawl",
    "/ui/run/{failures}?tab=tasks": "nightly-crawl",
    "/ui/run/{failures}?tab=definition": "nightly-crawl",
    "/ui/job/{job}": "nightly-crawl",
    "/ui/tasks": "Tasks",
    "/ui/tasks?status=Failed": "Tasks",
    "/ui/task/{task}": "nightly-crawl",
    "/ui/operations": "Bulk operations",
    "/ui/dags": "DAGs",
    "/ui/dag/shop": "shop",
    "/ui/dag/shop?tab=sources": "shop",
    "/ui/dag/shop?tab=versions": "shop",
    "/ui/dag/shop?tab=document": "shop",
    "/ui/backfills": "Backfills",
    "/ui/datasets": "Datasets",
    "/ui/datasets?tab=batches": "Datasets",
    "/ui/dataset/shop:orders:orders": "shop:orders:orders",
    "/ui/dataset/shop:orders:orders?tab=partitions": "shop:orders:orders",
    "/ui/sql": "SQL",
    "/ui/sql?tab=history": "SQL",
    "/ui/queues": "Queues and workers",
    "/ui/bus": "Bus",
    "/ui/bus?tab=services": "Bus",
    "/ui/bus?tab=acls": "Bus",
    "/ui/bus?tab=limits": "Bus",
    "/ui/bus?tab=keys": "Bus",
    "/ui/bus?tab=changes": "Bus",
    "/ui/bus?tab=feed": "Bus",
    "/ui/bus?tab=replays": "Bus",
    "/ui/alerts": "Alerts",
    "/ui/alerts?tab=channels": "Alerts",
    "/ui/access": "Access",
    "/ui/access?tab=members": "Access",
    "/ui/access?tab=secrets": "Access",
    "/ui/access?tab=sessions": "Access",
    "/ui/access?tab=workers": "Access",
}
SERIOUS = ("serious", "critical")


def loaded(visit: Visit, path: str) -> None:
    visit.open(path)
    expect(visit.page.locator(".skeleton")).to_have_count(0)
    visit.page.evaluate("document.fonts.ready.then(() => true)")


@pytest.mark.parametrize("path", PAGES)
def test_page_shows_its_data_without_an_error(visit: Visit, path: str) -> None:
    loaded(visit, path)
    expect(visit.page.locator("#main h1").first).to_contain_text(PAGES[path])
    expect(visit.page.locator(".note.bad", has_text="Not found.")).to_have_count(0)
    expect(visit.page.locator(".note.bad", has_text="Could not load this.")).to_have_count(0)


def _problems(visit: Visit) -> list[str]:
    visit.page.evaluate(AXE.read_text() + "; true")
    found: list[dict[str, Any]] = visit.page.evaluate("axe.run().then((result) => result.violations)")
    return [f"{one['id']}: {one['nodes'][0]['html'][:160]}" for one in found if one["impact"] in SERIOUS]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_problem(visit: Visit, scheme: str) -> None:
    visit.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    problems = {}
    for path in PAGES:
        loaded(visit, path)
        if found := _problems(visit):
            problems[path] = found
    assert [f"{path}: {one}" for path, found in problems.items() for one in found] == []


def test_pages_fit_a_screen_of_390_pixels(visit: Visit) -> None:
    visit.page.set_viewport_size({"width": 390, "height": 844})
    widths = {}
    for path in PAGES:
        loaded(visit, path)
        widths[path] = visit.page.evaluate("document.documentElement.scrollWidth")
    assert {path: width for path, width in widths.items() if width > 390} == {}


def test_navigation_opens_on_a_narrow_screen(visit: Visit) -> None:
    visit.page.set_viewport_size({"width": 390, "height": 844})
    expect(visit.page.get_by_role("link", name="Datasets")).to_be_hidden()
    visit.page.get_by_role("button", name="Pages").click()
    visit.page.get_by_role("link", name="Datasets").click()
    expect(visit.page.locator("#main h1")).to_have_text("Datasets")


def test_keyboard_alone_reaches_a_failed_task(visit: Visit) -> None:
    keys = visit.page.keyboard
    keys.press("g")
    keys.press("t")
    expect(visit.page.locator("#main h1")).to_have_text("Tasks")
    expect(visit.page.locator("tr[data-row]").first).to_be_visible()
    keys.press("j")
    keys.press("Enter")
    expect(visit.page).to_have_url(visit.page.url.split("/ui/")[0] + "/ui/task/" + visit.page.url.split("/")[-1])
    expect(visit.page.get_by_role("heading", name="Attempts")).to_be_visible()
    keys.press("/")
    expect(visit.page.locator("#search")).to_be_focused()


def test_question_mark_lists_the_keys(visit: Visit) -> None:
    visit.page.keyboard.press("?")
    expect(visit.page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    visit.page.keyboard.press("Escape")
    expect(visit.page.get_by_role("dialog")).to_have_count(0)


def test_filters_are_part_of_the_address(visit: Visit) -> None:
    visit.open("/ui/tasks")
    visit.page.get_by_label("Status").select_option("Failed")
    visit.page.get_by_label("Error class").fill("HttpStatus503")
    visit.page.get_by_label("Error class").blur()
    expect(visit.page).to_have_url(visit.site.url + "/ui/tasks?status=Failed&error_class=HttpStatus503")
    visit.page.reload()
    expect(visit.page.get_by_label("Error class")).to_have_value("HttpStatus503")
    expect(visit.page.locator("tr[data-row]").first).to_contain_text("HttpStatus503")


def test_failures_are_grouped_by_error(visit: Visit) -> None:
    visit.open("/ui/run/{failures}")
    groups = visit.page.get_by_role("table", name="Groups of failures")
    expect(groups).to_contain_text("HttpStatus503")
    expect(groups).to_contain_text("TimeoutError")


def test_dark_colours_follow_the_system_and_the_choice(visit: Visit) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    visit.page.emulate_media(color_scheme="light")
    light = visit.page.evaluate(background)
    visit.page.emulate_media(color_scheme="dark")
    dark = visit.page.evaluate(background)
    assert light != dark
    visit.page.get_by_role("button", name="Colours").click()
    assert visit.page.evaluate(background) == light


def test_times_are_local_with_utc_on_hover(visit: Visit) -> None:
    visit.open("/ui/task/{task}")
    created = visit.site.call("GET", f"/v1/tasks/{visit.ids['task']}")["created_at"]
    shown = visit.page.locator("dd time").first
    expect(shown).to_have_attribute("title", f"{created[:10]} {created[11:19]} UTC")
    local = (int(created[11:13]) + 1) % 12 or 12
    expect(shown).to_contain_text(f"{local}:{created[14:16]}")


def test_clock_of_the_browser_may_be_an_hour_wrong(visitor: Visit) -> None:
    visitor.page.add_init_script("const now = Date.now; Date.now = () => now() + 3_600_000")
    visitor.sign_in()
    visitor.open("/ui/run/{crawl}")
    visitor.open("/ui/tasks?job=live-crawl")
    age = visitor.page.locator("tr[data-row] time").first
    expect(age).to_be_visible()
    assert " h " not in age.inner_text()
    assert not age.inner_text().startswith("in ")


def test_running_task_updates_by_itself(visit: Visit) -> None:
    task = visit.site.call("GET", f"/v1/tasks?run={visit.ids['crawl']}")["tasks"][0]
    visit.open(f"/ui/task/{task['task_id']}")
    progress = visit.page.locator("dd", has_text="of 2000").last
    expect(progress).to_be_visible()
    first = progress.inner_text()
    expect(progress).not_to_have_text(first)
