import type { JSX } from "preact";
import { live } from "../api/live";
import type { JobView, RunView } from "../api/types";
import { useGet } from "../api/use";
import { JobName, runLink } from "../app/links";
import { useTitle } from "../app/title";
import { BulkActions } from "../ui/bulk";
import { Badge, Empty, Header, Id, Panel, Time } from "../ui/basics";
import { Bar } from "../ui/charts";
import { duration, number, rate } from "../ui/format";
import { Filters, PagedTable, useQuery, type Column } from "../ui/table";

export const PAGE = 50;

/** The counts of a run; those of a live run are newer in the stream. */
export function fresh(run: RunView): RunView {
  const now = live.value?.overview.runs.find(({ run_id }) => run_id === run.run_id);
  return now && run.ended_at === null ? { ...run, state: now.state, counts: now.counts, total: now.total } : run;
}

export function RunBar({ run, tall }: { run: RunView; tall?: boolean }): JSX.Element {
  const { counts, total } = fresh(run);
  const label = `${number(counts.Completed ?? 0)} completed, ${number(counts.Failed ?? 0)} failed, ${number(counts.Running ?? 0)} running of ${number(total)}`;
  return <Bar tall={tall ?? false} of={total ?? 1} label={label} parts={[["good", counts.Completed ?? 0], ["bad", counts.Failed ?? 0], ["idle", counts.Canceled ?? 0], ["live", counts.Running ?? 0]]} />;
}

export const RUN_COLUMNS: Column<RunView>[] = [
  { head: "Run", cell: (run) => <Id id={run.run_id} href={runLink(run.run_id)} /> },
  { head: "State", cell: (run) => <Badge state={fresh(run).state} /> },
  { head: "Job", cell: (run) => <JobName job={run.job} id={run.job_id} /> },
  { head: "Progress", grow: true, cell: (run) => <RunBar run={run} /> },
  { head: "Failed", num: true, cell: (run) => <span class={fresh(run).counts.Failed ? "bad-text" : "faint"}>{number(fresh(run).counts.Failed ?? 0)}</span> },
  { head: "Tasks", num: true, cell: (run) => number(run.total) },
  { head: "Rate", num: true, wide: true, cell: (run) => (run.ended_at ? <span class="faint">–</span> : rate(fresh(run).rate)) },
  { head: "Left", num: true, wide: true, cell: (run) => (run.ended_at ? <span class="faint">–</span> : duration(run.eta_seconds)) },
  { head: "Submitted", num: true, wide: true, cell: (run) => <Time at={run.created_at} /> },
];

/** Runs that need a person first; the rest newest first, as the server sent it. */
export function failedFirst<Row extends { state: string }>(rows: Row[]): Row[] {
  const rank = ({ state }: Row): number => (["Failed", "CompletedWithFailures"].includes(state) ? 0 : state === "Paused" ? 1 : 2);
  return [...rows].sort((one, other) => rank(one) - rank(other));
}

interface Page {
  jobs?: JobView[];
  runs?: RunView[];
  next_cursor: string | null;
}

/** The runs of one job, or the newest run of each job. */
function runsOf(page: Page): RunView[] {
  return page.runs ?? (page.jobs ?? []).flatMap((job) => (job.run ? [{ ...job.run, job }] : []));
}

export default function RunsPage(): JSX.Element {
  useTitle("Runs");
  const { query } = useQuery();
  const { job, cursor } = query;
  const path = job ? `/v1/jobs/${encodeURIComponent(job)}/runs` : "/v1/jobs";
  const runs = useGet<Page>(path, { query: { cursor, limit: PAGE }, every: 10 });
  return (
    <>
      <Header title="Runs" actions={<BulkActions filter={job ? { job } : {}} kinds={["pause", "resume", "reprioritise"]} />}><p class="faint">{job ? "All runs of the job." : "The newest run of each job."}</p></Header>
      <Filters of={[{ name: "job", label: "Job", placeholder: "name or id" }]} />
      <Panel flush>
        <PagedTable label="Runs" of={runs} rows={(page) => failedFirst(runsOf(page))} rowKey={(run) => run.run_id} columns={RUN_COLUMNS}
          empty={<Empty title="No runs yet.">Submit one: <code>interlock job submit --operator echo --task '{"{}"}'</code></Empty>} />
      </Panel>
    </>
  );
}
