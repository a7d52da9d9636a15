import { useLocation, useRoute } from "preact-iso";
import type { JSX } from "preact";
import { useSignal } from "@preact/signals";
import type { RunFailures, JobView, RunDurations, RunTimeline, RunView, TaskPage } from "../api/types";
import { useGet, type Loaded } from "../api/use";
import { JobName, jobText, runLink, taskLink, tasksLink } from "../app/links";
import { useTitle } from "../app/title";
import { Actions } from "../ui/action";
import { BulkActions } from "../ui/bulk";
import { Badge, Empty, Facts, Header, Id, Json, Load, Note, Panel, Stat, Tabs, Time } from "../ui/basics";
import { Chart } from "../ui/charts";
import { duration, number, percent, rate, secondsBetween, shortId } from "../ui/format";
import { Table, useQuery, PagedTable } from "../ui/table";
import { Timeline } from "../ui/timeline";
import { exportAction, receiptAction, rerunAction, runActions, ExportProgress } from "../ui/runs";
import { fresh, PAGE, RunBar } from "./runs";
import { deadFirst, TASK_COLUMNS } from "./tasks";

const ENDED = ["Completed", "CompletedWithFailures", "Failed", "Canceled"];

function Summary({ run }: { run: RunView }): JSX.Element {
  const { counts, total, rate: now } = fresh(run);
  const link = (status: string): string => tasksLink({ run: run.run_id, status });
  const seconds = secondsBetween(run.created_at, run.ended_at);
  return (
    <>
      <div class="stats">
        <Stat label="Failed" value={number(counts.Failed ?? 0)} {...(counts.Failed ? { tone: "bad" } : {})} href={link("Failed")} hint={counts.dead ? `${number(counts.dead)} without attempts left` : ""} />
        <Stat label="Running" value={number(counts.Running ?? 0)} {...(counts.Running ? { tone: "live" } : {})} href={link("Running")} />
        <Stat label="Queued" value={number(counts.Queued ?? 0)} href={link("Queued")} />
        <Stat label="Completed" value={number(counts.Completed ?? 0)} href={link("Completed")} hint={total ? percent((counts.Completed ?? 0) / total) : ""} />
        <Stat label="Canceled" value={number(counts.Canceled ?? 0)} href={link("Canceled")} />
        <Stat label={run.ended_at ? "Took" : "Rate"} value={run.ended_at ? duration(seconds) : rate(now)} hint={run.ended_at ? `${rate((total ?? 0) / Math.max(seconds, 0.001))} on average` : run.eta_seconds != null ? `about ${duration(run.eta_seconds)} left` : ""} />
      </div>
      <Panel><RunBar run={run} tall /></Panel>
    </>
  );
}

/** Why a run is where it is, in one sentence, with the next step. */
function Why({ run }: { run: RunView }): JSX.Element | null {
  const { counts, state } = fresh(run);
  if (run.reason) return <Note tone="bad" title="Given up.">{run.reason}</Note>;
  if (state === "Paused") return <Note tone="warn" title="Paused.">Running tasks continue, no other task starts until the run is resumed.</Note>;
  if (state === "Ingesting") return <Note title="Reading its list.">{run.total === null ? "The number of tasks is not known yet." : `${number(run.total)} tasks so far.`}</Note>;
  if (counts.dead) return <Note tone="bad" title={`${number(counts.dead)} tasks have no attempts left.`}>Look at the groups below, mend the cause, then retry them.</Note>;
  if (run.cancel_requested && !run.ended_at) return <Note tone="warn" title="Canceling.">The rest of the tasks is being canceled in the background.</Note>;
  if (!run.ended_at && !counts.Running && counts.Queued) return <Note tone="warn" title="Nothing is running.">Open a queued task to see why it waits: <a href={tasksLink({ run: run.run_id, status: "Queued" })}>queued tasks</a>.</Note>;
  return null;
}

function Groups({ run }: { run: RunView }): JSX.Element | null {
  const failures = useGet<RunFailures>(`/v1/runs/${run.run_id}/failures`, { every: run.ended_at ? 0 : 10 });
  if (!run.counts.Failed && !run.errors?.length) return null;
  return (
    <Panel title="Failures" flush aside={failures.data?.sampled ? `grouped from the newest ${number(failures.data.looked_at)} of ${number(failures.data.failed)}` : undefined}>
      <Load of={failures}>
        {({ groups }) => (
          <Table label="Groups of failures" rows={groups} rowKey={(group) => `${group.error_class} ${group.shape}`} empty={<Empty title="No failed tasks now." />} columns={[
            { head: "Error", grow: true, cell: (group) => <a href={tasksLink({ run: run.run_id, status: "Failed", ...(group.error_class ? { error_class: group.error_class } : {}) })} title={group.sample_message ?? ""}><strong>{group.error_class}</strong> <span class="faint">{group.shape}</span></a> },
            { head: "Tasks", num: true, cell: (group) => number(group.tasks) },
            { head: "No attempts left", num: true, wide: true, cell: (group) => number(group.dead) },
            { head: "Example", num: true, cell: (group) => <a href={taskLink(group.sample_task_id)}>{`# ${group.first_index}`}</a> },
            { head: "", num: true, wide: true, cell: (group) => <div class="actions"><BulkActions filter={{ run: run.run_id, error_class: group.error_class }} kinds={["retry"]} /></div> },
          ]} />
        )}
      </Load>
    </Panel>
  );
}

const bucketName = ({ from_seconds, to_seconds }: { from_seconds: number; to_seconds: number }): string => duration((from_seconds + to_seconds) / 2);

function Durations({ run }: { run: RunView }): JSX.Element {
  const durations = useGet<RunDurations>(`/v1/runs/${run.run_id}/durations`, { every: run.ended_at ? 0 : 15 });
  return (
    <Panel title="How long attempts take" aside={durations.data?.sampled ? `from ${number(durations.data.looked_at)} tasks` : undefined}>
      <Load of={durations}>
        {({ buckets, p50, p90, p99, longest }) =>
          buckets.length === 0 ? <Empty title="No attempt has ended yet." /> : (
            <>
              <Chart label="Tasks per duration" height={130} x={buckets.map((_, at) => at)} names={buckets.map(bucketName)} series={[{ label: "tasks", tone: "live", values: buckets.map(({ tasks }) => tasks) }]} />
              <Facts of={[["Median", duration(p50)], ["90 %, 99 %", `${duration(p90)}, ${duration(p99)}`], longest[0] && ["Longest", <>{longest.slice(0, 3).map((one, at) => <>{at ? ", " : ""}<a href={taskLink(one.task_id)}>{duration(one.seconds)}</a></>)}</>]]} />
            </>
          )}
      </Load>
    </Panel>
  );
}

function Attempts({ run }: { run: RunView }): JSX.Element {
  const timeline = useGet<RunTimeline>(`/v1/runs/${run.run_id}/timeline`, { query: { lanes: 40 }, every: run.ended_at ? 0 : 5 });
  return (
    <Panel title="Attempts over time" aside={timeline.data?.sampled ? `a sample of ${number(timeline.data.of)} tasks` : "hatched: idle"}>
      <Load of={timeline}>{({ attempts }) => (attempts.length ? <Timeline attempts={attempts} /> : <Empty title="No attempt has started yet." />)}</Load>
    </Panel>
  );
}

function TasksTab({ run }: { run: RunView }): JSX.Element {
  const { query } = useQuery();
  const tasks = useGet<TaskPage>("/v1/tasks", { query: { run: run.run_id, cursor: query.cursor, limit: PAGE }, every: run.ended_at ? 0 : 10 });
  return <Panel flush><PagedTable label="Tasks of this run" of={tasks} rows={(page) => deadFirst(page.tasks)} rowKey={({ task_id }) => task_id} columns={TASK_COLUMNS.filter(({ head }) => head !== "Job")} empty={<Empty title="No tasks yet." />} /></Panel>;
}

function Definition({ run, job }: { run: RunView; job: Loaded<JobView> }): JSX.Element {
  return (
    <div class="columns">
      <Panel title="Run">
        <Facts of={[["Run", <Id id={run.run_id} whole />], ["Job", <JobName job={run.job} id={run.job_id} />], ["Submitted", <Time at={run.created_at} full />], ["Ended", <Time at={run.ended_at} full />], run.retention_days != null && ["Kept for", `${run.retention_days} days after its end`]]} />
      </Panel>
      <Load of={job}>
        {(view) => (
          <Panel title="Definition">
            <Facts of={[["Operator", <code>{view.operator}</code>], ["Runtime", view.runtime], ["Priority", view.priority]]} />
            <Json value={{ config: view.config, policy: view.policy, scaling: view.scaling }} label="definition" />
          </Panel>
        )}
      </Load>
    </div>
  );
}

export default function RunPage(): JSX.Element {
  const { params } = useRoute();
  const { route } = useLocation();
  const { query, href } = useQuery();
  const exported = useSignal<string | null>(null);
  const id = params.id!;
  const run = useGet<RunView>(`/v1/runs/${encodeURIComponent(id)}`, { every: (data) => (data?.ended_at ? 0 : 2) });
  const job = useGet<JobView>(run.data ? `/v1/jobs/${run.data.job_id}` : null);
  useTitle(`Run ${shortId(id)}`);
  const tab = query.tab ?? "overview";
  return (
    <Load of={run} lines={10}>
      {(view) => {
        const ended = ENDED.includes(view.state);
        const name = jobText(view.job) || jobText(job.data);
        const isDag = Boolean(view.job?.dag_name ?? job.data?.dag_name);
        return (
          <>
            <Header kind={<>Run of <JobName job={view.job ?? job.data} id={view.job_id} /></>} title={name || <Id id={view.run_id} />} state={<Badge state={fresh(view).state} />}
              actions={<><Actions of={[...runActions(view, run.reload), !isDag && rerunAction(view, (next) => route(runLink(next))), exportAction(view, ended, (made) => (exported.value = made)), receiptAction(view, ended)]} /></>}>
              <Id id={view.run_id} whole />
            </Header>
            <Why run={view} />
            {exported.value && <ExportProgress job={view.job_id} id={exported.value} />}
            <Summary run={view} />
            <Tabs current={tab} tabs={[{ id: "overview", label: "Overview", href: href({ tab: null, cursor: null }) }, { id: "tasks", label: "Tasks", href: href({ tab: "tasks", cursor: null }) }, { id: "definition", label: "Definition", href: href({ tab: "definition", cursor: null }) }]} />
            {tab === "overview" && <><Groups run={view} /><div class="columns"><Attempts run={view} /><Durations run={view} /></div></>}
            {tab === "tasks" && <TasksTab run={view} />}
            {tab === "definition" && <Definition run={view} job={job} />}
          </>
        );
      }}
    </Load>
  );
}
