"""Signing in and out, and what happens to an open page whose session or server ends."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Visit

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


def _end_sessions(visit: Visit) -> None:
    visit.page.context.clear_cookies()


def test_wrong_key_is_refused_with_a_reason(visitor: Visit) -> None:
    visitor.page.goto(visitor.site.url + "/ui/")
    visitor.page.get_by_label("API key").fill("ilk_0000000000000000_wrong")
    visitor.page.get_by_role("button", name="Sign in", exact=True).click()
    expect(visitor.page.get_by_role("alert")).to_be_visible()
    expect(visitor.page.locator("#main")).to_have_count(0)


def test_sign_in_returns_to_the_shared_address(visitor: Visit) -> None:
    visitor.sign_in(path=f"/ui/run/{visitor.ids['failures']}")
    expect(visitor.page.locator("#main h1")).to_contain_text("nightly-crawl")


def test_sign_out_ends_the_session(visit: Visit) -> None:
    visit.page.get_by_title("Account of").click()
    visit.page.get_by_role("button", name="Sign out").click()
    expect(visit.page.get_by_label("API key")).to_be_visible()
    visit.page.goto(visit.site.url + "/ui/runs")
    expect(visit.page.get_by_label("API key")).to_be_visible()


def test_one_time_link_signs_in_and_leaves_the_address(visitor: Visit) -> None:
    made = visitor.site.call("POST", "/v1/sign-in-links")
    visitor.page.goto(made["url"])
    expect(visitor.page.locator("#main h1")).to_have_text("Overview")
    assert made["token"] not in visitor.page.url
    other = visitor.page.context.browser
    assert other is not None
    again = other.new_context().new_page()
    again.goto(made["url"])
    expect(again.get_by_role("alert")).to_contain_text("has been used")
    again.context.close()


def test_another_org_sees_nothing(visitor: Visit) -> None:
    visitor.site.call("POST", "/v1/orgs", {"name": "acme"})
    visitor.sign_in(visitor.site.key_for("eve", "admin", "acme"))
    visitor.page.goto(visitor.site.url + f"/ui/task/{visitor.ids['task']}")
    expect(visitor.page.get_by_role("alert").first).to_contain_text("Not found.")
    visitor.open("/ui/tasks")
    expect(visitor.page.get_by_text("No tasks yet.")).to_be_visible()


def test_viewer_cannot_act_and_sees_why(visitor: Visit) -> None:
    visitor.sign_in(visitor.site.key_for("viewer", "reader"))
    visitor.open("/ui/task/{task}")
    retry = visitor.page.get_by_role("button", name="Retry", exact=True)
    expect(retry).to_be_disabled()
    expect(retry).to_have_attribute("title", "Needs the scope tasks:write, which your role does not have")


def test_action_is_repeated_after_the_session_ended(visit: Visit) -> None:
    run = visit.site.submit("crawl", [{"page": 2}], name="ends-mid-action")
    visit.open(f"/ui/run/{run}")
    visit.page.get_by_role("button", name="Cancel", exact=True).click()
    _end_sessions(visit)
    visit.page.get_by_role("button", name="Cancel the run").click()
    again = visit.page.get_by_role("dialog", name="Sign in again")
    expect(again).to_be_visible()
    again.get_by_label("API key").fill(visit.site.key)
    again.get_by_role("button", name="Sign in", exact=True).click()
    expect(visit.page.get_by_role("dialog")).to_have_count(0)
    assert visit.site.ended(run)["state"] == "Canceled"


def test_typed_statement_survives_the_end_of_the_session(visit: Visit) -> None:
    visit.open("/ui/sql")
    statement = visit.page.get_by_label("Statement")
    statement.fill("select 1 as one")
    _end_sessions(visit)
    visit.page.get_by_role("button", name="Run", exact=True).click()
    again = visit.page.get_by_role("dialog", name="Sign in again")
    again.get_by_label("API key").fill(visit.site.key)
    again.get_by_role("button", name="Sign in", exact=True).click()
    expect(again).to_have_count(0)
    expect(statement).to_have_value("select 1 as one")


def test_open_page_continues_after_a_restart_of_the_server(visit: Visit) -> None:
    visit.open("/ui/queues")
    expect(visit.page.get_by_role("table", name="Queues")).to_be_visible()
    address = visit.site.url.removeprefix("http://")
    visit.site.stop()
    expect(visit.page.get_by_role("status")).to_contain_text("Offline")
    expect(visit.page.get_by_role("table", name="Queues")).to_be_visible()
    visit.site.start(address)
    expect(visit.page.get_by_role("status")).not_to_contain_text("Offline")
    expect(visit.page.get_by_role("alert")).to_have_count(0)
