// What happened on the bus: changes of the registry, decisions, replays.
import type { JSX } from "preact";
import type { AlertView, RegistryChange, ReplayView } from "../api/types";
import { useGet } from "../api/use";
import { ActionButton, type Action } from "../ui/action";
import { Badge, Empty, Id, Load, Panel, Time } from "../ui/basics";
import { Bar } from "../ui/charts";
import { commandLine } from "../ui/commands";
import { number } from "../ui/format";
import { Filters, PagedTable, useQuery } from "../ui/table";
import { ChangeShown, registryAction } from "./bus_registry";
import { failedFirst, PAGE } from "./runs";

function Change({ id, done }: { id: string; done: () => void }): JSX.Element {
  const change = useGet<RegistryChange>(`/v1/changes/${encodeURIComponent(id)}`);
  const revert = registryAction("Revert", "Makes the change that takes this one back.", () => ({ method: "POST", path: `/v1/changes/${id}/revert` }), { cli: () => commandLine(["change", "revert", id]), done });
  return (
    <Panel title={`Change ${id}`} aside={<ActionButton action={revert} />}>
      <Load of={change}>{(view) => <><p class="faint">By {view.changed_by}, <Time at={view.changed_at} full /></p><ChangeShown change={view} /></>}</Load>
    </Panel>
  );
}

export function Changes(): JSX.Element {
  const { query, href } = useQuery();
  const changes = useGet<{ changes: RegistryChange[]; next_cursor: string | null }>("/v1/changes", { query: { kind: query.kind, cursor: query.cursor, limit: PAGE }, every: 15 });
  return (
    <>
      <Filters of={[{ name: "kind", label: "Kind", options: ["routes", "services", "acls", "limits", "keys"] }]} />
      {query.change && <Change id={query.change} done={changes.reload} />}
      <Panel flush>
        <PagedTable label="Changes" of={changes} rows={(page) => page.changes} rowKey={({ change_id }) => String(change_id)} empty={<Empty title="No changes yet." />} columns={[
          { head: "Change", cell: (row) => <a href={href({ change: String(row.change_id) })}>{row.change_id}</a> },
          { head: "Action", cell: (row) => <Badge state={row.action === "delete" ? "Failed" : "Completed"} label={row.action} /> },
          { head: "Entry", grow: true, cell: (row) => <span title={row.subject}>{row.kind} <strong>{row.subject}</strong>{row.reverts ? <span class="faint"> reverts {row.reverts}</span> : ""}</span> },
          { head: "By", wide: true, cell: (row) => row.changed_by },
          { head: "When", num: true, cell: (row) => <Time at={row.changed_at} /> },
        ]} />
      </Panel>
    </>
  );
}

/** Refusals and misroutes as alerts report them, newest first. */
export function Feed(): JSX.Element {
  const { query } = useQuery();
  const alerts = useGet<{ alerts: AlertView[]; next_cursor: string | null }>("/v1/alerts", { query: { cursor: query.cursor, limit: PAGE }, every: 2 });
  return (
    <Panel flush title="Refused and undeliverable commands, bans, unhealthy routes">
      <PagedTable label="Decisions" of={alerts} rows={(page) => page.alerts} rowKey={({ alert_id }) => alert_id} empty={<Empty title="Nothing was refused.">Delivered commands are counted in the metrics and kept in the archive.</Empty>} columns={[
        { head: "Event", cell: (row) => <strong>{row.event}</strong> },
        { head: "First occurrence", grow: true, cell: (row) => <code title={JSON.stringify(row.sample, null, 2)}>{JSON.stringify(row.sample)}</code> },
        { head: "Times", num: true, cell: (row) => number(row.told) },
        { head: "Last", num: true, cell: (row) => <Time at={row.last_at} /> },
      ]} />
    </Panel>
  );
}

function replayAction(done: () => void): Action {
  const body = (values: Record<string, string>): unknown => {
    const names = ["source", "target", "name", "queue"].filter((name) => values[name]);
    return { origin: values.origin, reason: values.reason, dry_run: values.dry_run === "true", rate: Number(values.rate || 50), filters: Object.fromEntries(names.map((name) => [name, values[name]])) };
  };
  return {
    label: "Replay commands", scope: "admin", confirm: "Start", about: <p>Sends archived commands or dead letters again. A dry run only selects and counts them.</p>,
    fields: [
      { name: "origin", label: "From", type: "select", required: true, value: "archive", options: [{ value: "archive", label: "Archive" }, { value: "dead-letters", label: "Dead letters" }] },
      { name: "source", label: "Source" }, { name: "target", label: "Target" }, { name: "name", label: "Command" }, { name: "queue", label: "Queue", hint: "Dead letters of this queue" },
      { name: "rate", label: "Commands per second", type: "number", value: "50", required: true },
      { name: "reason", label: "Reason", required: true },
      { name: "dry_run", label: "Dry run", type: "checkbox", value: "true", hint: "Selects and counts, sends nothing" },
    ],
    request: (values) => ({ method: "POST", path: "/v1/replays", body: body(values) }),
    cli: ({ origin, source, target, name, queue, reason, dry_run }) => commandLine(["replay", "start"], { reason: reason || "REASON", "dead-letters": origin === "dead-letters" ? queue || "QUEUE" : "", source, target, name, "dry-run": dry_run === "true" }), done,
  };
}

export function Replays(): JSX.Element {
  const { query } = useQuery();
  const replays = useGet<{ replays: ReplayView[]; next_cursor: string | null }>("/v1/replays", { query: { cursor: query.cursor, limit: PAGE }, every: 3 });
  const cancel = (row: ReplayView): Action => ({ label: "Cancel", scope: "admin", danger: true, about: <p>Sends no more commands. Those that are sent stay sent.</p>, request: () => ({ method: "POST", path: `/v1/replays/${row.replay_id}/cancel` }), cli: () => commandLine(["replay", "cancel", row.replay_id]), done: replays.reload });
  return (
    <Panel flush title="Replays" aside={<ActionButton action={replayAction(replays.reload)} />}>
      <PagedTable label="Replays" of={replays} rows={(page) => failedFirst(page.replays)} rowKey={({ replay_id }) => replay_id} empty={<Empty title="No replays yet." />} columns={[
        { head: "Replay", cell: (row) => <Id id={row.replay_id} /> },
        { head: "State", cell: (row) => <><Badge state={row.state} /> {row.dry_run && <Badge state="Canceled" label="dry run" />}</> },
        { head: "Reason", grow: true, cell: (row) => <span title={row.detail ?? row.reason}>{row.reason} <span class="faint">{row.detail}</span></span> },
        { head: "Sent", num: true, cell: (row) => `${number(row.sent)} of ${number(row.selected)}` },
        { head: "Progress", wide: true, cell: (row) => <Bar of={row.selected ?? 1} label="Sent" parts={[["good", row.sent], ["bad", row.failed]]} /> },
        { head: "By", wide: true, cell: (row) => row.operator },
        { head: "Started", num: true, wide: true, cell: (row) => <Time at={row.created_at} /> },
        { head: "", num: true, cell: (row) => row.ended_at === null && <div class="actions"><ActionButton action={cancel(row)} /></div> },
      ]} />
    </Panel>
  );
}
