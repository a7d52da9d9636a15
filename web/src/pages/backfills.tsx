import { useLocation } from "preact-iso";
import type { JSX } from "preact";
import type { BackfillAnswer, BackfillView } from "../api/types";
import { useGet } from "../api/use";
import { backfillLink, JobName } from "../app/links";
import { useTitle } from "../app/title";
import { Actions, type Action, type Values } from "../ui/action";
import { Badge, Empty, Header, Id, Panel, Time } from "../ui/basics";
import { Bar } from "../ui/charts";
import { commandLine } from "../ui/commands";
import { number } from "../ui/format";
import { PagedTable, useQuery } from "../ui/table";
import { failedFirst, PAGE } from "./runs";

/** A position of a range: a number, or a date where the dataset is partitioned by time. */
export const position = (text: string | undefined): number | string => (text && /^-?\d+$/.test(text.trim()) ? Number(text) : (text?.trim() ?? ""));

export function backfillAction(dag: string, job: string, open: (href: string) => void, range?: { start: number | string; end: number | string }): Action {
  const path = (values: Values): string => `/v1/dags/${encodeURIComponent(values.dag || dag)}/jobs/${encodeURIComponent(values.job || job)}/backfills`;
  const body = (values: Values, dry: boolean): unknown => ({ start: position(values.start), end: position(values.end), priority: values.priority || "bulk", ...(values.reason ? { reason: values.reason } : {}), ...(dry ? { dry_run: true } : {}) });
  return {
    label: "Backfill", confirm: "Start the backfill", scope: "jobs:write",
    about: <p>Recomputes a range of the job. Its tasks are released as the job's queue has room, below the work of users if the priority is bulk.</p>,
    fields: [
      ...(dag ? [] : [{ name: "dag", label: "DAG", required: true }, { name: "job", label: "Job", required: true }]),
      { name: "start", label: "From", required: true, value: range ? String(range.start) : "", hint: "A position or a date, inclusive" },
      { name: "end", label: "To", required: true, value: range ? String(range.end) : "" },
      { name: "priority", label: "Priority", type: "select", required: true, value: "bulk", options: [{ value: "bulk", label: "bulk: gives way to other work" }, { value: "normal", label: "normal" }] },
      { name: "reason", label: "Reason", hint: "Recorded with the backfill" },
    ],
    request: (values) => ({ method: "POST", path: path(values), body: body(values, false) }),
    preview: (values) => ({ method: "POST", path: path(values), body: body(values, true) }),
    show: (answer: BackfillAnswer) => <p><strong>{number(answer.scopes)}{answer.more ? "+" : ""}</strong> tasks{answer.first[0] ? <>, the first from {number(answer.first[0].start)} to {number(answer.first[0].end)}.</> : "."} <span class="faint">Bulk work gives way while backpressure pauses the job.</span></p>,
    cli: (values) => commandLine(["backfill", "start", values.dag || dag, values.job || job, values.start || "START", values.end || "END"], { priority: values.priority, reason: values.reason }),
    done: (answer: BackfillAnswer) => open(answer.backfill ? backfillLink(answer.backfill.run_id) : "/ui/backfills"),
  };
}

export default function BackfillsPage(): JSX.Element {
  useTitle("Backfills");
  const { query } = useQuery();
  const { route } = useLocation();
  const backfills = useGet<{ backfills: BackfillView[]; next_cursor: string | null }>("/v1/backfills", { query: { cursor: query.cursor, limit: PAGE }, every: 5 });
  return (
    <>
      <Header title="Backfills" actions={<Actions of={[backfillAction("", "", route)]} />} />
      <Panel flush>
        <PagedTable label="Backfills" of={backfills} rows={(page) => failedFirst(page.backfills)} rowKey={({ run_id }) => run_id} empty={<Empty title="No backfills yet.">Start one here, or on the page of a DAG.</Empty>} columns={[
          { head: "Backfill", cell: (row) => <Id id={row.run_id} href={backfillLink(row.run_id)} /> },
          { head: "State", cell: (row) => <Badge state={row.state} /> },
          { head: "Job", cell: (row) => <JobName job={row.job} id={row.job_id} /> },
          { head: "Progress", grow: true, cell: ({ counts, total }) => <Bar of={total ?? 1} label={`${number(counts.Completed ?? 0)} of ${number(total)} done, ${number(counts.Failed ?? 0)} failed`} parts={[["good", counts.Completed ?? 0], ["bad", counts.Failed ?? 0], ["live", counts.Running ?? 0]]} /> },
          { head: "Range", num: true, cell: (row) => <>{number(row.start)} – {number(row.end)}</> },
          { head: "By", wide: true, cell: (row) => row.requested_by },
          { head: "Started", num: true, wide: true, cell: (row) => <Time at={row.created_at} /> },
        ]} />
      </Panel>
    </>
  );
}
