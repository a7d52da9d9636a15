import type { JSX } from "preact";
import { may, session } from "../api/client";
import type { KeyView, MemberView, SessionEntry, WorkerTokenView } from "../api/types";
import { useGet } from "../api/use";
import { useTitle } from "../app/title";
import { ActionButton, Actions, type Action, type Field } from "../ui/action";
import { Badge, CopyButton, Empty, Header, Id, Load, Note, Panel, Tabs, Time } from "../ui/basics";
import { commandLine } from "../ui/commands";
import { PagedTable, Table, useQuery } from "../ui/table";
import { PAGE } from "./runs";

const ROLES: Field = { name: "role", label: "Role", type: "select", required: true, value: "reader", options: ["reader", "writer", "admin"].map((value) => ({ value, label: value })) };

function Secret({ text }: { text: string }): JSX.Element {
  return <Note tone="warn" title="Shown once: copy it now."><code class="secret">{text}</code> <CopyButton text={text} label="Copy the secret" /></Note>;
}

const isLive = ({ revoked_at, expires_at }: { revoked_at: string | null; expires_at: string | null }): boolean => !revoked_at && !(expires_at && Date.parse(expires_at) < Date.now());

function Keys(): JSX.Element {
  const keys = useGet<{ keys: KeyView[] }>("/v1/keys");
  const create: Action = {
    label: "Create a key", primary: true, scope: "admin", confirm: "Create", about: <p>A key is shown once. It can have only rights that you have.</p>,
    fields: [{ name: "user", label: "User", required: true }, ROLES, { name: "expires_in_days", label: "Expires after days", type: "number", value: "90" }, { name: "service", label: "Service", hint: "For a service of the bus: it may send and receive commands, and nothing else" }],
    request: ({ user, role, expires_in_days, service }) => ({ method: "POST", path: "/v1/keys", body: { user, role, expires_in_days: expires_in_days ? Number(expires_in_days) : null, ...(service ? { service } : {}) } }),
    cli: ({ user, role, service }) => commandLine(["users", "create", user || "USER"], { role, service }),
    result: (reply: { key: string }) => <Secret text={reply.key} />, done: keys.reload,
  };
  const revoke = (key: KeyView): Action => ({ label: "Revoke", danger: true, scope: "admin", about: <p>Requests with the key of {key.user} are refused from now on, and its sessions end.</p>, request: () => ({ method: "DELETE", path: `/v1/keys/${key.key_id}` }), cli: () => commandLine(["users", "revoke", key.key_id]), done: keys.reload });
  return (
    <Panel flush title="API keys" aside={<ActionButton action={create} />}>
      <Load of={keys}>
        {({ keys: all }) => (
          <Table label="API keys" rows={[...all].sort((one, other) => Number(isLive(other)) - Number(isLive(one)))} rowKey={({ key_id }) => key_id} columns={[
            { head: "User", cell: (row) => <strong class="cut" title={row.user}>{row.user}</strong> },
            { head: "State", cell: (row) => (row.revoked_at ? <Badge state="revoked" label="Revoked" /> : isLive(row) ? <Badge state="current" label="Active" /> : <Badge state="idle" label="Expired" />) },
            { head: "Role", cell: (row) => (row.service ? `service ${row.service}` : row.role) },
            { head: "Scopes", grow: true, cell: (row) => <span class="faint" title={row.scopes.join(", ")}>{row.scopes.join(", ")}</span> },
            { head: "Key", wide: true, cell: (row) => <Id id={row.key_id} /> },
            { head: "Created", num: true, wide: true, cell: (row) => <Time at={row.created_at} /> },
            { head: "Expires", num: true, cell: (row) => (row.expires_at ? <Time at={row.expires_at} /> : <span class="faint">never</span>) },
            { head: "", num: true, cell: (row) => !row.revoked_at && <div class="actions"><ActionButton action={revoke(row)} /></div> },
          ]} />
        )}
      </Load>
    </Panel>
  );
}

function Members(): JSX.Element {
  const { query } = useQuery();
  const members = useGet<{ members: MemberView[]; next_cursor: string | null }>("/v1/members", { query: { cursor: query.cursor, limit: PAGE } });
  const add: Action = { label: "Add a member", scope: "admin", confirm: "Save", about: <p>Gives a user of the identity provider access to this org, or another role.</p>, fields: [{ name: "subject", label: "Subject", required: true, hint: "The user's id at the identity provider" }, ROLES], request: ({ subject, role }) => ({ method: "POST", path: "/v1/members", body: { subject, role } }), cli: ({ subject, role }) => commandLine(["users", "allow", subject || "SUBJECT"], { role }), done: members.reload };
  const remove = (row: MemberView): Action => ({ label: "Remove", danger: true, scope: "admin", about: <p>{row.subject} loses access now.</p>, request: () => ({ method: "DELETE", path: "/v1/members", query: { subject: row.subject } }), cli: () => commandLine(["users", "disallow", row.subject]), done: members.reload });
  return (
    <Panel flush title="Members" aside={<ActionButton action={add} />}>
      <PagedTable label="Members" of={members} rows={(page) => page.members} rowKey={({ subject }) => subject} empty={<Empty title="No members.">Users of the identity provider, when one is configured.</Empty>} columns={[
        { head: "Subject", grow: true, cell: (row) => <strong>{row.subject}</strong> },
        { head: "Role", cell: (row) => row.role },
        { head: "Added by", wide: true, cell: (row) => row.by },
        { head: "Since", num: true, cell: (row) => <Time at={row.since} /> },
        { head: "", num: true, cell: (row) => <div class="actions"><ActionButton action={remove(row)} /></div> },
      ]} />
    </Panel>
  );
}

function Sessions(): JSX.Element {
  const sessions = useGet<{ sessions: SessionEntry[] }>("/v1/sessions");
  const end = (row: SessionEntry): Action => ({ label: "Sign out", danger: true, about: <p>Ends the session of {row.user}. The page asks to sign in again.</p>, request: () => ({ method: "DELETE", path: `/v1/sessions/${row.session_id}` }), done: sessions.reload });
  return (
    <Panel flush title="Sessions">
      <Load of={sessions}>
        {({ sessions: all }) => (
          <Table label="Sessions" rows={all} rowKey={({ session_id }) => session_id} columns={[
            { head: "User", grow: true, cell: (row) => <>{row.user} {row.current && <Badge state="current" label="This one" />}</> },
            { head: "Signed in with", wide: true, cell: (row) => (row.kind === "oidc" ? "identity provider" : "API key") },
            { head: "Since", num: true, cell: (row) => <Time at={row.created_at} /> },
            { head: "Seen", num: true, wide: true, cell: (row) => <Time at={row.seen_at} /> },
            { head: "Ends", num: true, wide: true, cell: (row) => <Time at={row.expires_at} /> },
            { head: "", num: true, cell: (row) => !row.current && <div class="actions"><ActionButton action={end(row)} /></div> },
          ]} />
        )}
      </Load>
    </Panel>
  );
}

function WorkerTokens(): JSX.Element {
  const tokens = useGet<{ tokens: WorkerTokenView[] }>("/v1/worker-tokens");
  const create: Action = {
    label: "Create a token", scope: "platform", confirm: "Create", about: <p>A worker presents it to claim tasks. It is shown once.</p>,
    fields: [{ name: "name", label: "Name", required: true }, { name: "runtimes", label: "Runtimes", hint: "Separated by commas; empty for all" }],
    request: ({ name, runtimes }) => ({ method: "POST", path: "/v1/worker-tokens", body: { name, runtimes: runtimes ? runtimes.split(",").map((one) => one.trim()) : null } }),
    cli: ({ name }) => commandLine(["users", "worker-token", name || "NAME"]), result: (reply: { token: string }) => <Secret text={reply.token} />, done: tokens.reload,
  };
  const revoke = (row: WorkerTokenView): Action => ({ label: "Revoke", danger: true, scope: "platform", about: <p>Workers with this token can claim nothing within seconds.</p>, request: () => ({ method: "DELETE", path: `/v1/worker-tokens/${row.token_id}` }), cli: () => commandLine(["users", "revoke-worker-token", row.token_id]), done: tokens.reload });
  const org: Action = { label: "Create an org", scope: "platform", confirm: "Create", about: <p>A tenant with data, keys and limits of its own.</p>, fields: [{ name: "name", label: "Name", required: true }], request: ({ name }) => ({ method: "POST", path: "/v1/orgs", body: { name } }), cli: ({ name }) => commandLine(["users", "org", name || "NAME"]) };
  return (
    <Panel flush title="Worker tokens" aside={<Actions of={[org, create]} />}>
      <Load of={tokens}>
        {({ tokens: all }) => (
          <Table label="Worker tokens" rows={all} rowKey={({ token_id }) => token_id} columns={[
            { head: "Name", grow: true, cell: (row) => <strong>{row.name}</strong> },
            { head: "State", cell: (row) => (row.revoked_at ? <Badge state="revoked" label="Revoked" /> : <Badge state="current" label="Active" />) },
            { head: "Runtimes", cell: (row) => row.runtimes?.join(", ") ?? "all" },
            { head: "Created", num: true, cell: (row) => <Time at={row.created_at} /> },
            { head: "", num: true, cell: (row) => !row.revoked_at && <div class="actions"><ActionButton action={revoke(row)} /></div> },
          ]} />
        )}
      </Load>
    </Panel>
  );
}

interface OrgSecret {
  name: string;
  hosts: string[];
  version: number;
  set_by: string;
  set_at: string;
}

function Secrets(): JSX.Element {
  const { query } = useQuery();
  const secrets = useGet<{ secrets: OrgSecret[]; next_cursor?: string | null }>("/v1/secrets", { query: { cursor: query.cursor, limit: PAGE } });
  const set: Action = {
    label: "Set a secret", scope: "admin", confirm: "Save", about: <p>Tasks get it where their config names it. Its value is never shown again.</p>,
    fields: [{ name: "name", label: "Name", required: true }, { name: "value", label: "Value", type: "password", required: true }, { name: "hosts", label: "Hosts", hint: "Separated by commas: it is sent to these hosts only" }],
    request: ({ name, value, hosts }) => ({ method: "PUT", path: `/v1/secrets/${encodeURIComponent(name ?? "")}`, body: { value, hosts: hosts ? hosts.split(",").map((one) => one.trim()) : [] } }),
    cli: ({ name, hosts }) => commandLine(["secret", "set", name || "NAME"], { host: hosts }), done: secrets.reload,
  };
  const remove = (row: OrgSecret): Action => ({ label: "Remove", danger: true, scope: "admin", about: <p>Tasks that name it fail from now on.</p>, request: () => ({ method: "DELETE", path: `/v1/secrets/${encodeURIComponent(row.name)}` }), cli: () => commandLine(["secret", "remove", row.name], { yes: true }), done: secrets.reload });
  return (
    <Panel flush title="Secrets" aside={<ActionButton action={set} />}>
      <PagedTable label="Secrets" of={secrets} rows={(page) => page.secrets} rowKey={({ name }) => name} empty={<Empty title="No secrets." />} columns={[
        { head: "Name", cell: (row) => <strong>{row.name}</strong> },
        { head: "Hosts", grow: true, cell: (row) => row.hosts.join(", ") || <span class="faint">any</span> },
        { head: "Version", num: true, wide: true, cell: (row) => row.version },
        { head: "By", wide: true, cell: (row) => row.set_by },
        { head: "Set", num: true, cell: (row) => <Time at={row.set_at} /> },
        { head: "", num: true, cell: (row) => <div class="actions"><ActionButton action={remove(row)} /></div> },
      ]} />
    </Panel>
  );
}

export default function AccessPage(): JSX.Element {
  useTitle("Access");
  const { query, href } = useQuery();
  const admin = may("admin");
  const tabs = { ...(admin ? { keys: ["API keys", Keys], members: ["Members", Members], secrets: ["Secrets", Secrets] } : {}), sessions: ["Sessions", Sessions], ...(may("platform") ? { workers: ["Worker tokens and orgs", WorkerTokens] } : {}) } as unknown as Record<string, [string, () => JSX.Element]>;
  const tab = query.tab && query.tab in tabs ? query.tab : Object.keys(tabs)[0]!;
  const Part = tabs[tab]![1];
  return (
    <>
      <Header title="Access"><p class="faint">You are {session.value?.user}, {session.value?.role} of {session.value?.org}. The record of changes: <a href="/ui/bus?tab=changes">changelog of the bus</a>, <a href="/ui/operations">bulk operations</a>, <a href="/ui/sql?tab=history">queries</a>.</p></Header>
      <Tabs current={tab} tabs={Object.entries(tabs).map(([id, [label]]) => ({ id, label, href: href({ tab: id, cursor: null }) }))} />
      <Part />
    </>
  );
}
