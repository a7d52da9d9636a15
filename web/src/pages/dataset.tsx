import { useRoute } from "preact-iso";
import type { JSX } from "preact";
import type { DatasetEventView, DatasetView, Lineage, PartitionView, SourceView } from "../api/types";
import { useGet } from "../api/use";
import { dagLink, datasetLink, jobLink, taskLink } from "../app/links";
import { useTitle } from "../app/title";
import { Actions, type Action, type Values } from "../ui/action";
import { Badge, Empty, Facts, Header, Id, Load, Note, Panel, Tabs, Time } from "../ui/basics";
import { commandLine } from "../ui/commands";
import { bytes, number, shortId } from "../ui/format";
import { Graph } from "../ui/graph";
import { PagedTable, Table, useQuery } from "../ui/table";
import { position } from "./backfills";
import { datasetName } from "./datasets";
import { PAGE } from "./runs";

type Version = DatasetView["versions"][number];
type Column = { name: string; type: string; nullable?: boolean };

function invalidate(dataset: DatasetView, current: Version | undefined, done: () => void): Action {
  const path = `/v1/datasets/${dataset.dataset_uuid}/invalidate`;
  const body = (values: Values, dry: boolean): unknown => ({ start: position(values.start), end: position(values.end), reason: values.reason || "dashboard", ...(dry ? { dry_run: true } : {}) });
  return {
    label: "Invalidate a range", scope: "jobs:write", danger: true, confirm: "Invalidate",
    about: <p>Recomputes the range, and everything downstream that depends on it. Readers keep seeing the old rows until the new ones are committed.</p>,
    fields: [
      { name: "start", label: "From", required: true, value: current?.start == null ? "" : String(current.start) },
      { name: "end", label: "To", required: true, value: current?.end == null ? "" : String(current.end), hint: "Inclusive" },
      { name: "reason", label: "Reason", required: true },
    ],
    request: (values) => ({ method: "POST", path, body: body(values, false) }),
    preview: (values) => ({ method: "POST", path, body: body(values, true) }),
    show: (reply: { scopes: number }) => <p><strong>{number(reply.scopes)}</strong> tasks are queued again.</p>,
    cli: (values) => commandLine(["dataset", "invalidate", datasetName(dataset), `${values.start || "START"}-${values.end || "END"}`], { reason: values.reason, yes: true }),
    done,
  };
}

/** Where rows are, along the range of a version. */
function Strip({ partitions }: { partitions: PartitionView[] }): JSX.Element | null {
  const first = Math.min(...partitions.map(({ start }) => start));
  const last = Math.max(...partitions.map(({ end }) => end));
  if (!partitions.length) return null;
  const width = Math.max(last - first + 1, 1);
  return (
    <>
      <div class="strip" role="img" aria-label={`${partitions.length} partitions from ${first} to ${last}`}>
        {partitions.map((one) => <i key={one.start} title={`${one.partition_key}: ${number(one.row_count)} rows`} style={{ left: `${((one.start - first) / width) * 100}%`, width: `${((one.end - one.start + 1) / width) * 100}%` }} />)}
      </div>
      <div class="legend strip-ends"><span>{number(first)}</span><span class="right">{number(last)}</span></div>
    </>
  );
}

function Partitions({ id }: { id: string }): JSX.Element {
  const { query } = useQuery();
  const partitions = useGet<{ partitions: PartitionView[]; next_cursor: string | null }>(`/v1/datasets/${id}/partitions`, { query: { cursor: query.cursor, limit: 200 }, every: 15 });
  return (
    <>
      {partitions.data && partitions.data.partitions.length > 0 && <Panel title="This page along the range"><Strip partitions={partitions.data.partitions} /></Panel>}
      <Panel flush>
        <PagedTable label="Partitions" of={partitions} rows={(page) => page.partitions} rowKey={(row) => row.partition_key} empty={<Empty title="No partitions yet." />} columns={[
          { head: "Partition", cell: (row) => <code>{row.partition_key}</code> },
          { head: "Rows", num: true, cell: (row) => number(row.row_count) },
          { head: "Size", num: true, cell: (row) => bytes(row.bytes) },
          { head: "Location", grow: true, cell: (row) => <span class="faint" title={row.location ?? ""}>{row.location}</span> },
          { head: "Task", wide: true, cell: (row) => <Id id={row.task_id} href={taskLink(row.task_id)} /> },
          { head: "Committed", num: true, cell: (row) => <Time at={row.committed_at} /> },
        ]} />
      </Panel>
    </>
  );
}

function LineageGraph({ id }: { id: string }): JSX.Element {
  const lineage = useGet<Lineage>(`/v1/datasets/${id}/lineage`, { query: { direction: "both" }, every: 30 });
  return (
    <Load of={lineage} lines={5}>
      {({ jobs, datasets, edges, truncated }) => {
        const known = new Set([...jobs.map(({ job_id }) => job_id), ...datasets.map(({ dataset_uuid }) => dataset_uuid)]);
        return (
          <>
            {truncated && <Note tone="warn">Only the nearest jobs and datasets are shown.</Note>}
            <Graph label="Lineage"
              nodes={[
                ...jobs.map((one) => ({ id: one.job_id, title: one.job ?? shortId(one.job_id), sub: one.dag ?? "job", href: jobLink(one.job_id) })),
                ...datasets.map((one) => ({ id: one.dataset_uuid, title: one.names[0] ?? one.output ?? shortId(one.dataset_uuid), sub: "dataset", href: datasetLink(one.dataset_uuid), tone: one.dataset_uuid === lineage.data?.dataset_uuid ? "data here" : "data" })),
              ]}
              edges={edges.filter((edge) => known.has(edge.job_id) && known.has(edge.dataset_uuid)).map((edge) => ({ from: edge.kind === "writes" ? edge.job_id : edge.dataset_uuid, to: edge.kind === "writes" ? edge.dataset_uuid : edge.job_id, ...(edge.where ? { label: edge.where } : {}) }))} />
          </>
        );
      }}
    </Load>
  );
}

function Events({ id }: { id: string }): JSX.Element {
  const { query } = useQuery();
  const events = useGet<{ events: DatasetEventView[]; next_cursor: string | null }>(`/v1/datasets/${id}/events`, { query: { cursor: query.cursor, limit: PAGE }, every: 10 });
  return (
    <Panel flush>
      <PagedTable label="Changes" of={events} rows={(page) => page.events} rowKey={({ event_id }) => String(event_id)} empty={<Empty title="No changes yet." />} columns={[
        { head: "Scope", cell: (row) => <code>{row.partition_key ?? `up to ${row.cursor}`}</code> },
        { head: "Commit", num: true, cell: (row) => number(row.commit) },
        { head: "Task", grow: true, cell: (row) => <Id id={row.task_id} href={taskLink(row.task_id)} /> },
        { head: "Attempt", num: true, wide: true, cell: (row) => row.attempt },
        { head: "When", num: true, cell: (row) => <Time at={row.accepted_at} /> },
      ]} />
    </Panel>
  );
}

export function columnsOf(version: Version | undefined): Column[] {
  return Array.isArray(version?.columns) ? (version.columns as Column[]) : [];
}

function Overview({ dataset, current }: { dataset: DatasetView; current: Version | undefined }): JSX.Element {
  const sources = useGet<{ sources: SourceView[] }>(dataset.dag ? `/v1/dags/${encodeURIComponent(dataset.dag)}/sources` : null);
  const fresh = sources.data?.sources.flatMap(({ outputs }) => outputs).find(({ dataset_uuid }) => dataset_uuid === dataset.dataset_uuid);
  return (
    <>
      <Panel flush><LineageGraph id={dataset.dataset_uuid} /></Panel>
      <div class="columns">
        <Panel title="Schema" flush>
          <Table label="Columns" rows={columnsOf(current)} rowKey={({ name }) => name} empty={<Empty title="No schema yet.">It is known with the first commit.</Empty>} columns={[
            { head: "Column", grow: true, cell: ({ name }) => <code>{name}</code> },
            { head: "Type", cell: ({ type }) => String(type) },
            { head: "Null", num: true, cell: ({ nullable }) => (nullable === false ? "no" : "yes") },
          ]} />
        </Panel>
        <div>
          <Panel title="Dataset">
            <Facts of={[
              ["Names", dataset.names.join(", ") || "not published"],
              dataset.dag && ["Written by", <><a href={dagLink(dataset.dag)}>{dataset.dag}</a> / {current?.job_id ? <a href={jobLink(current.job_id)}>{dataset.job}</a> : dataset.job}</>],
              ["Readable for", dataset.read_roles.join(", ")],
              current && ["Stored as", current.storage],
              current && current.unique_key.length > 0 && ["Unique key", current.unique_key.join(", ")],
              current && current.progress === "cursor" && ["Up to", number(current.cursor)],
              current && current.start != null && ["Range", `${number(current.start)} – ${number(current.end)}`],
              current && current.progress === "partition" && ["Partitions", `${number(current.partitions)}${current.more_partitions ? "+" : ""}`],
              fresh?.last_at && ["Fresh as of", <Time at={fresh.last_at} />],
            ]} />
          </Panel>
          <Panel title="Versions" flush>
            <Table label="Versions" rows={dataset.versions} rowKey={({ dataset_version }) => dataset_version} columns={[
              { head: "Version", cell: (row) => <Id id={row.dataset_version} /> },
              { head: "State", cell: ({ state }) => <Badge state={state} /> },
              { head: "Created", num: true, cell: (row) => <Time at={row.created_at} /> },
            ]} />
          </Panel>
        </div>
      </div>
    </>
  );
}

export default function DatasetPage(): JSX.Element {
  const id = useRoute().params.id!;
  const { query, href } = useQuery();
  const dataset = useGet<DatasetView>(`/v1/datasets/${encodeURIComponent(id)}`, { every: 15 });
  const tab = query.tab ?? "overview";
  useTitle(dataset.data ? datasetName(dataset.data) : "Dataset");
  const tabs = [["overview", "Overview"], ["partitions", "Partitions"], ["changes", "Changes"]] as const;
  return (
    <Load of={dataset} lines={10}>
      {(view) => {
        const current = view.versions.find(({ dataset_version }) => dataset_version === view.current_version);
        return (
          <>
            <Header kind={view.dag ? <>Dataset of <a href={dagLink(view.dag)}>{view.dag}</a></> : "Dataset"} title={datasetName(view)} state={<Badge state={current?.state} />} actions={<><a class="button" href={`/ui/sql?sql=${encodeURIComponent(`select * from "${datasetName(view)}" limit 100`)}`}>Query</a><Actions of={[view.dag !== null && invalidate(view, current, dataset.reload)]} /></>}>
              <Id id={view.dataset_uuid} whole />
            </Header>
            {current?.state === "Building" && <Note title="Being built.">Its rows become visible when the version is complete.</Note>}
            <Tabs current={tab} tabs={tabs.map(([name, label]) => ({ id: name, label, href: href({ tab: name === "overview" ? null : name, cursor: null }) }))} />
            {tab === "overview" && <Overview dataset={view} current={current} />}
            {tab === "partitions" && <Partitions id={view.dataset_uuid} />}
            {tab === "changes" && <Events id={view.dataset_uuid} />}
          </>
        );
      }}
    </Load>
  );
}
