// Batches that tasks publish for buffered datasets, and why some were refused.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import type { BufferView } from "../api/types";
import { useGet } from "../api/use";
import { datasetLink, taskLink } from "../app/links";
import { ActionButton, Dialog, type Action } from "../ui/action";
import { Badge, Empty, Id, Note, Panel, Time } from "../ui/basics";
import { commandLine } from "../ui/commands";
import { number } from "../ui/format";
import { Filters, PagedTable, Table, useQuery } from "../ui/table";
import { PAGE } from "./runs";

function Refusal({ id, close }: { id: string; close: () => void }): JSX.Element {
  const batch = useGet<BufferView>(`/v1/buffers/${id}`);
  const refusal = batch.data?.refusal;
  return (
    <Dialog title="Why it was refused" close={close}>
      <div class="dialog-body">
        {refusal && (
          <>
            <Note tone="bad" title={refusal.code}>{refusal.detail}</Note>
            <Table label="Refused lines" rows={refusal.rows ?? []} rowKey={({ line }) => String(line)} empty={<p class="faint">No single line is at fault.</p>} columns={[
              { head: "Line", num: true, cell: ({ line }) => number(line) },
              { head: "Reason", grow: true, cell: ({ reason }) => <span title={reason}>{reason}</span> },
            ]} />
          </>
        )}
      </div>
    </Dialog>
  );
}

const redrive = (batch: BufferView, done: () => void): Action => ({
  label: "Redrive", scope: "jobs:write", about: <p>Loads the batch once more, as it is.</p>,
  request: () => ({ method: "POST", path: `/v1/buffers/${batch.publish_id}/redrive` }), cli: () => commandLine(["buffer", "redrive", batch.publish_id]), done,
});

const isStuck = ({ status }: BufferView): boolean => status === "Refused" || status === "Failed";

export function Buffers(): JSX.Element {
  const { query } = useQuery();
  const opened = useSignal<string | null>(null);
  const batches = useGet<{ buffers: BufferView[]; next_cursor?: string | null }>("/v1/buffers", { query: { status: query.status, cursor: query.cursor, limit: PAGE }, every: 10 });
  return (
    <>
      <Filters of={[{ name: "status", label: "Status", options: ["Refused", "Failed", "Pending", "Loading", "Loaded"] }]} />
      <Panel flush>
        <PagedTable label="Published batches" of={batches} rows={(page) => [...page.buffers].sort((one, other) => Number(isStuck(other)) - Number(isStuck(one)))} rowKey={({ publish_id }) => publish_id} empty={<Empty title="No batches.">Tasks publish batches for buffered datasets.</Empty>} columns={[
          { head: "Batch", cell: (row) => <Id id={row.publish_id} /> },
          { head: "Status", cell: (row) => <Badge state={row.status} /> },
          { head: "Dataset", cell: (row) => <a class="cut" href={datasetLink(row.dataset_uuid)}>{row.dataset ?? row.dataset_uuid}</a> },
          { head: "Refusal", grow: true, cell: ({ refusal, publish_id }) => (refusal ? <button type="button" class="link" title={refusal.detail} onClick={() => (opened.value = publish_id)}><strong>{refusal.code}</strong> {refusal.detail}</button> : <span class="faint">none</span>) },
          { head: "Rows", num: true, cell: (row) => number(row.rows ?? row.record_count) },
          { head: "Task", wide: true, cell: (row) => <Id id={row.task_id} href={taskLink(row.task_id)} /> },
          { head: "Published", num: true, cell: (row) => <Time at={row.published_at} /> },
          { head: "", num: true, cell: (row) => isStuck(row) && <div class="actions"><ActionButton action={redrive(row, batches.reload)} /></div> },
        ]} />
      </Panel>
      {opened.value && <Refusal id={opened.value} close={() => (opened.value = null)} />}
    </>
  );
}
