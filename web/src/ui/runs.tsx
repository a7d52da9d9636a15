// Actions on runs.
import type { JSX } from "preact";
import type { ExportView, ReceiptReply, RunView } from "../api/types";
import { useGet } from "../api/use";
import type { Action } from "./action";
import { Badge, Json, Load, Note, Panel } from "./basics";
import { commandLine } from "./commands";
import { bytes, number } from "./format";

const SHOWN_PARTS = 20;

export function runActions(run: RunView, reload: () => void): Action[] {
  const ended = run.ended_at !== null && "The run has ended";
  const bulk = (kind: "pause" | "resume") => () => ({ method: "POST" as const, path: "/v1/bulk-operations", body: { kind, filter: { run: run.run_id } } });
  const paused = run.state === "Paused";
  return [
    {
      label: paused ? "Resume" : "Pause", scope: "tasks:write", blocked: ended, primary: paused,
      about: <p>{paused ? "Its tasks start again." : "Running tasks continue, no other task of this run starts."}</p>,
      request: bulk(paused ? "resume" : "pause"), cli: () => commandLine(["bulk", "start", paused ? "resume" : "pause"], { run: run.run_id }), done: reload,
    },
    {
      label: "Cancel", scope: "tasks:write", danger: true, blocked: ended, confirm: "Cancel the run",
      about: <p>Queued tasks are canceled, running ones are asked to stop. Completed tasks and their results stay.</p>,
      request: () => ({ method: "POST", path: `/v1/runs/${run.run_id}/cancel` }), cli: () => commandLine(["run", "cancel", run.run_id], { yes: true }), done: reload,
    },
  ];
}

export function rerunAction(run: RunView, open: (run: string) => void): Action {
  const body = (which: string | undefined, errorClass: string | undefined): unknown => ({
    run: run.run_id, ...(which === "failed" ? { status: ["Failed"] } : which === "canceled" ? { status: ["Canceled"] } : {}), ...(errorClass ? { error_class: errorClass } : {}),
  });
  return {
    label: "Rerun", scope: "jobs:write", blocked: run.state === "Ingesting" && "Its list is still being read",
    about: <p>Makes a new run with payloads of this one. This run stays as it is.</p>,
    fields: [
      { name: "which", label: "Tasks", type: "select", required: true, value: run.counts.Failed ? "failed" : "all", options: [{ value: "failed", label: "Failed ones" }, { value: "canceled", label: "Canceled ones" }, { value: "all", label: "All" }] },
      { name: "error_class", label: "Error class", hint: "Only tasks that failed with this error" },
    ],
    request: ({ which, error_class }) => ({ method: "POST", path: `/v1/jobs/${run.job_id}/rerun`, body: body(which, error_class) }),
    cli: ({ which, error_class }) => commandLine(["job", "rerun", run.job_id], { run: run.run_id, failed: which === "failed", "error-class": error_class }),
    done: (reply: { run_id: string }) => open(reply.run_id),
  };
}

export function exportAction(run: RunView, ended: boolean, made: (id: string) => void): Action {
  return {
    label: "Export", scope: "jobs:write", blocked: !ended && "A run is exported after its end",
    about: <p>Writes payloads and results of all tasks to files, on Spark. The links appear on this page when the files are complete.</p>,
    fields: [{ name: "format", label: "Format", type: "select", required: true, value: "parquet", options: [{ value: "parquet", label: "Parquet" }, { value: "jsonl", label: "JSON lines" }, { value: "zip", label: "ZIP" }] }],
    request: ({ format }) => ({ method: "POST", path: `/v1/jobs/${run.job_id}/exports`, body: { run: run.run_id, format } }),
    cli: ({ format }) => commandLine(["job", "export", run.job_id], { run: run.run_id, format }),
    done: (view: ExportView) => made(view.export_id),
  };
}

export function receiptAction(run: RunView, ended: boolean): Action {
  return {
    label: "Receipt", scope: "jobs:read", blocked: !ended && "A receipt is signed after the end of the run", confirm: "Get the receipt",
    about: <p>A signed statement of what ran: the digests of all tasks and outcomes. Anyone can verify it with the public key.</p>,
    request: () => ({ method: "GET", path: `/v1/jobs/${run.job_id}/receipt`, query: { run: run.run_id } }),
    cli: () => commandLine(["job", "receipt", run.job_id], { run: run.run_id, file: "receipt.json" }),
    result: (reply: ReceiptReply) => <Receipt reply={reply} run={run.run_id} />,
  };
}

function Receipt({ reply, run }: { reply: ReceiptReply; run: string }): JSX.Element {
  if (reply.state === "Pending") return <Note title="Being computed.">{number(reply.walked)} of {number(reply.of)} tasks read. Ask again in a moment.</Note>;
  const download = (): void => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(reply, null, 2)], { type: "application/json" }));
    link.download = `receipt-${run}.json`;
    link.click();
    URL.revokeObjectURL(link.href);
  };
  return (
    <>
      <Json value={reply.receipt} label="receipt" />
      <button type="button" class="button primary" onClick={download}>Download</button>
    </>
  );
}

/** An export while it is made, and its files afterwards. */
export function ExportProgress({ job, id }: { job: string; id: string }): JSX.Element {
  const made = useGet<ExportView>(`/v1/jobs/${job}/exports/${id}`, { every: (data) => (data?.state === "Completed" || data?.state === "Failed" ? 0 : 2) });
  return (
    <Panel title="Export" aside={made.data && <Badge state={made.data.state} />}>
      <Load of={made} lines={1}>
        {(view) =>
          view.state === "Failed" ? <Note tone="bad" title="The export failed.">{view.error}</Note>
          : view.state !== "Completed" ? <p>{number(view.staged)} of {number(view.of)} tasks read.</p>
          : (
            <>
              <p>{number(view.rows)} rows, {bytes(view.bytes)}. The links are valid for a day.</p>
              <ul>{(view.parts ?? []).slice(0, SHOWN_PARTS).map((part) => <li key={part.name}>{part.url ? <a href={part.url} download={part.name}>{part.name}</a> : part.name} <span class="faint">{number(part.rows)} rows, {bytes(part.bytes)}</span></li>)}</ul>
              {view.manifest_url && <p><a href={view.manifest_url} download="manifest.json">Manifest with all files and digests</a></p>}
            </>
          )}
      </Load>
    </Panel>
  );
}
