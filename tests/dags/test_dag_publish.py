"""Published names: which roles may read the dataset."""

from __future__ import annotations

import msgspec
import pytest

from interlock.dags.definition import content_hash, dag_of, document
from interlock.wire.access import Role
from tests.support.dags import problems_of, valid

FILE = """
name: one
jobs:
  - { name: s, activation: source, source: { kind: manual }, operator: echo, outputs: [o] }
publish:
  p: { from: { job: s, output: o }ROLES }
"""


def with_roles(roles: str) -> str:
    return FILE.replace("ROLES", f", read_roles: {roles}" if roles else "")


def test_without_read_roles_every_role_may_read() -> None:
    assert valid(with_roles("")).publish["p"].read_roles == (Role.READER, Role.WRITER, Role.ADMIN)


def test_read_roles_have_a_canonical_order() -> None:
    one, other = (valid(with_roles(roles)) for roles in ("[admin, writer]", "[writer, admin, writer]"))
    assert one.publish["p"].read_roles == (Role.WRITER, Role.ADMIN)
    assert content_hash(one) == content_hash(other)
    assert content_hash(one) != content_hash(valid(with_roles("")))


def test_read_roles_survive_the_canonical_form() -> None:
    dag = valid(with_roles("[admin]"))
    assert dag_of(msgspec.json.encode(document(dag))).publish == dag.publish


@pytest.mark.parametrize("roles", ["[]", "admin", "[root]", "[1]", "{ admin: true }", "[[admin]]", "[admin, null]"])
def test_invalid_read_roles_are_refused_with_a_fix(roles: str) -> None:
    (problem,) = problems_of(with_roles(roles))
    assert problem.line == 6
    assert "read_roles must be a list of" in problem.what
    assert problem.instead == "write read_roles: [admin]"
