import type { JSX } from "preact";
import type { AlertSettingsView, AlertView } from "../api/types";
import { may } from "../api/client";
import { useGet } from "../api/use";
import { useTitle } from "../app/title";
import { ActionButton, type Action } from "../ui/action";
import { Badge, Empty, Header, Load, Panel, Tabs, Time } from "../ui/basics";
import { commandLine } from "../ui/commands";
import { number } from "../ui/format";
import { PagedTable, Table, useQuery, type Column } from "../ui/table";
import { PAGE } from "./runs";

const COLUMNS: Column<AlertView>[] = [
  { head: "Event", cell: (row) => <strong>{row.event}</strong> },
  { head: "State", cell: (row) => (row.resolved_at ? <Badge state="Done" label="Resolved" /> : row.critical ? <Badge state="critical" label="Critical" /> : <Badge state="Paused" label="Open" />) },
  { head: "First occurrence", grow: true, cell: (row) => <code title={JSON.stringify(row.sample, null, 2)}>{JSON.stringify(row.sample)}</code> },
  { head: "Times", num: true, cell: (row) => number(row.told) },
  { head: "Opened", num: true, wide: true, cell: (row) => <Time at={row.opened_at} /> },
  { head: "Last", num: true, cell: (row) => <Time at={row.last_at} /> },
];

const resolve = (alert: AlertView, done: () => void): Action => ({
  label: "Acknowledge", scope: "platform", about: <p>Closes the alert in the operations feed, with your name.</p>,
  request: () => ({ method: "POST", path: `/v1/operations/alerts/${alert.alert_id}/resolve` }), cli: () => commandLine(["alert", "resolve", alert.alert_id]), done,
});

function Feed({ path, acknowledge }: { path: string; acknowledge?: boolean }): JSX.Element {
  const { query } = useQuery();
  const alerts = useGet<{ alerts: AlertView[]; next_cursor: string | null }>(path, { query: { cursor: query.cursor, limit: PAGE }, every: 10 });
  const columns = acknowledge ? [...COLUMNS.slice(0, 2), { head: "Org", cell: (row: AlertView) => row.org }, ...COLUMNS.slice(2), { head: "", num: true, cell: (row: AlertView) => row.resolved_at === null && <div class="actions"><ActionButton action={resolve(row, alerts.reload)} /></div> }] : COLUMNS;
  return (
    <Panel flush>
      <PagedTable label="Alerts" of={alerts} rows={(page) => [...page.alerts].sort((one, other) => Number(other.critical && !other.resolved_at) - Number(one.critical && !one.resolved_at))} rowKey={({ alert_id }) => alert_id} columns={columns} empty={<Empty title="No alerts.">Refused commands, unhealthy routes and expiring keys appear here.</Empty>} />
    </Panel>
  );
}

function channels(event: AlertSettingsView, done: () => void): Action {
  const of = (kind: string): string => event.channels.filter((channel) => channel.kind === kind).map(({ to }) => to ?? "").join(", ");
  const list = (kind: string, text: string | undefined): { kind: string; to: string }[] => (text ?? "").split(",").map((to) => to.trim()).filter(Boolean).map((to) => ({ kind, to }));
  return {
    label: "Channels", scope: "registry:write", confirm: "Save", about: <p>Where <strong>{event.event}</strong> is reported.{event.critical && " It is critical: it must keep at least one channel."}</p>,
    fields: [
      { name: "dashboard", label: "This dashboard", type: "checkbox", value: event.channels.some(({ kind }) => kind === "dashboard") ? "true" : "" },
      { name: "email", label: "Email addresses", value: of("email"), hint: "Separated by commas" },
      { name: "webhook", label: "Webhooks", value: of("webhook"), hint: "Names, separated by commas" },
    ],
    request: (values) => ({ method: "PUT", path: `/v1/alert-channels/${encodeURIComponent(event.event)}`, body: { channels: [...(values.dashboard ? [{ kind: "dashboard" }] : []), ...list("email", values.email), ...list("webhook", values.webhook)] } }),
    cli: (values) => commandLine(["alert", "set", event.event], { dashboard: Boolean(values.dashboard), email: values.email, webhook: values.webhook }), done,
  };
}

function Channels(): JSX.Element {
  const events = useGet<{ events: AlertSettingsView[] }>("/v1/alert-channels");
  return (
    <Panel flush>
      <Load of={events}>
        {({ events: all }) => (
          <Table label="Channels" rows={all} rowKey={({ event }) => event} columns={[
            { head: "Event", cell: (row) => row.event },
            { head: "", cell: (row) => row.critical && <Badge state="critical" label="Critical" /> },
            { head: "Reported to", grow: true, cell: (row) => row.channels.map(({ kind, to }) => (to ? `${kind} ${to}` : kind)).join(", ") || <span class="faint">nowhere</span> },
            { head: "Changed by", wide: true, cell: (row) => row.changed_by ?? <span class="faint">default</span> },
            { head: "", num: true, cell: (row) => <div class="actions"><ActionButton action={channels(row, events.reload)} /></div> },
          ]} />
        )}
      </Load>
    </Panel>
  );
}

export default function AlertsPage(): JSX.Element {
  useTitle("Alerts");
  const { query, href } = useQuery();
  const tab = query.tab ?? "alerts";
  const tabs = [["alerts", "Alerts"], ...(may("platform") ? [["operations", "Operations feed"]] : []), ["channels", "Channels"]] as [string, string][];
  return (
    <>
      <Header title="Alerts" />
      <Tabs current={tab} tabs={tabs.map(([id, label]) => ({ id, label, href: href({ tab: id === "alerts" ? null : id, cursor: null }) }))} />
      {tab === "alerts" && <Feed path="/v1/alerts" />}
      {tab === "operations" && <Feed path="/v1/operations/alerts" acknowledge />}
      {tab === "channels" && <Channels />}
    </>
  );
}
