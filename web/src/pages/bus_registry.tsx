// Services, routes, ACLs, limits and keys of the command bus. Each change shows its dry run first.
import type { JSX } from "preact";
import type { components } from "../../build/schema";
import type { Request } from "../api/client";
import type { RegistryChange, RouteHealth } from "../api/types";
import { useGet } from "../api/use";
import { dagLink } from "../app/links";
import { ActionButton, type Action, type Field, type Values } from "../ui/action";
import { Badge, Empty, ErrorNote, Note, Panel, Time } from "../ui/basics";
import { commandLine } from "../ui/commands";
import { Diff, pretty } from "../ui/diff";
import { duration, number } from "../ui/format";
import { PagedTable, useQuery } from "../ui/table";
import { PAGE } from "./runs";

type Schemas = components["schemas"];
type Paged<Name extends string, Row> = { next_cursor: string | null } & Record<Name, Row[]>;

export function ChangeShown({ change }: { change: RegistryChange }): JSX.Element {
  if (change.action === "none") return <p>Nothing changes.</p>;
  return <><p><Badge state={change.action === "delete" ? "Failed" : "Completed"} label={change.action} /> {change.kind} <strong>{change.subject}</strong></p><Diff before={pretty(change.before)} after={pretty(change.after)} label="Change" /></>;
}

/** A change of the registry: the dry run is the same request with `dry_run`. */
export function registryAction(label: string, about: string, request: (values: Values) => Request, rest: Partial<Action>): Action {
  return {
    label, about: <p>{about}</p>, scope: "registry:write", request, show: (change: RegistryChange) => <ChangeShown change={change} />, ...rest,
    preview: (values) => { const plain = request(values); return { ...plain, query: { ...plain.query, dry_run: true } }; },
  };
}

const amount = (text: string | undefined): number | undefined => (text ? Number(text) : undefined);
const part = encodeURIComponent;
const NAMES: Field[] = [
  { name: "target", label: "Target service", required: true, hint: "org/service" },
  { name: "name", label: "Command", required: true },
];

const routeAction = (done: () => void): Action => registryAction("Add or change a route", "Commands to a target with this name are delivered to the queue, or become tasks of the job.",
  ({ target, name, queue, dlq, dag, job }) => ({ method: "POST", path: "/v1/routes", body: { target, name, ...(queue ? { queue } : {}), ...(dlq ? { dlq } : {}), ...(dag ? { dag } : {}), ...(job ? { job } : {}) } }),
  { fields: [...NAMES, { name: "queue", label: "Queue" }, { name: "dlq", label: "Dead letter queue" }, { name: "dag", label: "DAG", hint: "Instead of a queue: the DAG of the job" }, { name: "job", label: "Job" }], cli: ({ target, name, ...rest }) => commandLine(["route", "add", target || "TARGET", name || "NAME"], rest), confirm: "Save", done });

const testAction: Action = {
  label: "Test a route", about: <p>Shows whether a command would be delivered, and why not. Nothing is sent.</p>, scope: "registry:read", confirm: "Test",
  fields: [{ name: "source", label: "Source", required: true, hint: "org/service" }, ...NAMES],
  request: ({ source, target, name }) => ({ method: "POST", path: "/v1/routes/test", body: { source, target, name } }),
  cli: ({ source, target, name }) => commandLine(["route", "test", source || "SOURCE", target || "TARGET", name || "NAME"]),
  result: (trial: Schemas["RouteTrial"]) => (
    <>
      <Note tone={trial.deliverable ? "good" : "bad"} title={trial.deliverable ? "It would be delivered." : "It would be refused."} />
      <ul class="checks">{trial.checks.map((check) => <li key={check.check}><Badge state={check.ok ? "Completed" : "Failed"} label={check.check} /> {check.detail}</li>)}</ul>
    </>
  ),
};

const deleteRoute = ({ target, name }: { target: string; name: string }, done: () => void): Action =>
  registryAction("Delete", "Commands to it are refused from now on.", () => ({ method: "DELETE", path: `/v1/routes/${part(target)}/${part(name)}` }), { danger: true, cli: () => commandLine(["route", "remove", target, name], { yes: true }), done });

export function Routes(): JSX.Element {
  const { query } = useQuery();
  const routes = useGet<Paged<"routes", Schemas["RouteView"]>>("/v1/routes", { query: { cursor: query.cursor, limit: PAGE }, every: 15 });
  const health = useGet<{ routes: RouteHealth[] }>("/v1/route-health", { query: { limit: 200 }, every: 10 });
  const states = new Map(health.data?.routes.map((route) => [`${route.target}/${route.name}`, route]));
  const of = (row: { target: string; name: string }): RouteHealth | undefined => states.get(`${row.target}/${row.name}`);
  const isBad = (row: Schemas["RouteView"]): number => Number((of(row)?.status ?? "healthy") !== "healthy");
  return (
    <Panel flush title="Routes" aside={<><ActionButton action={testAction} /><ActionButton action={routeAction(routes.reload)} /></>}>
      <ErrorNote of={health} />
      <PagedTable label="Routes" of={routes} rows={(page) => [...page.routes].sort((one, other) => isBad(other) - isBad(one))} rowKey={({ target, name }) => `${target}/${name}`} empty={<Empty title="No routes yet.">A route says where commands to a service go.</Empty>} columns={[
        { head: "Command", grow: true, cell: (row) => <span title={`${row.target} ${row.name}`}><strong>{row.name}</strong> <span class="faint">to {row.target}</span></span> },
        { head: "Health", cell: (row) => <Badge state={of(row)?.status ?? null} /> },
        { head: "Delivered to", wide: true, cell: (row) => (row.dag ? <a href={dagLink(row.dag)}>{row.dag} / {row.job}</a> : row.queue ?? row.job) },
        { head: "Depth", num: true, cell: (row) => number(of(row)?.depth) },
        { head: "Oldest", num: true, wide: true, cell: (row) => duration(of(row)?.oldest_age_seconds) },
        { head: "Dead", num: true, cell: (row) => <span class={of(row)?.dead_letters ? "bad-text" : "faint"}>{number(of(row)?.dead_letters)}</span> },
        { head: "Changed", num: true, wide: true, cell: (row) => <Time at={row.changed_at} /> },
        { head: "", num: true, wide: true, cell: (row) => <div class="actions"><ActionButton action={deleteRoute(row, routes.reload)} /></div> },
      ]} />
    </Panel>
  );
}

export function Services(): JSX.Element {
  const { query } = useQuery();
  const services = useGet<Paged<"services", Schemas["ServiceView"]>>("/v1/services", { query: { cursor: query.cursor, limit: PAGE } });
  const add = registryAction("Add or change a service", "A new service gets its first signing key.", ({ name, description }) => ({ method: "POST", path: "/v1/services", body: { name, ...(description ? { description } : {}) } }), { fields: [{ name: "name", label: "Name", required: true }, { name: "description", label: "Description" }], confirm: "Save", cli: ({ name, description }) => commandLine(["service", "add", name || "SERVICE"], { description }), done: services.reload });
  const remove = (name: string): Action => registryAction("Delete", "Deletes the service and its keys. It must not be used by a route, an ACL or a limit.", () => ({ method: "DELETE", path: `/v1/services/${part(name)}` }), { scope: "admin", danger: true, cli: () => commandLine(["service", "remove", name], { yes: true }), done: services.reload });
  return (
    <Panel flush title="Services" aside={<ActionButton action={add} />}>
      <PagedTable label="Services" of={services} rows={(page) => page.services} rowKey={({ source }) => source} empty={<Empty title="No services yet.">A service sends or receives commands.</Empty>} columns={[
        { head: "Service", cell: (row) => <strong>{row.source}</strong> },
        { head: "Description", grow: true, cell: (row) => <span title={row.description}>{row.description}</span> },
        { head: "Dispatch", wide: true, cell: (row) => row.dispatch_mode ?? <span class="faint">default</span> },
        { head: "Changed by", wide: true, cell: (row) => row.changed_by },
        { head: "Changed", num: true, cell: (row) => <Time at={row.changed_at} /> },
        { head: "", num: true, cell: (row) => <div class="actions"><ActionButton action={remove(row.name)} /></div> },
      ]} />
    </Panel>
  );
}

export function Acls(): JSX.Element {
  const { query } = useQuery();
  const acls = useGet<Paged<"acls", Schemas["AclView"]>>("/v1/acls", { query: { cursor: query.cursor, limit: PAGE } });
  const add = registryAction("Allow a source", "The source may send this command to the target.", ({ source, target, name, sensitivity }) => ({ method: "POST", path: "/v1/acls", body: { source, target, name, sensitivity } }), { scope: "admin", confirm: "Allow", fields: [{ name: "source", label: "Source", required: true }, ...NAMES, { name: "sensitivity", label: "Sensitivity", type: "select", value: "moderate", required: true, options: ["low", "moderate", "critical"].map((value) => ({ value, label: value })) }], cli: ({ source, target, name, sensitivity }) => commandLine(["acl", "allow", source || "SOURCE", target || "TARGET", name || "NAME"], { sensitivity }), done: acls.reload });
  const remove = (row: Schemas["AclView"]): Action => registryAction("Revoke", "The source may no longer send this command.", () => ({ method: "DELETE", path: `/v1/acls/${part(row.target)}/${part(row.name)}/${part(row.source.split("/").at(-1)!)}` }), { scope: "admin", danger: true, cli: () => commandLine(["acl", "revoke", row.source, row.target, row.name], { yes: true }), done: acls.reload });
  return (
    <Panel flush title="ACLs" aside={<ActionButton action={add} />}>
      <PagedTable label="ACLs" of={acls} rows={(page) => page.acls} rowKey={(row) => `${row.source} ${row.target} ${row.name}`} empty={<Empty title="Nobody may send anything.">Without an ACL every command is refused.</Empty>} columns={[
        { head: "Source", cell: (row) => <strong>{row.source}</strong> },
        { head: "May send", grow: true, cell: (row) => <span>{row.name} <span class="faint">to {row.target}</span></span> },
        { head: "Sensitivity", cell: (row) => <Badge state={row.sensitivity} /> },
        { head: "Expires", num: true, wide: true, cell: (row) => <Time at={row.expires_at} /> },
        { head: "By", wide: true, cell: (row) => row.changed_by },
        { head: "", num: true, cell: (row) => <div class="actions"><ActionButton action={remove(row)} /></div> },
      ]} />
    </Panel>
  );
}

export function Limits(): JSX.Element {
  const { query } = useQuery();
  const limits = useGet<Paged<"limits", Schemas["LimitView"]>>("/v1/limits", { query: { cursor: query.cursor, limit: PAGE } });
  const add = registryAction("Add or change a limit", "Without a target and a command, the limit holds for the source as a whole.", ({ target, name, source, rate, window_seconds, burst, enforcement }) => ({ method: "POST", path: "/v1/limits", body: { ...(target ? { target } : {}), ...(name ? { name } : {}), ...(source ? { source } : {}), rate: amount(rate), window_seconds: amount(window_seconds), burst: amount(burst) ?? 0, enforcement } }), {
    confirm: "Save", done: limits.reload,
    fields: [...NAMES.map((field) => ({ ...field, required: false })), { name: "source", label: "Source" }, { name: "rate", label: "Commands", type: "number", required: true }, { name: "window_seconds", label: "per seconds", type: "number", required: true, value: "1" }, { name: "burst", label: "Burst", type: "number", value: "0" }, { name: "enforcement", label: "Enforcement", type: "select", value: "strict", required: true, options: ["strict", "relaxed", "shadow"].map((value) => ({ value, label: value })) }],
    cli: ({ target, name, source, rate, window_seconds, burst }) => commandLine(["limit", "set", ...[target, name].filter((word): word is string => Boolean(word))], { source, rate: rate || "RATE", "window-seconds": window_seconds, burst }),
  });
  const remove = (row: Schemas["LimitView"]): Action => registryAction("Delete", "The limit no longer holds.", () => (row.target ? { method: "DELETE", path: `/v1/limits/${part(row.target)}/${part(row.name!)}`, query: { source: row.source } } : { method: "DELETE", path: "/v1/limits", query: { source: row.source } }), { danger: true, cli: () => commandLine(["limit", "remove", ...[row.target, row.name].filter((word): word is string => Boolean(word))], { source: row.source, yes: true }), done: limits.reload });
  return (
    <Panel flush title="Limits" aside={<ActionButton action={add} />}>
      <PagedTable label="Limits" of={limits} rows={(page) => page.limits} rowKey={(row) => `${row.source} ${row.target} ${row.name}`} empty={<Empty title="No limits.">Every command that an ACL allows is accepted.</Empty>} columns={[
        { head: "Command", grow: true, cell: (row) => (row.name ? <span>{row.name} <span class="faint">to {row.target}</span></span> : <span class="faint">all commands</span>) },
        { head: "Source", cell: (row) => row.source ?? <span class="faint">each</span> },
        { head: "Limit", num: true, cell: (row) => `${number(row.rate)} per ${duration(row.window_seconds)}` },
        { head: "Burst", num: true, wide: true, cell: (row) => number(row.burst) },
        { head: "Enforcement", wide: true, cell: (row) => row.enforcement },
        { head: "Changed", num: true, wide: true, cell: (row) => <Time at={row.changed_at} /> },
        { head: "", num: true, cell: (row) => <div class="actions"><ActionButton action={remove(row)} /></div> },
      ]} />
    </Panel>
  );
}

export function Keys(): JSX.Element {
  const { query } = useQuery();
  const keys = useGet<Paged<"keys", Schemas["ServiceKeyView"]>>("/v1/service-keys", { query: { cursor: query.cursor, limit: PAGE } });
  const rotate: Action = { label: "Rotate a key", scope: "admin", about: <p>Makes the next version of a service's key. The previous one still verifies during the overlap.</p>, fields: [{ name: "service", label: "Service", required: true }], request: ({ service }) => ({ method: "POST", path: "/v1/service-keys", body: { service } }), cli: ({ service }) => commandLine(["service-key", "rotate", service || "SERVICE"]), done: keys.reload };
  const revoke = (row: Schemas["ServiceKeyView"]): Action => ({ label: "Revoke", scope: "admin", danger: true, about: <p>Commands signed with this version are refused from now on.</p>, request: () => ({ method: "DELETE", path: `/v1/service-keys/${part(row.service)}/${part(row.version_id)}` }), cli: () => commandLine(["service-key", "revoke", row.service, row.version_id], { yes: true }), done: keys.reload });
  return (
    <Panel flush title="Keys" aside={<ActionButton action={rotate} />}>
      <PagedTable label="Keys" of={keys} rows={(page) => page.keys} rowKey={(row) => row.version_id} empty={<Empty title="No keys.">A service gets its first key when it is added.</Empty>} columns={[
        { head: "Service", cell: (row) => <strong>{row.service}</strong> },
        { head: "Version", grow: true, cell: (row) => <code>{row.version_id}</code> },
        { head: "State", cell: (row) => <Badge state={row.state} /> },
        { head: "Age", num: true, cell: (row) => <Time at={row.created_at} /> },
        { head: "Rotates", num: true, wide: true, cell: (row) => <Time at={row.rotates_at} /> },
        { head: "", num: true, cell: (row) => (row.state === "current" || row.state === "previous") && <div class="actions"><ActionButton action={revoke(row)} /></div> },
      ]} />
    </Panel>
  );
}
