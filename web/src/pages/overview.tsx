import type { JSX } from "preact";
import { useRef } from "preact/hooks";
import { live } from "../api/live";
import type { AlertView, FailureView, Minute, Overview as View, PauseView } from "../api/types";
import { may, serverNow } from "../api/client";
import { useGet } from "../api/use";
import { JobName, jobText, operationLink, runLink, taskLink, tasksLink } from "../app/links";
import { useTitle } from "../app/title";
import { Badge, Empty, Header, Load, Panel, Stat, Time } from "../ui/basics";
import { Bar, Chart, Legend } from "../ui/charts";
import { duration, number, percent, rate, shortId } from "../ui/format";
import { Table } from "../ui/table";

const EVERY_SECONDS = 30;
const KINDS = ["gateway", "dispatcher", "scheduler", "ingest", "sink", "bus", "query"];
const SHOWN = 10;

/** The last hour of the first load, with the minutes that the live stream has sent since. */
function useMinutes(first: Minute[] | undefined): Minute[] {
  const known = useRef(new Map<string, Minute>());
  for (const minute of [...(first ?? []), ...(live.value?.overview.minutes ?? [])]) known.current.set(minute.minute, minute);
  const last = Date.parse(live.value?.overview.at ?? new Date(serverNow()).toISOString());
  const ends = Math.floor(last / 60_000) * 60_000;
  return Array.from({ length: 60 }, (_, at) => {
    const minute = new Date(ends - (59 - at) * 60_000).toISOString().replace(".000Z", "Z");
    return known.current.get(minute) ?? { minute, completed: 0, failed: 0, canceled: 0 };
  });
}

function Numbers({ view, minutes, alerts }: { view: View; minutes: Minute[]; alerts: AlertView[] }): JSX.Element {
  const recent = minutes.slice(-10);
  const completed = recent.reduce((sum, minute) => sum + minute.completed, 0);
  const failed = recent.reduce((sum, minute) => sum + minute.failed, 0);
  const depth = view.queues.reduce((sum, queue) => sum + queue.depth, 0);
  const dead = view.queues.reduce((sum, queue) => sum + queue.dead_letters, 0);
  const open = alerts.filter(({ resolved_at }) => resolved_at === null).length;
  return (
    <div class="stats">
      <Stat label="Failed in 10 min" value={number(failed)} {...(failed ? { tone: "bad" } : {})} href={tasksLink({ status: "Failed" })} hint={completed + failed ? `${percent(failed / (completed + failed))} of what ended` : "nothing ended"} />
      <Stat label="Dead letters" value={number(dead)} {...(dead ? { tone: "bad" } : {})} href="/ui/queues" hint="in queues" />
      <Stat label="Open alerts" value={open >= SHOWN ? `${SHOWN}+` : number(open)} {...(open ? { tone: "warn" } : {})} href="/ui/alerts" hint="of the bus" />
      <Stat label="Live runs" value={view.runs.length >= 50 ? "50+" : number(view.runs.length)} href="/ui/runs" hint="not ended" />
      <Stat label="Waiting messages" value={number(depth)} href="/ui/queues" hint="in all queues" />
      <Stat label="Completed" value={rate(completed / 600)} hint="mean of 10 min" />
    </div>
  );
}

function Throughput({ minutes }: { minutes: Minute[] }): JSX.Element {
  return (
    <Panel title="Ended attempts per minute" aside={<Legend of={[["good", "completed"], ["bad", "failed"], ["idle", "canceled"]]} />}>
      <Chart
        label="Ended attempts per minute"
        time
        height={168}
        x={minutes.map(({ minute }) => Date.parse(minute) / 1000)}
        series={[
          { label: "failed", tone: "bad", values: minutes.map(({ failed }) => failed) },
          { label: "canceled", tone: "idle", values: minutes.map(({ canceled }) => canceled) },
          { label: "completed", tone: "good", values: minutes.map(({ completed }) => completed) },
        ]}
      />
    </Panel>
  );
}

export function Failures({ of }: { of: FailureView[] }): JSX.Element {
  return (
    <Table
      label="Newest failures"
      rows={of}
      rowKey={(row) => `${row.task_id}/${row.attempt}`}
      empty={<Empty title="No failures.">Attempts that fail appear here, newest first.</Empty>}
      columns={[
        { head: "Failure", grow: true, cell: (row) => <a href={taskLink(row.task_id)} title={row.error_message ?? ""}><strong>{row.error_class ?? row.outcome}</strong> <span class="faint">{row.error_message}</span></a> },
        { head: "Job", cell: (row) => <JobName job={row.job} id={row.job_id} /> },
        { head: "Attempt", num: true, wide: true, cell: (row) => row.attempt },
        { head: "Ended", num: true, cell: (row) => <Time at={row.ended_at} /> },
      ]}
    />
  );
}

function LiveRuns({ runs }: { runs: View["runs"] }): JSX.Element | null {
  if (!runs.length) return null;
  return (
    <Panel title="Live runs" flush aside={<a href="/ui/runs">All runs</a>}>
      <Table label="Live runs" rows={runs.slice(0, 12)} rowKey={({ run_id }) => run_id} columns={[
        { head: "Run", cell: (run) => <a class="cut" href={runLink(run.run_id)} title={jobText(run.job) || run.run_id}>{jobText(run.job) || shortId(run.run_id)}</a> },
        { head: "State", cell: ({ state }) => <Badge state={state} /> },
        { head: "Progress", grow: true, cell: ({ counts, total }) => (
          <Bar label={`${number(counts.Completed ?? 0)} completed, ${number(counts.Failed ?? 0)} failed of ${number(total)}`} of={total ?? 1} parts={[["good", counts.Completed ?? 0], ["bad", counts.Failed ?? 0], ["idle", counts.Canceled ?? 0], ["live", counts.Running ?? 0]]} />
        ) },
        { head: "Failed", num: true, cell: ({ counts }) => <span class={counts.Failed ? "bad-text" : "faint"}>{number(counts.Failed ?? 0)}</span> },
        { head: "Tasks", num: true, wide: true, cell: ({ total }) => number(total) },
      ]} />
    </Panel>
  );
}

function Queues({ view }: { view: View }): JSX.Element {
  const queues = [...view.queues].sort((one, other) => other.dead_letters - one.dead_letters || other.depth - one.depth);
  return (
    <Panel title="Queues" flush aside={<a href="/ui/queues">Queues and workers</a>}>
      <Table label="Queues" rows={queues} rowKey={({ queue }) => queue} columns={[
        { head: "Queue", grow: true, cell: ({ queue }) => <span title={queue}>{queue}</span> },
        { head: "Depth", num: true, cell: ({ depth }) => number(depth) },
        { head: "In flight", num: true, cell: ({ in_flight }) => number(in_flight) },
        { head: "Oldest", num: true, cell: ({ oldest_age_seconds }) => duration(oldest_age_seconds) },
        { head: "Dead", num: true, cell: ({ dead_letters }) => <span class={dead_letters ? "bad-text" : "faint"}>{number(dead_letters)}</span> },
      ]} />
    </Panel>
  );
}

function Pressure(): JSX.Element | null {
  const pauses = useGet<{ pauses: PauseView[] }>("/v1/pauses", { query: { limit: SHOWN }, every: 10 });
  if (!pauses.data?.pauses.length) return null;
  return (
    <Panel title="Backpressure" flush>
      <Table label="Jobs paused by backpressure" rows={pauses.data.pauses} rowKey={({ job_id }) => job_id} columns={[
        { head: "Paused", cell: (row) => <JobName job={row.job} id={row.job_id} /> },
        { head: "Because of", cell: (row) => <JobName job={row.cause} id={row.cause_id} /> },
        { head: "Path", grow: true, cell: ({ path, reason }) => <span title={reason}>{path.join(" → ")}</span> },
        { head: "Level", wide: true, cell: ({ level }) => <Badge state="paused" label={level === "all" ? "all work" : "bulk work"} /> },
        { head: "Since", num: true, cell: ({ since }) => <Time at={since} /> },
      ]} />
    </Panel>
  );
}

function Operations(): JSX.Element | null {
  const running = live.value?.operations ?? [];
  if (!running.length) return null;
  return (
    <Panel title="Bulk operations in progress" flush>
      <Table label="Bulk operations in progress" rows={running} rowKey={({ operation_id }) => operation_id} columns={[
        { head: "Operation", cell: (row) => <a href={operationLink(row.operation_id)}>{row.kind}</a> },
        { head: "Progress", grow: true, cell: (row) => <Bar of={1} label={percent(row.progress ?? 0)} parts={[["live", row.progress ?? 0]]} /> },
        { head: "Changed", num: true, cell: (row) => number(row.changed) },
        { head: "By", wide: true, cell: (row) => row.requested_by },
      ]} />
    </Panel>
  );
}

function Alerts({ alerts }: { alerts: AlertView[] }): JSX.Element | null {
  const open = alerts.filter(({ resolved_at }) => resolved_at === null);
  if (!open.length) return null;
  return (
    <Panel title="Open alerts" flush aside={<a href="/ui/alerts">All alerts</a>}>
      <Table label="Open alerts" rows={open} rowKey={({ alert_id }) => alert_id} columns={[
        { head: "Event", grow: true, cell: (row) => <a href="/ui/alerts">{row.event}</a> },
        { head: "Times", num: true, cell: (row) => number(row.told) },
        { head: "Last", num: true, cell: (row) => <Time at={row.last_at} /> },
      ]} />
    </Panel>
  );
}

/** Processes with a connection to the state database, by kind. */
function Processes({ of }: { of: View["processes"] }): JSX.Element {
  const connected = new Set(of.map(({ name }) => name.replace("interlock-", "")));
  return <div class="processes">{KINDS.map((kind) => <Badge key={kind} state={connected.has(kind) ? "up" : "idle"} label={connected.has(kind) ? kind : `no ${kind}`} />)}</div>;
}

export default function OverviewPage(): JSX.Element {
  useTitle("Overview");
  const overview = useGet<View>("/v1/overview", { every: EVERY_SECONDS });
  const alerts = useGet<{ alerts: AlertView[] }>(may("registry:read") ? "/v1/alerts" : null, { query: { limit: SHOWN }, every: EVERY_SECONDS });
  const minutes = useMinutes(overview.data?.minutes);
  const first = overview.data;
  const open = alerts.data?.alerts ?? [];
  return (
    <>
      <Header title="Overview" actions={first && <Processes of={(live.value?.overview ?? first).processes} />} />
      <Load of={overview} lines={12}>
        {(loaded) => {
          const view = live.value?.overview ?? loaded;
          return (
            <>
              <Numbers view={view} minutes={minutes} alerts={open} />
              <Pressure />
              <Panel title="Newest failures" flush aside={<a href="/ui/tasks?status=Failed">Failed tasks</a>}><Failures of={view.failures.slice(0, SHOWN)} /></Panel>
              <Operations />
              <div class="columns">
                <div><Throughput minutes={minutes} /><LiveRuns runs={view.runs} /></div>
                <div><Queues view={view} /><Alerts alerts={open} /></div>
              </div>
            </>
          );
        }}
      </Load>
    </>
  );
}
