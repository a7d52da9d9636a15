import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { ApiError, pathOf, send, session } from "../api/client";
import type { DatasetSummary, DatasetView, QueryView } from "../api/types";
import { useGet } from "../api/use";
import { datasetLink, queryLink, taskLink } from "../app/links";
import { useTitle } from "../app/title";
import { Problems } from "../ui/action";
import { Badge, CopyButton, Empty, Facts, Header, Id, Load, Note, Panel, Skeleton, Tabs, Time } from "../ui/basics";
import { Chart } from "../ui/charts";
import { commandLine } from "../ui/commands";
import { bytes, duration, number } from "../ui/format";
import { PagedTable, Table, useQuery } from "../ui/table";
import { columnsOf } from "./dataset";
import { datasetName } from "./datasets";
import { PAGE } from "./runs";

const ROWS_SHOWN = 200;
const BARS_SHOWN = 60;

interface Reply {
  query_id: string;
  columns: { name: string; type: string }[];
  rows: unknown[][];
  row_count: number | null;
  truncated: boolean;
  duration_ms: number;
  export: { prefix: string; files: { url: string | null; uri: string; bytes: number }[]; row_count: number } | null;
  task_id: string | null;
}

type Outcome = { state: "idle" } | { state: "running"; abort: AbortController } | { state: "done"; reply: Reply } | { state: "failed"; error: ApiError };

const text = (value: unknown): string => (value === null ? "null" : typeof value === "object" ? JSON.stringify(value) : String(value));
const isNumber = (type: string): boolean => /INT|DECIMAL|DOUBLE|FLOAT|BIGNUM|REAL/i.test(type);

function ResultChart({ reply }: { reply: Reply }): JSX.Element {
  const value = reply.columns.findLastIndex(({ type }) => isNumber(type));
  const name = reply.columns.findIndex((_, at) => at !== value);
  if (value < 0 || !reply.rows.length) return <Empty title="No column of numbers." >A chart needs a column of numbers, and one of names or times.</Empty>;
  const rows = reply.rows.slice(0, BARS_SHOWN);
  return (
    <>
      <Chart label={reply.columns[value]!.name} height={220} x={rows.map((_, at) => at)} names={rows.map((row, at) => (name < 0 ? String(at + 1) : text(row[name])))} series={[{ label: reply.columns[value]!.name, tone: "live", values: rows.map((row) => Number(row[value])) }]} />
      <p class="faint">{reply.columns[value]!.name}{name >= 0 && ` by ${reply.columns[name]!.name}`}{reply.rows.length > BARS_SHOWN && `, the first ${BARS_SHOWN} rows`}</p>
    </>
  );
}

function Result({ reply }: { reply: Reply }): JSX.Element {
  const view = useSignal<"table" | "chart">("table");
  if (reply.task_id) return <Note title="Running as a batch query.">Its task is <a href={taskLink(reply.task_id)}>here</a>; the files appear in the <a href={queryLink(reply.query_id)}>history</a>.</Note>;
  if (reply.export) {
    return (
      <Note tone="good" title={`${number(reply.export.row_count)} rows exported as Parquet.`}>
        <ul>{reply.export.files.map((file) => <li key={file.uri}>{file.url ? <a href={file.url} download>{file.uri.split("/").at(-1)}</a> : <code>{file.uri}</code>} <span class="faint">{bytes(file.bytes)}</span></li>)}</ul>
      </Note>
    );
  }
  return (
    <Panel flush title={`${number(reply.rows.length)} rows${reply.truncated ? ", cut at the limit" : ""}`} aside={<><span>{duration(reply.duration_ms / 1000)}</span><button type="button" class="link" onClick={() => (view.value = view.value === "table" ? "chart" : "table")}>{view.value === "table" ? "Show as a chart" : "Show as a table"}</button></>}>
      {view.value === "chart" ? <div class="panel-body"><ResultChart reply={reply} /></div> : (
        <>
          <Table<{ row: unknown[]; at: number }> label="Result" rows={reply.rows.slice(0, ROWS_SHOWN).map((row, at) => ({ row, at }))} rowKey={({ at }) => String(at)} empty={<Empty title="No rows." />}
            columns={reply.columns.map(({ name, type }, at) => ({ head: name || `column ${at + 1}`, num: isNumber(type), cell: ({ row }) => <span class={row[at] === null ? "faint cut" : "cut"} title={text(row[at])}>{text(row[at])}</span> }))} />
          {reply.rows.length > ROWS_SHOWN && <p class="panel-body faint">The first {ROWS_SHOWN} rows are shown. Export the result to see all.</p>}
        </>
      )}
    </Panel>
  );
}

const PLAIN_NAME = /^[a-z_][a-z0-9_]*$/;
const inSql = (name: string): string => (PLAIN_NAME.test(name) ? name : `"${name.replaceAll('"', '""')}"`);

/** Columns of a dataset, loaded when it is opened. */
function Columns({ id, insert }: { id: string; insert: (name: string) => void }): JSX.Element {
  const dataset = useGet<DatasetView>(`/v1/datasets/${id}`);
  return (
    <Load of={dataset} lines={2}>
      {(view) => {
        const columns = columnsOf(view.versions.find(({ dataset_version }) => dataset_version === view.current_version));
        return columns.length ? <ul>{columns.map((one) => <li key={one.name}><button type="button" class="link" onClick={() => insert(inSql(one.name))}>{one.name}</button> <span class="faint">{String(one.type)}</span></li>)}</ul> : <p class="faint small">Its columns are those of its files: select * shows them.</p>;
      }}
    </Load>
  );
}

function Relation({ of, insert }: { of: DatasetSummary; insert: (name: string) => void }): JSX.Element {
  const open = useSignal(false);
  const name = datasetName(of);
  return (
    <details onToggle={(event) => (open.value = event.currentTarget.open)}>
      <summary><code>{name}</code></summary>
      <p class="small"><button type="button" class="link" onClick={() => insert(inSql(name))}>Insert</button> · <a href={datasetLink(of.dataset_uuid)}>Open</a></p>
      {open.value && <Columns id={of.dataset_uuid} insert={insert} />}
    </details>
  );
}

function Relations({ insert }: { insert: (name: string) => void }): JSX.Element {
  const datasets = useGet<{ datasets: DatasetSummary[]; next_cursor: string | null }>("/v1/datasets", { query: { limit: 200 } });
  return (
    <Panel title="Datasets">
      <div class="relations" tabIndex={0} role="region" aria-label="Datasets">
        <Load of={datasets}>
          {({ datasets: all, next_cursor }) => (
            <>
              {all.map((one) => <Relation key={one.dataset_uuid} of={one} insert={insert} />)}
              {all.length === 0 && <Empty title="Nothing to query.">Datasets that you may read appear here.</Empty>}
              {next_cursor && <p class="faint">The first 200 are shown.</p>}
            </>
          )}
        </Load>
      </div>
    </Panel>
  );
}

async function download(sql: string): Promise<void> {
  const reply = await fetch("/v1/query", { method: "POST", headers: { "Content-Type": "application/json", "X-Interlock-CSRF": session.value?.csrf ?? "" }, body: JSON.stringify({ sql, format: "csv" }) });
  if (!reply.ok) {
    const problem = (await reply.json()) as { code: string; detail: string };
    throw new ApiError(reply.status, problem.code, problem.detail, problem);
  }
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await reply.blob());
  link.download = "result.csv";
  link.click();
  URL.revokeObjectURL(link.href);
}

function Editor(): JSX.Element {
  const { query, set } = useQuery();
  const sql = useSignal(query.sql ?? "");
  const outcome = useSignal<Outcome>({ state: "idle" });
  const area = useRef<HTMLTextAreaElement>(null);
  useEffect(() => {
    if (query.sql !== undefined) sql.value = query.sql;
  }, [query.sql]);
  const insert = (name: string): void => {
    const box = area.current!;
    box.setRangeText(name, box.selectionStart, box.selectionEnd, "end");
    sql.value = box.value;
    box.focus();
  };
  const attempt = async (work: (abort: AbortSignal) => Promise<Reply | null>): Promise<void> => {
    const abort = new AbortController();
    outcome.value = { state: "running", abort };
    set({ sql: sql.value, tab: null });
    try {
      const reply = await work(abort.signal);
      outcome.value = reply ? { state: "done", reply } : { state: "idle" };
    } catch (error) {
      if (abort.signal.aborted) outcome.value = { state: "idle" };
      else outcome.value = { state: "failed", error: error instanceof ApiError ? error : new ApiError(0, "internal", String(error), {}) };
    }
  };
  const run = (extra: Record<string, unknown> = {}): void => void attempt((abort) => send<Reply>({ method: "POST", path: "/v1/query", body: { sql: sql.value, ...extra } }, abort));
  const running = outcome.value.state === "running" ? outcome.value : null;
  const ready = sql.value.trim() !== "" && !running;
  return (
    <div class="sql">
      <Relations insert={insert} />
      <div>
        <Panel>
          <form onSubmit={(event) => { event.preventDefault(); if (ready) run(); }}>
            <label class="field">
              <span>Statement <em>one SELECT</em></span>
              <textarea ref={area} name="sql" rows={7} spellcheck={false} placeholder="select * from transfers limit 100" value={sql.value} onInput={(event) => (sql.value = event.currentTarget.value)}
                onKeyDown={(event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && ready) { event.preventDefault(); run(); } }} />
            </label>
            <p class="actions editor-actions">
              {running ? <button type="button" class="button danger" onClick={() => running.abort.abort()}>Cancel</button> : <button type="submit" class="button primary" disabled={!ready}>Run</button>}
              <button type="button" class="button" disabled={!ready} onClick={() => run({ export: true })}>Export as Parquet</button>
              <button type="button" class="button" disabled={!ready} onClick={() => void attempt(async () => { await download(sql.value); return null; })}>Export as CSV</button>
              <span class="faint small right">Ctrl + Enter runs. As a command line <CopyButton text={commandLine(["sql", sql.value])} label="Copy as command line" /></span>
            </p>
          </form>
        </Panel>
        <div aria-live="polite">
          {running && <Skeleton lines={5} />}
          {outcome.value.state === "failed" && <Problems of={outcome.value.error} />}
          {outcome.value.state === "done" && <Result key={outcome.value.reply.query_id} reply={outcome.value.reply} />}
        </div>
      </div>
    </div>
  );
}

function Shown({ id }: { id: string }): JSX.Element {
  const record = useGet<QueryView & { sql?: string | null }>(`/v1/queries/${encodeURIComponent(id)}`, { every: (data) => (data?.batch_status === "Running" || data?.batch_status === "Queued" ? 3 : 0) });
  return (
    <Panel title="Query">
      <Load of={record}>
        {(view) => (
          <>
            {view.batch_error && <Note tone="bad">{view.batch_error}</Note>}
            <Facts of={[
              ["Query", <Id id={view.query_id} whole />],
              ["Outcome", <><Badge state={view.batch_status ?? view.outcome} /> {view.code}</>],
              view.sql && ["Statement", <><code>{view.sql}</code> <a href={pathOf("/ui/sql", { sql: view.sql })}>Edit</a></>],
              ["By", view.user ?? (view.task_id && <Id id={view.task_id} href={taskLink(view.task_id)} />)],
              ["Rows", number(view.row_count)],
              ["Took", duration(view.duration_ms === null ? null : view.duration_ms / 1000)],
              ["Started", <Time at={view.started_at} full />],
              view.batch_task_id && ["Batch task", <Id id={view.batch_task_id} href={taskLink(view.batch_task_id)} />],
              view.export && ["Files", <ul>{view.export.files.map((file) => <li key={file.uri}>{file.url ? <a href={file.url} download>{file.uri.split("/").at(-1)}</a> : file.uri} {bytes(file.bytes)}</li>)}</ul>],
            ]} />
          </>
        )}
      </Load>
    </Panel>
  );
}

function History(): JSX.Element {
  const { query } = useQuery();
  const queries = useGet<{ queries: (QueryView & { sql?: string | null })[]; next_cursor: string | null }>("/v1/queries", { query: { cursor: query.cursor, limit: PAGE }, every: 10 });
  return (
    <>
      {query.query && <Shown id={query.query} />}
      <Panel flush>
        <PagedTable label="Queries" of={queries} rows={(page) => page.queries} rowKey={({ query_id }) => query_id} empty={<Empty title="No queries yet." />} columns={[
          { head: "Query", cell: (row) => <Id id={row.query_id} href={queryLink(row.query_id)} /> },
          { head: "Outcome", cell: (row) => <Badge state={row.batch_status ?? row.outcome} /> },
          { head: "Statement", grow: true, cell: (row) => (row.sql ? <a href={pathOf("/ui/sql", { sql: row.sql })} title={row.sql}><code>{row.sql}</code></a> : <span class="faint">{row.code ?? "of another user"}</span>) },
          { head: "By", wide: true, cell: (row) => row.user ?? "a task" },
          { head: "Rows", num: true, wide: true, cell: (row) => number(row.row_count) },
          { head: "Took", num: true, cell: (row) => duration(row.duration_ms === null ? null : row.duration_ms / 1000) },
          { head: "Started", num: true, cell: (row) => <Time at={row.started_at} /> },
        ]} />
      </Panel>
    </>
  );
}

export default function SqlPage(): JSX.Element {
  useTitle("SQL");
  const { query, href } = useQuery();
  const tab = query.query ? "history" : (query.tab ?? "editor");
  return (
    <>
      <Header title="SQL" />
      <Tabs current={tab} tabs={[{ id: "editor", label: "Editor", href: href({ tab: null, query: null, cursor: null }) }, { id: "history", label: "History", href: href({ tab: "history", query: null }) }]} />
      {tab === "history" ? <History /> : <Editor />}
    </>
  );
}
