import { useLocation, useRoute } from "preact-iso";
import type { JSX } from "preact";
import type { DagVersionView, DagView, PauseView, SourceView } from "../api/types";
import { useGet, type Loaded } from "../api/use";
import { datasetLink, jobLink, taskLink, tasksLink } from "../app/links";
import { useTitle } from "../app/title";
import { ActionButton, Actions, type Action } from "../ui/action";
import { Badge, Empty, Facts, Header, Json, Load, Note, Panel, Tabs, Time } from "../ui/basics";
import { commandLine } from "../ui/commands";
import { number } from "../ui/format";
import { Graph, type GraphEdge, type GraphNode } from "../ui/graph";
import { PagedTable, Table, useQuery } from "../ui/table";
import { backfillAction } from "./backfills";
import { deployAction } from "./dags";
import { PAGE } from "./runs";

type View = DagView & { paused?: { since: string; by: string; reason: string | null } | null; failing?: number; failure?: { task_id: string; error_class: string | null; error_message: string | null } | null };

function dagActions(dag: View, reload: () => void): (Action | false)[] {
  const path = `/v1/dags/${encodeURIComponent(dag.name)}`;
  return [
    deployAction(reload),
    dag.building !== null && { label: "Cut over now", scope: "jobs:write", about: <p>Makes the version that is being built current, although it is not complete.</p>, request: () => ({ method: "POST", path: `${path}/cutover` }), cli: () => commandLine(["dag", "cutover", dag.name], { yes: true }), done: reload },
  ];
}

interface Definition {
  jobs: { name: string; inputs: { from: { job?: string | null; output?: string | null; dataset?: string | null }; where: string | null }[] }[];
}

function nodesOf(dag: View, pauses: PauseView[]): GraphNode[] {
  const behind = new Map(dag.progress.map((one) => [one.job_id, one]));
  const paused = new Set(pauses.map(({ job_id }) => job_id));
  const cause = new Set(pauses.map(({ cause_id }) => cause_id));
  return dag.jobs.map((job) => {
    const progress = behind.get(job.job_id);
    const late = progress && !progress.complete ? `${number(progress.undone + progress.behind + progress.unread)} to do` : null;
    const held = job.paused || paused.has(job.job_id);
    const sub = cause.has(job.job_id) ? "behind: pauses others" : held ? "paused by backpressure" : (late ?? job.operator);
    return { id: job.name, title: job.name, sub, href: jobLink(job.job_id), tone: cause.has(job.job_id) ? "bad" : held ? "warn" : late ? "live" : "" };
  });
}

/** The jobs of the current version, and the datasets of other DAGs that they read. */
function LiveGraph({ dag }: { dag: View }): JSX.Element {
  const definition = useGet<{ document?: unknown }>(dag.current ? `/v1/dags/${encodeURIComponent(dag.name)}/document` : null);
  const pauses = useGet<{ pauses: PauseView[] }>("/v1/pauses", { every: 5 });
  if (!dag.current) return <Empty title="The first version is being built.">Its graph appears when it is current.</Empty>;
  return (
    <Load of={definition} lines={5}>
      {({ document }) => {
        const nodes = nodesOf(dag, pauses.data?.pauses ?? []);
        const known = new Set(nodes.map(({ id }) => id));
        const waiting = new Set(nodes.filter(({ tone }) => tone === "warn").map(({ id }) => id));
        const edges = (document as Definition).jobs.flatMap((job) => job.inputs.map(({ from, where }): GraphEdge => {
          const label = [from.job ? `${from.job}: ${from.output}` : from.dataset, where && `where ${where}`].filter(Boolean).join(", ");
          return { from: from.job ?? `dataset ${from.dataset}`, to: job.name, label, ...(waiting.has(job.name) ? { tone: "warn" } : {}) };
        })).filter(({ to }) => known.has(to));
        const outside = [...new Set(edges.map(({ from }) => from))].filter((id) => !known.has(id));
        const datasets = outside.map((id): GraphNode => ({ id, title: id.replace(/^dataset /, ""), sub: "of another DAG", href: datasetLink(id.replace(/^dataset /, "")), tone: "data" }));
        return <Graph nodes={[...nodes, ...datasets]} edges={edges} label={`Jobs of ${dag.name}`} />;
      }}
    </Load>
  );
}

function Jobs({ dag }: { dag: View }): JSX.Element {
  const { route } = useLocation();
  return (
    <Table label="Jobs" rows={dag.jobs} rowKey={({ job_id }) => job_id} empty={<Empty title="No jobs." />} columns={[
      { head: "Job", cell: (job) => <a class="cut" href={jobLink(job.job_id)}>{job.name}</a> },
      { head: "State", cell: (job) => (job.paused ? <Badge state="Paused" /> : <Badge state="ready" />) },
      { head: "Operator", wide: true, cell: (job) => <code>{job.operator}</code> },
      { head: "Runtime", wide: true, cell: (job) => job.runtime },
      { head: "Writes", grow: true, cell: (job) => job.outputs.map((output, at) => <>{at ? ", " : ""}<a href={datasetLink(output.dataset_uuid)}>{output.name}</a></>) },
      { head: "", num: true, cell: (job) => <div class="actions"><a class="button" href={tasksLink({ job: job.job_id })}>Tasks</a>{!job.source && <ActionButton action={backfillAction(dag.name, job.name, route)} />}</div> },
    ]} />
  );
}

const STOPPED = ["restarting", "paused"];

function Sources({ dag }: { dag: string }): JSX.Element {
  const sources = useGet<{ sources: SourceView[] }>(`/v1/dags/${encodeURIComponent(dag)}/sources`, { every: 5 });
  const trigger = (job: string): Action => ({
    label: "Trigger", scope: "jobs:write", about: <p>Sends a payload to the source: it becomes a task.</p>,
    fields: [{ name: "payload", label: "Payload", type: "textarea", required: true, value: "{}", hint: "JSON" }],
    request: ({ payload }) => ({ method: "POST", path: `/v1/dags/${encodeURIComponent(dag)}/jobs/${encodeURIComponent(job)}/events`, body: { events: [{ payload: parsed(payload) }] } }),
    cli: ({ payload }) => commandLine(["source", "trigger", dag, job], { payload }), done: sources.reload,
  });
  return (
    <Load of={sources}>
      {({ sources: all }) => (
        <Table label="Sources" rows={[...all].sort((one, other) => Number(STOPPED.includes(other.state)) - Number(STOPPED.includes(one.state)))} rowKey={({ job_id }) => job_id} empty={<Empty title="This DAG has no sources.">It reads datasets of other DAGs.</Empty>} columns={[
          { head: "Source", cell: (source) => <a href={jobLink(source.job_id)}>{source.job}</a> },
          { head: "Kind", cell: (source) => source.kind },
          { head: "State", cell: (source) => <Badge state={source.state} /> },
          { head: "Last error", grow: true, cell: (source) => (source.last_error ? <span class="bad-text" title={source.last_error}>{source.last_error}</span> : <span class="faint">none</span>) },
          { head: "Waiting", num: true, wide: true, cell: (source) => number(source.waiting) },
          { head: "Next", num: true, wide: true, cell: (source) => <Time at={source.next_at} /> },
          { head: "Fresh as of", num: true, cell: (source) => <Time at={source.outputs.map(({ last_at }) => last_at).filter(Boolean).sort().at(-1)} /> },
          { head: "", num: true, cell: (source) => <div class="actions">{source.task_id && <a class="button" href={taskLink(source.task_id)}>Task</a>}{source.kind === "manual" && <ActionButton action={trigger(source.job)} />}</div> },
        ]} />
      )}
    </Load>
  );
}

/** Parses what a user typed; what is not JSON is sent as text, and refused by the server with its reason. */
export function parsed(text: string | undefined): unknown {
  try {
    return JSON.parse(text ?? "null");
  } catch {
    return text;
  }
}

function Versions({ dag, reload }: { dag: View; reload: () => void }): JSX.Element {
  const { query } = useQuery();
  const path = `/v1/dags/${encodeURIComponent(dag.name)}`;
  const versions = useGet<{ versions: DagVersionView[]; next_cursor: string | null }>(`${path}/versions`, { query: { cursor: query.cursor, limit: PAGE } });
  const again = (): void => {
    versions.reload();
    reload();
  };
  const actions = (version: DagVersionView): (Action | false)[] => [
    version.state === "Retired" && { label: "Roll back to it", scope: "jobs:write", about: <p>Makes this version current again. Its datasets are caught up with what changed meanwhile.</p>, request: () => ({ method: "POST", path: `${path}/rollback`, body: { to: version.content_hash } }), cli: () => commandLine(["dag", "rollback", dag.name], { to: version.content_hash.slice(0, 12) }), done: again },
    version.state === "Retired" && { label: "Purge", danger: true, scope: "jobs:write", about: <p>Deletes its datasets. It cannot be rolled back to afterwards.</p>, request: () => ({ method: "POST", path: `${path}/purge`, body: { version: version.content_hash } }), cli: () => commandLine(["dag", "purge", dag.name, version.content_hash.slice(0, 12)], { yes: true }), done: again },
  ];
  return (
    <PagedTable label="Versions" of={versions} rows={(page) => page.versions} rowKey={({ dag_version }) => dag_version} columns={[
      { head: "Version", cell: ({ content_hash }) => <code title={content_hash}>{content_hash.slice(0, 12)}</code> },
      { head: "State", cell: ({ state }) => <Badge state={state} /> },
      { head: "By", grow: true, cell: ({ deployed_by }) => deployed_by },
      { head: "Deployed", num: true, cell: ({ deployed_at }) => <Time at={deployed_at} /> },
      { head: "Current from", num: true, wide: true, cell: ({ current_at }) => <Time at={current_at} /> },
      { head: "To", num: true, wide: true, cell: ({ retired_at }) => <Time at={retired_at} /> },
      { head: "", num: true, cell: (version) => <div class="actions"><Actions of={actions(version)} /></div> },
    ]} />
  );
}

function Document({ of }: { of: Loaded<{ content_hash: string; document?: unknown }> }): JSX.Element {
  return <Load of={of}>{({ document }) => <Json value={document} label="document" />}</Load>;
}

function Why({ dag }: { dag: View }): JSX.Element | null {
  if (dag.paused) return <Note tone="warn" title={`Paused by ${dag.paused.by}.`}>{dag.paused.reason} No new work starts; resume the DAG to continue.</Note>;
  if (dag.failing) return <Note tone="bad" title={`${dag.failing >= 100 ? "100 or more" : dag.failing} tasks are failing.`}>{dag.failure && <a href={taskLink(dag.failure.task_id)}>{dag.failure.error_class}: {dag.failure.error_message}</a>}</Note>;
  if (dag.building) return <Note title="A new version is being built.">Readers see the current version until the new one is complete.</Note>;
  return null;
}

export default function DagPage(): JSX.Element {
  const name = useRoute().params.id!;
  const { query, href } = useQuery();
  const path = `/v1/dags/${encodeURIComponent(name)}`;
  const dag = useGet<View>(path, { every: 5 });
  const tab = query.tab ?? "graph";
  const document = useGet<{ content_hash: string; document?: unknown }>(tab === "document" ? `${path}/document` : null);
  useTitle(`DAG ${name}`);
  const tabs = [["graph", "Graph"], ["sources", "Sources"], ["versions", "Versions"], ["document", "File"]] as const;
  return (
    <Load of={dag} lines={10}>
      {(view) => (
        <>
          <Header kind="DAG" title={view.name} state={<Badge state={view.building ? "Building" : view.current?.state} />} actions={<Actions of={dagActions(view, dag.reload)} />} />
          <Why dag={view} />
          <Tabs current={tab} tabs={tabs.map(([id, label]) => ({ id, label, href: href({ tab: id === "graph" ? null : id, cursor: null }) }))} />
          {tab === "graph" && (
            <>
              <Panel flush><LiveGraph dag={view} /></Panel>
              <Panel title="Jobs" flush><Jobs dag={view} /></Panel>
              <Panel><Facts of={[["Publishes", view.publish.length ? view.publish.map((one, at) => <>{at ? ", " : ""}<a href={datasetLink(one)}>{one}</a></>) : "nothing"], view.current && ["Version", <code>{view.current.content_hash.slice(0, 12)}</code>], view.current && ["Deployed", <><Time at={view.current.deployed_at} full /> by {view.current.deployed_by}</>]]} /></Panel>
            </>
          )}
          {tab === "sources" && <Panel flush><Sources dag={view.name} /></Panel>}
          {tab === "versions" && <Panel flush><Versions dag={view} reload={dag.reload} /></Panel>}
          {tab === "document" && <Panel title="The current version"><Document of={document} /></Panel>}
        </>
      )}
    </Load>
  );
}
