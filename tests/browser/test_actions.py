"""Actions of the pages, on real work: each shows what it will do, does it, and is there as a command line."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from interlock.cli.app import app
from tests.browser.conftest import Visit

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


def _dialog(visit: Visit, button: str) -> Locator:
    visit.page.get_by_role("button", name=button, exact=True).first.click()
    return visit.page.get_by_role("dialog", name=button)


def test_failed_task_is_retried(visit: Visit) -> None:
    visit.open("/ui/task/{task}")
    before = visit.page.get_by_role("table", name="Attempts").locator("tr[data-row]").count()
    _dialog(visit, "Retry").get_by_role("button", name="Retry").click()
    expect(visit.page.get_by_role("dialog")).to_have_count(0)
    expect(visit.page.get_by_role("table", name="Attempts").locator("tr[data-row]")).to_have_count(before + 1)


def test_run_is_paused_resumed_and_canceled(visit: Visit) -> None:
    run = visit.site.submit("crawl", [{"page": n} for n in range(3)], name="controlled")
    visit.open(f"/ui/run/{run}")
    state = visit.page.locator("h1 .badge")
    _dialog(visit, "Pause").get_by_role("button", name="Pause").click()
    expect(state).to_have_text("Paused")
    _dialog(visit, "Resume").get_by_role("button", name="Resume").click()
    expect(state).to_have_text("Running")
    _dialog(visit, "Cancel").get_by_role("button", name="Cancel the run").click()
    expect(state).to_have_text("Canceled")


def test_failed_tasks_of_a_run_are_rerun(visit: Visit) -> None:
    visit.open("/ui/run/{failures}")
    dialog = _dialog(visit, "Rerun")
    expect(dialog.locator("select[name=which]")).to_have_value("failed")
    dialog.get_by_role("button", name="Rerun").click()
    expect(visit.page).not_to_have_url(re.compile(visit.ids["failures"]))
    expect(visit.page.locator("h1")).to_contain_text("nightly-crawl")


def test_receipt_is_shown(visit: Visit) -> None:
    visit.open("/ui/run/{long}")
    dialog = _dialog(visit, "Receipt")
    dialog.get_by_role("button", name="Get the receipt").click()
    expect(dialog).to_contain_text(visit.ids["long"])


def test_bulk_retry_previews_what_matches_and_reports_progress(visit: Visit) -> None:
    visit.open("/ui/tasks?job=nightly-crawl&status=Failed&error_class=TimeoutError")
    dialog = _dialog(visit, "Retry all")
    expect(dialog).to_contain_text("tasks match")
    dialog.get_by_label("Reason").fill("host is back")
    dialog.get_by_role("button", name="Retry all").click()
    expect(visit.page).to_have_url(re.compile("/ui/operation/"))
    expect(visit.page.locator("h1 .badge")).to_have_text("Completed")
    expect(visit.page.locator("#main")).to_contain_text("host is back")


def test_bulk_action_needs_a_filter(visit: Visit) -> None:
    visit.open("/ui/tasks")
    expect(visit.page.get_by_role("button", name="Cancel all", exact=True)).to_be_disabled()


def test_key_is_created_shown_once_and_revoked(visit: Visit) -> None:
    visit.open("/ui/access")
    dialog = _dialog(visit, "Create a key")
    dialog.get_by_label("User").fill("grace")
    dialog.get_by_role("button", name="Create", exact=True).click()
    key = dialog.locator("code.secret").inner_text()
    assert visit.site.call("GET", "/v1/jobs", key=key)["jobs"]
    dialog.locator("footer").get_by_role("button", name="Close").click()
    row = visit.page.locator("tr[data-row]", has_text="grace")
    row.get_by_role("button", name="Revoke", exact=True).click()
    visit.page.get_by_role("dialog", name="Revoke").get_by_role("button", name="Revoke").click()
    expect(row).to_contain_text("Revoked")


def test_route_is_added_after_a_dry_run_and_its_change_reverted(visit: Visit) -> None:
    visit.open("/ui/bus")
    dialog = _dialog(visit, "Add or change a route")
    dialog.get_by_label("Target service").fill("mailer")
    dialog.locator("input[name=name]").fill("send-reminder")
    dialog.locator("input[name=queue]").fill("mail")
    dialog.locator("input[name=dlq]").fill("mail-dlq")
    expect(dialog.locator(".preview")).to_contain_text("create")
    dialog.get_by_role("button", name="Save").click()
    expect(visit.page.get_by_role("table", name="Routes")).to_contain_text("send-reminder")
    visit.open("/ui/bus?tab=changes")
    visit.page.locator("tr[data-row] a").first.click()
    _dialog(visit, "Revert").get_by_role("button", name="Revert").click()
    visit.open("/ui/bus")
    expect(visit.page.get_by_role("table", name="Routes")).not_to_contain_text("send-reminder")


def test_route_is_tested_without_sending(visit: Visit) -> None:
    visit.open("/ui/bus")
    dialog = _dialog(visit, "Test a route")
    dialog.get_by_label("Source").fill("billing")
    dialog.get_by_label("Target service").fill("mailer")
    dialog.locator("input[name=name]").fill("send-invoice")
    dialog.get_by_role("button", name="Test", exact=True).click()
    expect(dialog).to_contain_text("It would be")


def test_dag_is_planned_deployed_and_triggered(visit: Visit) -> None:
    visit.open("/ui/dags")
    dialog = _dialog(visit, "Deploy from a file")
    dialog.get_by_label("DAG file", exact=False).last.fill("name: broken\njobs: 7\n")
    expect(dialog.locator(".preview")).to_contain_text("Refused.")
    visit.page.keyboard.press("Escape")
    visit.open("/ui/dag/shop?tab=sources")
    dialog = _dialog(visit, "Trigger")
    dialog.get_by_label("Payload").fill('{"order": 7}')
    dialog.get_by_role("button", name="Trigger").click()
    expect(visit.page.get_by_role("dialog")).to_have_count(0)


def test_statement_is_answered_as_table_and_chart(visit: Visit) -> None:
    visit.open("/ui/sql")
    visit.page.get_by_label("Statement").fill("select 'a' as name, 3 as amount union all select 'b', 4 order by 1")
    visit.page.get_by_role("button", name="Run", exact=True).click()
    result = visit.page.get_by_role("table", name="Result")
    expect(result.locator("tr[data-row]")).to_have_count(2)
    visit.page.get_by_role("button", name="Show as a chart").click()
    expect(visit.page.locator(".chart canvas")).to_be_visible()


def test_search_opens_a_run_by_its_id(visit: Visit) -> None:
    visit.page.locator("#search").fill(visit.ids["failures"])
    expect(visit.page.get_by_role("option").first).to_contain_text("run")
    visit.page.keyboard.press("Enter")
    expect(visit.page).to_have_url(visit.site.url + "/ui/run/" + visit.ids["failures"])


def _command(words: list[str]) -> tuple[Any, list[str]]:
    """Follows words into the command line's tree. Any: Typer's own Click."""
    import typer.main

    found: Any = typer.main.get_command(app)
    while hasattr(found, "commands") and words and words[0] in found.commands:
        found, words = found.commands[words[0]], words[1:]
    return found, words


@pytest.mark.parametrize(
    "path",
    [
        "/ui/run/{failures}",
        "/ui/task/{task}",
        "/ui/job/{job}",
        "/ui/dag/shop",
        "/ui/bus",
        "/ui/bus?tab=limits",
        "/ui/access",
    ],
)
def test_command_lines_of_actions_exist(visit: Visit, path: str) -> None:
    visit.open(path)
    expect(visit.page.locator(".skeleton")).to_have_count(0)
    buttons = visit.page.get_by_role("button", name=re.compile("from a terminal$"))
    assert buttons.count() > 0
    for position in range(buttons.count()):
        buttons.nth(position).click()
        text = visit.page.get_by_role("dialog").locator("pre").first.inner_text()
        visit.page.keyboard.press("Escape")
        expect(visit.page.get_by_role("dialog")).to_have_count(0)
        for line in text.split(" && "):
            command, words = _command(shlex.split(line)[1:])
            options = {name for parameter in command.params for name in parameter.opts}
            assert not hasattr(command, "commands"), line
            assert {word for word in words if word.startswith("--")} <= options, line
