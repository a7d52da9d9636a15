"""`interlock users`: API keys, worker tokens and orgs. `interlock signing-key`: keys that sign capability tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.conventions import (
    CursorOption,
    FolderOption,
    LimitOption,
    Output,
    OutputOption,
    ask,
    collect,
    command,
    group,
    usage,
)
from interlock.cli.output import present, sheet, table
from interlock.wire.access import Role

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.access import (
        KeyCreated,
        KeyList,
        KeyView,
        MemberPage,
        MemberView,
        OrgOperators,
        OrgView,
        SigningKeyView,
        WorkerTokenCreated,
        WorkerTokenList,
        WorkerTokenView,
    )

users = group("API keys of users, members from the identity provider, worker tokens, orgs.")
keys = group("Keys that sign capability tokens.")

OrgOption = Annotated[
    str | None, typer.Option("--org", help="An org other than yours; needs the platform scope.", show_default=False)
]
ExpiryOption = Annotated[
    float | None, typer.Option("--expires-in-days", min=0.001, max=3650, help="Default: never.", show_default=False)
]


@command(users, "list", example="interlock users list")
def list_users(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show the API keys of your org. Their secrets are not stored."""

    present(ask(folder, lambda client: client.keys()), output, _keys)


def _keys(found: KeyList) -> RenderableType:

    columns = ("key", "org", "user", "role", "service", "scopes", "created", "expires", "revoked")
    rows = [
        (k.key_id, k.org, k.user, k.role, k.service, k.scopes, k.created_at, k.expires_at, k.revoked_at)
        for k in found.keys
    ]
    return table(columns, rows, empty="There are no keys.")


@command(users, "create", example="interlock users create ada --role writer --expires-in-days 90")
def create(
    user: Annotated[str, typer.Argument(help="Name of the user.")],
    role: Annotated[Role, typer.Option(help="Role of the key.")] = Role.READER,
    scopes: Annotated[
        list[str] | None, typer.Option("--scope", help="Restrict the key to this scope of the role; repeatable.")
    ] = None,
    expires: ExpiryOption = None,
    org: Annotated[str | None, typer.Option(help="An org other than yours; needs the platform scope.")] = None,
    service: Annotated[
        str | None,
        typer.Option(help="Service that the key acts for: it sends commands as the service and receives its commands."),
    ] = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Create an API key. It is shown only once."""
    from interlock.wire.access import KeyRequest

    request = KeyRequest(user=user, role=role, scopes=scopes or None, expires_in_days=expires, org=org, service=service)
    present(ask(folder, lambda client: client.create_key(request)), output, _created_key)


def _created_key(made: KeyCreated) -> RenderableType:

    view = made.view
    return sheet(
        [
            ("key", made.key),
            ("id", view.key_id),
            ("user", view.user),
            ("role", view.role),
            ("service", view.service),
            ("scopes", view.scopes),
            ("expires", view.expires_at or "never"),
            ("use", "set INTERLOCK_API_KEY to the key; it is not shown again"),
        ]
    )


@command(users, "revoke", example="interlock users revoke 3f9c0a1b2c3d4e5f")
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `users list` shows it.")],
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Revoke an API key, immediately and permanently."""

    present(ask(folder, lambda client: client.revoke_key(key_id)), output, _revoked_key)


def _revoked_key(key: KeyView) -> str:
    return f"Key {key.key_id} of {key.user} is revoked."


@command(
    users,
    "allow",
    example="interlock users allow 'auth0|5f7c8ec7c33c6c004bbafe82' --role writer\n"
    "interlock users allow ada@example.com --org acme --role admin",
)
def allow(
    subject: Annotated[str, typer.Argument(help="The `sub` claim of the user's tokens.")],
    role: Annotated[Role, typer.Option(help="Role of the user.")] = Role.READER,
    org: OrgOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Give a user of the identity provider access, or change their role."""
    from interlock.wire.access import MemberRequest

    request = MemberRequest(subject=subject, role=role, org=org)
    present(ask(folder, lambda client: client.allow_member(request)), output, _allowed)


def _allowed(member: MemberView) -> str:
    return f"{member.subject} is a member of {member.org}: {member.role}."


@command(users, "disallow", example="interlock users disallow 'auth0|5f7c8ec7c33c6c004bbafe82'")
def disallow(
    subject: Annotated[str, typer.Argument(help="The user's `sub`, as `users members` shows it.")],
    org: OrgOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Remove the access of a user of the identity provider."""

    present(ask(folder, lambda client: client.disallow_member(subject, org=org)), output, _disallowed)


def _disallowed(member: MemberView) -> str:
    return f"{member.subject} is no longer a member of {member.org}."


@command(users, "members", example="interlock users members")
def members(
    org: OrgOption = None,
    limit: LimitOption = 1000,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the users of the identity provider who are members of your org."""
    from interlock.wire.access import MemberPage

    async def read(client: Client) -> MemberPage:
        found, after = await collect(
            lambda at, size: client.member_page(at, size, org=org), lambda page: page.members, cursor, limit
        )
        return MemberPage(members=found, next_cursor=after)

    present(ask(folder, read), output, _members)


def _members(page: MemberPage) -> RenderableType:

    rows = [(m.subject, m.org, m.role, m.since, m.by) for m in page.members]
    return table(("subject", "org", "role", "since", "by"), rows, empty="There are no members.")


@command(users, "worker-token", example="interlock users worker-token rack-7 --runtime platform")
def worker_token(
    name: Annotated[str, typer.Argument(help="Descriptive name, such as where the worker runs.")],
    runtimes: Annotated[
        list[str] | None, typer.Option("--runtime", help="Only for this runtime; repeatable. Default: all.")
    ] = None,
    expires: ExpiryOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Create a token for a worker. It is shown only once."""
    from interlock.wire.access import WorkerTokenRequest

    request = WorkerTokenRequest(name=name, runtimes=runtimes or None, expires_in_days=expires)
    present(ask(folder, lambda client: client.create_worker_token(request)), output, _created_token)


def _created_token(made: WorkerTokenCreated) -> RenderableType:

    view = made.view
    return sheet(
        [
            ("token", made.token),
            ("id", view.token_id),
            ("name", view.name),
            ("runtimes", view.runtimes or "all"),
            ("expires", view.expires_at or "never"),
            ("use", "set INTERLOCK_WORKER_TOKEN to the token; it is not shown again"),
        ]
    )


@command(users, "worker-tokens", example="interlock users worker-tokens")
def worker_tokens(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show worker tokens."""

    present(ask(folder, lambda client: client.worker_tokens()), output, _tokens)


def _tokens(found: WorkerTokenList) -> RenderableType:

    rows = [(t.token_id, t.name, t.runtimes or "all", t.created_at, t.expires_at, t.revoked_at) for t in found.tokens]
    return table(("token", "name", "runtimes", "created", "expires", "revoked"), rows, empty="There are no tokens.")


@command(users, "revoke-worker-token", example="interlock users revoke-worker-token 3f9c0a1b2c3d4e5f")
def revoke_worker_token(
    token_id: Annotated[str, typer.Argument(help="The token's id, as `users worker-tokens` shows it.")],
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Revoke a worker token; its worker stops within seconds."""

    present(ask(folder, lambda client: client.revoke_worker_token(token_id)), output, _revoked_token)


def _revoked_token(token: WorkerTokenView) -> str:
    return f"Worker token {token.token_id} ({token.name}) is revoked."


@command(users, "org", example="interlock users org acme\ninterlock users create ada --org acme --role admin")
def org(
    name: Annotated[str, typer.Argument(help="Name of the new org.")],
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Create an org: a tenant with its own keys, jobs and tasks."""

    present(ask(folder, lambda client: client.create_org(name)), output, _org)


def _org(made: OrgView) -> RenderableType:

    return sheet([("org", made.name), ("id", made.org_id)])


@command(
    users,
    "org-operators",
    example="interlock users org-operators acme\n"
    "interlock users org-operators acme --allow echo --allow http_fetch --allow 'acme.*'\n"
    "interlock users org-operators acme --any",
)
def org_operators(
    org: Annotated[str, typer.Argument(metavar="ORG", help="Name of the org.")],
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow", metavar="NAME", help="Only these operators; repeatable. `acme.*` matches all with this prefix."
        ),
    ] = None,
    any_operator: Annotated[bool, typer.Option("--any", help="Allow all operators.")] = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show which operators an org may use, or restrict them. Needs the platform scope."""
    if allow and any_operator:
        raise usage("Give --allow or --any, not both")

    async def work(client: Client) -> OrgOperators:
        if not allow and not any_operator:
            return await client.org_operators(org)
        return await client.limit_org_operators(org, allow)

    present(ask(folder, work), output, _org_operators)


def _org_operators(limit: OrgOperators) -> RenderableType:
    return sheet([("org", limit.org), ("operators", "any" if limit.operators is None else limit.operators)])


@command(keys, "list", example="interlock signing-key list")
def list_keys(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show the signing keys of capability tokens: the active one, and those that still verify."""

    present(ask(folder, lambda client: client.signing_keys()), output, _signing_keys)


def _signing_keys(found: list[SigningKeyView]) -> RenderableType:

    rows = [(k.kid, "verifies" if k.retired_at else "signs", k.created_at, k.retired_at, k.verify_until) for k in found]
    return table(("key", "use", "created", "retired", "verifies until"), rows, empty="There are no signing keys.")


@command(keys, "rotate", example="interlock signing-key rotate")
def rotate(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Sign capability tokens with a new key from now on. Existing tokens remain valid."""

    present(
        ask(folder, lambda client: client.rotate_signing_key()), output, lambda key: f"{key.kid} signs from now on."
    )
