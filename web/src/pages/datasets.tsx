import type { JSX } from "preact";
import type { DatasetSummary } from "../api/types";
import { useGet } from "../api/use";
import { dagLink, datasetLink, taskLink } from "../app/links";
import { useTitle } from "../app/title";
import { Badge, Empty, Header, Panel, Tabs } from "../ui/basics";
import { number, shortId } from "../ui/format";
import { PagedTable, useQuery } from "../ui/table";
import { Buffers } from "./buffers";
import { PAGE } from "./runs";

type Row = DatasetSummary & { failing?: number; failure?: { task_id: string; error_class: string | null; error_message: string | null } | null };

export const datasetName = (row: { names: string[]; dag: string | null; job: string | null; output: string | null; dataset_uuid: string }): string =>
  row.names[0] ?? (row.dag ? [row.dag, row.job, row.output].join(":") : shortId(row.dataset_uuid));

function All(): JSX.Element {
  const { query } = useQuery();
  const datasets = useGet<{ datasets: Row[]; next_cursor: string | null }>("/v1/datasets", { query: { cursor: query.cursor, limit: PAGE }, every: 15 });
  return (
    <Panel flush>
      <PagedTable label="Datasets" of={datasets} rows={(page) => [...page.datasets].sort((one, other) => (other.failing ?? 0) - (one.failing ?? 0))} rowKey={({ dataset_uuid }) => dataset_uuid} empty={<Empty title="No datasets yet.">The jobs of a DAG write them.</Empty>} columns={[
        { head: "Dataset", cell: (row) => <a class="cut" href={datasetLink(row.dataset_uuid)} title={datasetName(row)}>{datasetName(row)}</a> },
        { head: "State", cell: ({ failing }) => (failing ? <Badge state="Failed" label={`${failing >= 100 ? "100+" : failing} failing`} /> : <Badge state="ok" />) },
        { head: "Newest failure", grow: true, cell: ({ failure }) => (failure ? <a href={taskLink(failure.task_id)} title={failure.error_message ?? ""}><strong>{failure.error_class}</strong> <span class="faint">{failure.error_message}</span></a> : <span class="faint">none</span>) },
        { head: "DAG", wide: true, cell: ({ dag }) => (dag ? <a class="cut" href={dagLink(dag)}>{dag}</a> : <span class="faint">–</span>) },
        { head: "Written by", wide: true, cell: ({ job }) => job ?? <span class="faint">–</span> },
        { head: "Stored as", wide: true, cell: ({ storage }) => storage },
        { head: "Up to", num: true, cell: ({ cursor }) => number(cursor) },
      ]} />
    </Panel>
  );
}

export default function DatasetsPage(): JSX.Element {
  useTitle("Datasets");
  const { query, href } = useQuery();
  const tab = query.tab ?? "all";
  return (
    <>
      <Header title="Datasets" />
      <Tabs current={tab} tabs={[{ id: "all", label: "All", href: href({ tab: null, cursor: null, status: null }) }, { id: "batches", label: "Published batches", href: href({ tab: "batches", cursor: null }) }]} />
      {tab === "batches" ? <Buffers /> : <All />}
    </>
  );
}
