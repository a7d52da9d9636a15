"""Scripts in every string that a user can store: shown as text, never run."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Visit
from tests.browser.site import SCRIPT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


@pytest.mark.parametrize(
    "path",
    ["/ui/run/{hostile}", "/ui/tasks?job=hostile", "/ui/task/{hostile_task}", "/ui/bus?tab=services"],
)
def test_stored_script_is_shown_as_text(visit: Visit, path: str) -> None:
    visit.open(path)
    expect(visit.page.locator("#main").get_by_text("<script>", exact=False).first).to_be_attached()
    assert visit.page.locator("#main img").count() == 0
    assert visit.page.title() != "run"


def test_script_in_a_result_of_sql_is_shown_as_text(visit: Visit) -> None:
    visit.open("/ui/sql")
    visit.page.get_by_label("Statement").fill("select '" + SCRIPT.replace("'", "''") + "' as html")
    visit.page.get_by_role("button", name="Run", exact=True).click()
    expect(visit.page.get_by_role("table", name="Result")).to_contain_text("<script>")
    assert visit.page.title() != "run"


def test_script_in_the_address_is_not_run(visit: Visit) -> None:
    visit.open("/ui/tasks?job=%3Cimg%20src%3Dx%20onerror%3D%22document.title%3D'run'%22%3E")
    assert visit.page.title() != "run"
    visit.page.goto(visit.site.url + "/ui/task/%3Cscript%3Edocument.title='run'%3C%2Fscript%3E")
    expect(visit.page.get_by_role("alert").first).to_be_visible()
    assert visit.page.title() != "run"


def test_another_site_cannot_frame_the_dashboard(visit: Visit) -> None:
    frame = visit.page.context.new_page()
    frame.set_content(f"<iframe src='{visit.site.url}/ui/'></iframe>")
    expect(frame.frame_locator("iframe").locator("#app")).to_have_count(0)
