// Bulk operations: one action on all that match a filter, executed by the server, with a dry run first.
import { useLocation } from "preact-iso";
import type { JSX } from "preact";
import type { BulkFilter, BulkPreview, BulkView } from "../api/types";
import { jobText, operationLink } from "../app/links";
import { ActionButton, type Action, type Values } from "./action";
import { Badge } from "./basics";
import { commandLine } from "./commands";
import { number, shortId } from "./format";

export type BulkKind = "retry" | "cancel" | "redrive" | "reprioritise" | "pause" | "resume";

const LABELS: Record<BulkKind, string> = {
  retry: "Retry all", cancel: "Cancel all", redrive: "Redrive dead letters", reprioritise: "Change priority", pause: "Pause all", resume: "Resume all",
};
const ABOUT: Record<BulkKind, string> = {
  retry: "Queues every failed task that matches, now: those that wait for a retry, and dead letters.",
  cancel: "Cancels every task that matches and has not ended. Running tasks are asked to stop.",
  redrive: "Gives every dead letter that matches fresh attempts.",
  reprioritise: "Gives every run that matches another priority: its waiting tasks move to the other queue.",
  pause: "Pauses every run that matches: running tasks continue, no other task starts.",
  resume: "Lets every paused run that matches continue.",
};

export function Matches({ preview }: { preview: BulkPreview }): JSX.Element {
  return (
    <>
      <p>
        <strong>{preview.more ? `${number(preview.matched)}+` : number(preview.matched)}</strong> {preview.unit} match{preview.matched > 0 ? ", for example:" : "."}
      </p>
      <ul>
        {preview.samples.slice(0, 5).map((one) => (
          <li key={one.task_id ?? one.run_id} class="small">
            {jobText(one.job) || shortId(one.job_id)} {one.index === null ? "" : `#${one.index} `}<Badge state={one.status} /> <span class="faint">{one.error_class}</span>
          </li>
        ))}
      </ul>
    </>
  );
}

/** Returns the filter without what has no meaning for this kind of operation. */
function narrowed(kind: BulkKind, filter: BulkFilter): BulkFilter {
  const runs = kind === "pause" || kind === "resume" || kind === "reprioritise";
  const names: (keyof BulkFilter)[] = runs ? ["job", "dag", "run", "operator", "created_after", "created_before"] : (Object.keys(filter) as (keyof BulkFilter)[]);
  const given = names.filter((name) => filter[name] && !(name === "status" && kind !== "cancel"));
  return Object.fromEntries(given.map((name) => [name, filter[name]]));
}

export function bulkAction(kind: BulkKind, filter: BulkFilter, open: (operation: BulkView) => void): Action {
  const of = narrowed(kind, filter);
  const body = (values: Values, dry: boolean): unknown => ({
    kind, filter: of, ...(kind === "reprioritise" ? { priority: values.priority || "bulk" } : {}), ...(values.reason ? { reason: values.reason } : {}), ...(dry ? { dry_run: true } : {}),
  });
  const selective = Boolean(of.job || of.dag || of.run || of.operator);
  return {
    label: LABELS[kind],
    about: <><p>{ABOUT[kind]}</p><p class="faint">Filter: {Object.entries(of).map(([name, value]) => `${name} = ${value}`).join(", ")}</p></>,
    scope: "tasks:write",
    danger: kind === "cancel",
    blocked: !selective && "Filter by a job, DAG, run or operator first",
    fields: [
      ...(kind === "reprioritise" ? [{ name: "priority", label: "Priority", type: "select" as const, value: "bulk", required: true, options: [{ value: "normal", label: "normal" }, { value: "bulk", label: "bulk" }] }] : []),
      { name: "reason", label: "Reason", hint: "Recorded with the operation" },
    ],
    request: (values) => ({ method: "POST", path: "/v1/bulk-operations", body: body(values, false) }),
    preview: (values) => ({ method: "POST", path: "/v1/bulk-operations", body: body(values, true) }),
    show: (preview: BulkPreview) => <Matches preview={preview} />,
    cli: (values) => commandLine(["bulk", "start", kind], { ...(of as Record<string, string>), ...(values.priority ? { priority: values.priority } : {}), ...(values.reason ? { reason: values.reason } : {}) }),
    done: open,
  };
}

export function BulkActions({ filter, kinds }: { filter: BulkFilter; kinds: BulkKind[] }): JSX.Element {
  const { route } = useLocation();
  return <>{kinds.map((kind) => <ActionButton key={kind} action={bulkAction(kind, filter, ({ operation_id }) => route(operationLink(operation_id)))} />)}</>;
}
