"""Checks of schemathesis for every response, and two promises of docs/http-api.md that it does not know."""

from __future__ import annotations

import re
from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, Response

from tests.support.documentation import read, rows

PROBLEM = "application/problem+json"
DOCUMENTED = {(int(row[0]), row[1].strip("`")) for row in rows(read("docs/http-api.md")) if row[0].isdigit()}
"""Status and code, as paired in the table of errors."""


@schemathesis.check
def refusals_are_documented_problems(ctx: CheckContext, response: Response, case: Case[Any]) -> None:
    if response.status_code < 400:
        return
    assert response.headers["content-type"] == [PROBLEM], response.headers.get("content-type")
    problem = response.json()
    assert problem["status"] == response.status_code
    assert (problem["status"], problem["code"]) in DOCUMENTED, problem
    assert problem["type"] == f"urn:interlock:problem:{problem['code']}"
    assert [problem["request_id"]] == response.headers["x-request-id"]


_FORM = re.compile(r"not valid: (Expected|Invalid|Object|JSON|.*: )|The Content-Type of the body is not JSON")
_SEVEN = re.compile(r"Expected `int( \| null)?`, got `float`")


@schemathesis.check
def what_fits_the_document_fits_the_server(ctx: CheckContext, response: Response, case: Case[Any]) -> None:
    """A request that is valid according to the document may be refused for its values, but not for its form."""
    if response.status_code in (400, 415) and case.meta is not None and case.meta.generation.mode.is_positive:
        problem = response.json()
        # In JSON Schema, 7.0 is an integer; here it is not.
        by_form = _FORM.search(problem["detail"]) and not _SEVEN.search(problem["detail"])
        assert not by_form, problem


CONFIG: dict[str, Any] = {
    "positive_data_acceptance": {"enabled": False},
    "max_response_time": 20,
}
