import { useLocation, useRoute } from "preact-iso";
import type { JSX } from "preact";
import type { JobView, RunView } from "../api/types";
import { useGet } from "../api/use";
import { dagLink, jobText, runLink, tasksLink } from "../app/links";
import { useTitle } from "../app/title";
import { Actions, type Action } from "../ui/action";
import { Badge, Empty, Facts, Header, Id, Json, Load, Panel, Time } from "../ui/basics";
import { BulkActions } from "../ui/bulk";
import { commandLine } from "../ui/commands";
import { rerunAction } from "../ui/runs";
import { PagedTable, useQuery } from "../ui/table";
import { PAGE, RUN_COLUMNS } from "./runs";

function actions(job: JobView, reload: () => void, open: (href: string) => void): (Action | false)[] {
  const path = `/v1/jobs/${job.job_id}`;
  const ofDag = job.dag_name !== null && "A job of a DAG is controlled on the DAG's page";
  const post = (verb: string) => () => ({ method: "POST" as const, path: `${path}/${verb}` });
  const line = (verb: string) => () => commandLine(["job", verb, job.name ?? job.job_id], { yes: verb === "cancel" || verb === "delete" });
  return [
    { label: "Pause", scope: "jobs:write", blocked: ofDag, about: <p>Running tasks continue, no other task of its runs starts.</p>, request: post("pause"), cli: line("pause"), done: reload },
    { label: "Resume", scope: "jobs:write", blocked: ofDag, about: <p>Its paused runs continue.</p>, request: post("resume"), cli: line("resume"), done: reload },
    job.run !== null && { ...rerunAction(job.run, (run) => open(runLink(run))), blocked: ofDag },
    { label: "Cancel", danger: true, scope: "jobs:write", blocked: ofDag, confirm: "Cancel its runs", about: <p>Cancels all its runs that have not ended.</p>, request: post("cancel"), cli: line("cancel"), done: reload },
    { label: "Delete", danger: true, scope: "jobs:write", blocked: ofDag, about: <p>Deletes the job with its runs, tasks and results. This cannot be undone.</p>, request: () => ({ method: "DELETE", path }), cli: line("delete"), done: () => open("/ui/runs") },
  ];
}

export default function JobPage(): JSX.Element {
  const id = useRoute().params.id!;
  const { route } = useLocation();
  const { query } = useQuery();
  const path = `/v1/jobs/${encodeURIComponent(id)}`;
  const job = useGet<JobView>(path, { every: 10 });
  const runs = useGet<{ runs: RunView[]; next_cursor: string | null }>(job.data && !job.data.dag_name ? `${path}/runs` : null, { query: { cursor: query.cursor, limit: PAGE }, every: 5 });
  useTitle(`Job ${jobText(job.data) || id}`);
  return (
    <Load of={job} lines={8}>
      {(view) => (
        <>
          <Header kind={view.dag_name ? <>Job of <a href={dagLink(view.dag_name)}>{view.dag_name}</a></> : "Job"} title={view.name ?? "Job without a name"} state={view.state && <Badge state={view.state} />}
            actions={<><BulkActions filter={{ job: view.job_id }} kinds={["retry"]} /><Actions of={actions(view, job.reload, route)} /></>}>
            <Id id={view.job_id} whole />
          </Header>
          <div class="columns uneven">
            <Panel title={view.dag_name ? "Tasks" : "Runs"} flush aside={<><a href={tasksLink({ job: view.job_id, status: "Failed" })}>Failed tasks</a> <a href={tasksLink({ job: view.job_id })}>All tasks</a></>}>
              {view.dag_name
                ? <Empty title="Its tasks belong to no run.">They are made when a part of an input changes.</Empty>
                : <PagedTable label="Runs" of={runs} rows={(page) => page.runs} rowKey={(run) => run.run_id} columns={RUN_COLUMNS.filter(({ head }) => head !== "Job")} empty={<Empty title="No runs." />} />}
            </Panel>
            <Panel title="Definition">
              <Facts of={[["Operator", <code>{view.operator}</code>], ["Runtime", view.runtime], ["Priority", view.priority], ["Created", <Time at={view.created_at} full />]]} />
              <Json value={{ config: view.config, policy: view.policy, scaling: view.scaling }} label="definition" />
            </Panel>
          </div>
        </>
      )}
    </Load>
  );
}
