// One address per object, the same on every page.
import type { JSX } from "preact";
import type { JobRef } from "../api/types";
import { shortId } from "../ui/format";

const part = encodeURIComponent;

export const runLink = (run: string): string => `/ui/run/${part(run)}`;
export const taskLink = (task: string): string => `/ui/task/${part(task)}`;
export const jobLink = (job: string): string => `/ui/job/${part(job)}`;
export const dagLink = (dag: string): string => `/ui/dag/${part(dag)}`;
export const datasetLink = (dataset: string): string => `/ui/dataset/${part(dataset)}`;
export const backfillLink = (run: string): string => `/ui/backfill/${part(run)}`;
export const operationLink = (operation: string): string => `/ui/operation/${part(operation)}`;
export const queryLink = (query: string): string => `/ui/sql?query=${part(query)}`;
export const tasksLink = (filters: Record<string, string>): string => `/ui/tasks?${new URLSearchParams(filters)}`;

export function linkTo(kind: string, id: string): string {
  switch (kind) {
    case "task": return taskLink(id);
    case "run": return runLink(id);
    case "job": return jobLink(id);
    case "dag": return dagLink(id);
    case "dataset": return datasetLink(id);
    case "query": return queryLink(id);
    case "backfill": return backfillLink(id);
    case "operation": return operationLink(id);
    case "worker": return tasksLink({ worker: id });
    default: return `/ui/bus?tab=services`;
  }
}

export const jobText = (job: JobRef | null | undefined): string => (job?.dag_name ? `${job.dag_name} / ${job.name}` : (job?.name ?? ""));

/** The name of a job, or the start of its id where it has none. */
export function JobName({ job, id }: { job: JobRef | null | undefined; id: string }): JSX.Element {
  return (
    <a class="cut" href={jobLink(id)} title={jobText(job) || id}>
      {jobText(job) || <code>{shortId(id)}</code>}
    </a>
  );
}
