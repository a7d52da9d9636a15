import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import type { DeadMessage, PauseView, QueueView, WorkerView } from "../api/types";
import { useGet } from "../api/use";
import { JobName, tasksLink } from "../app/links";
import { useTitle } from "../app/title";
import { ActionButton, Dialog, type Action } from "../ui/action";
import { Empty, Header, Json, Load, Panel, Time } from "../ui/basics";
import { commandLine } from "../ui/commands";
import { duration, number } from "../ui/format";
import { Table } from "../ui/table";

function DeadLetters({ queue, close }: { queue: string; close: () => void }): JSX.Element {
  const letters = useGet<{ messages: DeadMessage[] }>(`/v1/queues/${encodeURIComponent(queue)}/dead-letters`, { query: { limit: 20 } });
  return (
    <Dialog title={`Dead letters of ${queue}`} close={close}>
      <div class="dialog-body">
        <Load of={letters}>
          {({ messages }) => (messages.length ? <>{messages.map((one) => <div key={one.message_id}><p class="faint">Received {one.receives} times, dead <Time at={one.dead_at} /></p><Json value={one.body} label="message" /></div>)}</> : <Empty title="None now." />)}
        </Load>
      </div>
    </Dialog>
  );
}

const redrive = (queue: string, done: () => void): Action => ({
  label: "Redrive", scope: "platform", about: <p>Delivers the dead letters of this queue again.</p>,
  fields: [{ name: "limit", label: "At most", type: "number", value: "1000", required: true }],
  request: ({ limit }) => ({ method: "POST", path: `/v1/queues/${encodeURIComponent(queue)}/redrive`, query: { limit } }), cli: ({ limit }) => commandLine(["queue", "redrive", queue], { limit }), done,
});

function Queues(): JSX.Element {
  const queues = useGet<{ queues: QueueView[] }>("/v1/queues", { every: 3 });
  const opened = useSignal<string | null>(null);
  return (
    <Panel title="Queues" flush>
      <Load of={queues}>
        {({ queues: all }) => (
          <Table label="Queues" rows={[...all].sort((one, other) => other.dead_letters - one.dead_letters || other.depth - one.depth)} rowKey={({ queue }) => queue} empty={<Empty title="No queues." />} columns={[
            { head: "Queue", grow: true, cell: ({ queue }) => <span title={queue}>{queue}</span> },
            { head: "Depth", num: true, cell: ({ depth }) => (depth >= 100_000 ? "100,000+" : number(depth)) },
            { head: "In flight", num: true, cell: ({ in_flight }) => number(in_flight) },
            { head: "Oldest", num: true, cell: ({ oldest_age_seconds }) => duration(oldest_age_seconds) },
            { head: "Dead letters", num: true, cell: ({ queue, dead_letters }) => (dead_letters ? <button type="button" class="link bad-text" onClick={() => (opened.value = queue)}>{number(dead_letters)}</button> : <span class="faint">0</span>) },
            { head: "", num: true, cell: ({ queue, dead_letters }) => dead_letters > 0 && <div class="actions"><ActionButton action={redrive(queue, queues.reload)} /></div> },
          ]} />
        )}
      </Load>
      {opened.value && <DeadLetters queue={opened.value} close={() => (opened.value = null)} />}
    </Panel>
  );
}

function Workers(): JSX.Element {
  const workers = useGet<{ workers: WorkerView[] }>("/v1/workers", { every: 5 });
  return (
    <Panel title="Workers" flush aside="that asked for work in the last minute">
      <Load of={workers}>
        {({ workers: all }) => (
          <Table label="Workers" rows={all} rowKey={({ worker_id, queue }) => `${worker_id} ${queue}`} empty={<Empty title="No worker asks for work.">Start one: <code>interlock serve worker</code></Empty>} columns={[
            { head: "Worker", grow: true, cell: (row) => <a href={tasksLink({ worker: row.worker_id })} title={row.worker_id}>{row.worker_id}</a> },
            { head: "Runtime", cell: (row) => row.queue },
            { head: "Seen", num: true, cell: (row) => <Time at={row.last_seen_at} /> },
          ]} />
        )}
      </Load>
    </Panel>
  );
}

function Pressure(): JSX.Element {
  const pauses = useGet<{ pauses: PauseView[]; next_cursor: string | null }>("/v1/pauses", { every: 5 });
  return (
    <Panel title="Backpressure" flush>
      <Load of={pauses} lines={2}>
        {({ pauses: all }) => (
          <Table label="Backpressure" rows={all} rowKey={({ job_id }) => job_id} empty={<Empty title="No job is paused by backpressure." />} columns={[
            { head: "Paused job", cell: (row) => <JobName job={row.job} id={row.job_id} /> },
            { head: "Because of", cell: (row) => <JobName job={row.cause} id={row.cause_id} /> },
            { head: "Reason", grow: true, cell: (row) => <span title={row.path.join(" → ")}>{row.reason}</span> },
            { head: "Since", num: true, cell: (row) => <Time at={row.since} /> },
          ]} />
        )}
      </Load>
    </Panel>
  );
}

export default function QueuesPage(): JSX.Element {
  useTitle("Queues and workers");
  return (
    <>
      <Header title="Queues and workers" />
      <Queues />
      <Pressure />
      <Workers />
    </>
  );
}
