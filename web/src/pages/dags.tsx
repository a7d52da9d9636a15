import { useLocation } from "preact-iso";
import type { JSX } from "preact";
import type { DagDeployed, DagSummary } from "../api/types";
import { useGet } from "../api/use";
import { dagLink, taskLink } from "../app/links";
import { useTitle } from "../app/title";
import { Actions, type Action } from "../ui/action";
import { Badge, Empty, Header, Panel, Time } from "../ui/basics";
import { PagedTable, Table, useQuery } from "../ui/table";
import { PAGE } from "./runs";

/** What a deployment would change. */
export function Plan({ of }: { of: DagDeployed }): JSX.Element {
  const changed = of.plan.filter(({ change }) => change !== "kept");
  return (
    <>
      <p>{changed.length ? `${changed.length} of ${of.plan.length} jobs change.` : "Nothing changes: this version is deployed."}</p>
      {changed.length > 0 && (
        <Table label="Plan" rows={changed} rowKey={({ name }) => name} columns={[
          { head: "Job", grow: true, cell: ({ name }) => name },
          { head: "Change", cell: ({ change }) => <Badge state={change === "removed" ? "Failed" : change === "added" ? "Completed" : "Running"} label={change} /> },
          { head: "New datasets", num: true, cell: ({ new_versions }) => new_versions.length },
        ]} />
      )}
    </>
  );
}

export function deployAction(done: (dag: string) => void, yaml = ""): Action {
  return {
    label: "Deploy from a file", scope: "jobs:write", confirm: "Deploy",
    about: <p>Choose or paste a DAG file. The dry run shows what would change; a job that changes gets new datasets, and the old ones serve until the new ones are complete.</p>,
    fields: [{ name: "yaml", label: "DAG file", type: "file", required: true, value: yaml }],
    request: ({ yaml: text }) => ({ method: "POST", path: "/v1/dags", body: { yaml: text ?? "" } }),
    preview: ({ yaml: text }) => ({ method: "POST", path: "/v1/dags", query: { dry_run: true }, body: { yaml: text ?? "" } }),
    show: (plan: DagDeployed) => <Plan of={plan} />,
    cli: () => "interlock dag plan FILE && interlock dag deploy FILE",
    done: (reply: DagDeployed) => done(reply.dag),
  };
}

type Row = DagSummary & { paused?: { since: string; by: string } | null; failing?: number; failure?: { task_id: string; error_class: string | null; error_message: string | null } | null };

export default function DagsPage(): JSX.Element {
  useTitle("DAGs");
  const { query } = useQuery();
  const { route } = useLocation();
  const dags = useGet<{ dags: Row[]; next_cursor: string | null }>("/v1/dags", { query: { cursor: query.cursor, limit: PAGE }, every: 10 });
  const sorted = (rows: Row[]): Row[] => [...rows].sort((one, other) => (other.failing ?? 0) - (one.failing ?? 0));
  return (
    <>
      <Header title="DAGs" actions={<Actions of={[deployAction((dag) => route(dagLink(dag)))]} />} />
      <Panel flush>
        <PagedTable label="DAGs" of={dags} rows={(page) => sorted(page.dags)} rowKey={({ name }) => name} empty={<Empty title="No DAGs yet.">Deploy one from a file, or with <code>interlock dag deploy FILE</code>.</Empty>} columns={[
          { head: "DAG", cell: ({ name }) => <a class="cut" href={dagLink(name)} title={name}>{name}</a> },
          { head: "State", cell: (row) => <>{row.paused && <Badge state="Paused" />} {row.failing ? <Badge state="Failed" label={`${row.failing >= 100 ? "100+" : row.failing} failing`} /> : row.building ? <Badge state="Building" /> : !row.paused && <Badge state={row.current?.state} />}</> },
          { head: "Newest failure", grow: true, cell: ({ failure }) => (failure ? <a href={taskLink(failure.task_id)} title={failure.error_message ?? ""}><strong>{failure.error_class}</strong> <span class="faint">{failure.error_message}</span></a> : <span class="faint">none</span>) },
          { head: "Version", wide: true, cell: ({ current }) => <code>{current?.content_hash.slice(0, 8) ?? "–"}</code> },
          { head: "Building", wide: true, cell: ({ building }) => (building ? <code>{building.content_hash.slice(0, 8)}</code> : <span class="faint">–</span>) },
          { head: "Deployed by", wide: true, cell: ({ current, building }) => (current ?? building)?.deployed_by },
          { head: "Deployed", num: true, cell: ({ current, building }) => <Time at={(current ?? building)?.deployed_at} /> },
        ]} />
      </Panel>
    </>
  );
}
