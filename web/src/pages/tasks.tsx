import type { JSX } from "preact";
import type { TaskPage, TaskView } from "../api/types";
import { useGet } from "../api/use";
import { JobName, runLink, taskLink } from "../app/links";
import { useTitle } from "../app/title";
import { BulkActions, type BulkKind } from "../ui/bulk";
import { Badge, Empty, Header, Id, Panel, Time } from "../ui/basics";
import { duration, secondsBetween, shortId } from "../ui/format";
import { Filters, PagedTable, useQuery, type Column } from "../ui/table";
import { PAGE } from "./runs";

const STATUSES = ["Failed", "Running", "Queued", "Completed", "Canceled"];
const FILTERS = ["job", "run", "dag", "status", "operator", "error_class", "worker", "created_after", "created_before"] as const;

function summary(task: TaskView): JSX.Element {
  if (task.error_class) return <><strong>{task.error_class}</strong> <span class="faint">{task.error_message}</span></>;
  if (task.progress_text || task.progress !== null) return <span class="faint">{task.progress === null ? "" : `${Math.round(task.progress * 100)} % `}{task.progress_text}</span>;
  return <span class="faint">{JSON.stringify(task.payload)}</span>;
}

export const TASK_COLUMNS: Column<TaskView>[] = [
  { head: "Task", cell: (task) => <Id id={task.task_id} href={taskLink(task.task_id)} /> },
  { head: "Status", cell: (task) => <Badge state={task.dead ? "Dead" : task.status} label={task.dead ? "Failed for good" : task.status} /> },
  { head: "Job", wide: true, cell: (task) => <JobName job={task.job} id={task.job_id} /> },
  { head: "What", grow: true, cell: summary },
  { head: "Run", wide: true, cell: (task) => (task.run_id ? <a href={runLink(task.run_id)} title={task.run_id}>{task.index === null ? shortId(task.run_id) : `# ${task.index}`}</a> : <span class="faint">–</span>) },
  { head: "Attempt", num: true, wide: true, cell: (task) => task.attempt },
  { head: "Took", num: true, wide: true, cell: (task) => (task.started_at ? duration(secondsBetween(task.started_at, task.ended_at)) : <span class="faint">–</span>) },
  { head: "Created", num: true, cell: (task) => <Time at={task.created_at} /> },
];

/** Tasks without attempts left, then other failed ones; the rest as the server sent it. */
export const deadFirst = (tasks: TaskView[]): TaskView[] => {
  const rank = (task: TaskView): number => (task.dead ? 0 : task.status === "Failed" ? 1 : 2);
  return [...tasks].sort((one, other) => rank(one) - rank(other));
};

/** Times are typed in the viewer's zone and sent in UTC. */
function asUtc(text: string | undefined): string | undefined {
  const at = text ? Date.parse(text) : Number.NaN;
  return Number.isNaN(at) ? undefined : new Date(at).toISOString();
}

function kindsFor(status: string | undefined): BulkKind[] {
  if (status === "Failed") return ["retry", "redrive", "cancel"];
  if (status === "Queued" || status === "Running") return ["cancel"];
  return ["retry", "redrive", "cancel"];
}

export default function TasksPage(): JSX.Element {
  useTitle("Tasks");
  const { query } = useQuery();
  const { cursor, created_after, created_before, ...rest } = query;
  const named = Object.fromEntries(FILTERS.flatMap((name) => (rest[name] ? [[name, rest[name]]] : [])));
  const filter = { ...named, created_after: asUtc(created_after), created_before: asUtc(created_before) };
  const tasks = useGet<TaskPage>("/v1/tasks", { query: { ...filter, cursor, limit: PAGE }, every: 10 });
  const filtered = FILTERS.some((name) => query[name]);
  return (
    <>
      <Header title="Tasks" actions={<BulkActions filter={filter} kinds={kindsFor(query.status)} />} />
      <Filters of={[
        { name: "status", label: "Status", options: STATUSES },
        { name: "job", label: "Job", placeholder: "name, dag/name or id" },
        { name: "run", label: "Run", placeholder: "id" },
        { name: "dag", label: "DAG" },
        { name: "operator", label: "Operator" },
        { name: "error_class", label: "Error class" },
        { name: "worker", label: "Worker" },
        { name: "created_after", label: "Created after", type: "datetime-local" },
        { name: "created_before", label: "Created before", type: "datetime-local" },
      ]} />
      <Panel flush>
        <PagedTable label="Tasks" of={tasks} rows={(page) => deadFirst(page.tasks)} rowKey={({ task_id }) => task_id} columns={TASK_COLUMNS}
          empty={tasks.data?.next_cursor ? <Empty title="No match in this part.">Go on with the next page.</Empty> : <Empty title={filtered ? "No task matches." : "No tasks yet."}>{filtered ? "Change the filters." : "Submit a job, or deploy a DAG."}</Empty>} />
      </Panel>
    </>
  );
}
