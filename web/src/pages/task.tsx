import { useSignal } from "@preact/signals";
import { useRoute } from "preact-iso";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { get } from "../api/client";
import type { AttemptView, Explanation, LogPage, TaskView } from "../api/types";
import { useGet, type Loaded } from "../api/use";
import { JobName, jobText, runLink } from "../app/links";
import { useTitle } from "../app/title";
import { Actions, type Action } from "../ui/action";
import { Badge, Code, Empty, Facts, Header, Id, Json, Load, Note, Panel, Skeleton, Time } from "../ui/basics";
import { commandLine } from "../ui/commands";
import { bytes, duration, localHour, localTime, secondsBetween, shortId } from "../ui/format";
import { Table } from "../ui/table";
import { Timeline } from "../ui/timeline";

const isOver = (task: TaskView | undefined): boolean => task?.status === "Completed" || task?.status === "Canceled" || Boolean(task?.dead);

function actions(task: TaskView, reload: () => void): Action[] {
  const path = `/v1/tasks/${task.task_id}`;
  return [
    {
      label: "Retry", scope: "tasks:write", primary: task.status === "Failed", blocked: task.status !== "Failed" && "Only a failed task can be retried",
      about: <p>Queues the task now, with fresh attempts if none are left.</p>,
      request: () => ({ method: "POST", path: `${path}/retry` }), cli: () => commandLine(["task", "retry", task.task_id]), done: reload,
    },
    {
      label: "Cancel", scope: "tasks:write", danger: true, confirm: "Cancel the task", blocked: (isOver(task) || task.cancel_requested) && "The task has ended, or is being canceled",
      about: <p>{task.status === "Running" ? "Its worker is asked to stop. A result that it reports before that counts." : "The task will not run."}</p>,
      request: () => ({ method: "POST", path: `${path}/cancel` }), cli: () => commandLine(["task", "cancel", task.task_id]), done: reload,
    },
  ];
}

const fact = (value: unknown): string => {
  if (typeof value === "string" && /^\d{4}-\d\d-\d\dT/.test(value)) return localTime(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
};

function Explain({ of }: { of: Loaded<Explanation> }): JSX.Element {
  const tone = { Failed: "bad", Completed: "good", Canceled: "info", Running: "info", Queued: "warn" } as const;
  return (
    <Load of={of} lines={1}>
      {(explanation) => (
        <Note tone={tone[explanation.status]}>
          <span class="explain">{explanation.detail}</span>
          <details class="small">
            <summary class="faint">{explanation.reason}</summary>
            <Facts of={Object.entries(explanation.facts).filter(([, value]) => value !== null).map(([name, value]) => [name.replaceAll("_", " "), fact(value)])} />
          </details>
        </Note>
      )}
    </Load>
  );
}

function Attempts({ task, of }: { task: TaskView; of: Loaded<{ attempts: AttemptView[] }> }): JSX.Element {
  return (
    <Panel title="Attempts" flush>
      <Load of={of} lines={2}>
        {({ attempts }) =>
          attempts.length === 0 ? <Empty title="No attempt yet." /> : (
            <>
              <div class="panel-body"><Timeline single since={task.created_at} attempts={attempts.map((attempt) => ({ ...attempt, task_id: task.task_id, index: task.index }))} /></div>
              <Table label="Attempts" rows={attempts} rowKey={({ attempt, started_at }) => `${attempt} ${started_at}`} columns={[
                { head: "#", cell: ({ attempt }) => attempt },
                { head: "Outcome", cell: ({ outcome }) => (outcome ? <Badge state={outcome} /> : <Badge state="Running" />) },
                { head: "Error", grow: true, cell: (row) => <span title={row.error_message ?? ""}><strong>{row.error_class}</strong> <span class="faint">{row.error_message}{row.crash?.oom ? " (out of memory)" : ""}</span></span> },
                { head: "Worker", wide: true, cell: ({ worker_id }) => (worker_id ? <a class="cut" href={`/ui/tasks?worker=${encodeURIComponent(worker_id)}`}>{worker_id}</a> : <span class="faint">–</span>) },
                { head: "Took", num: true, cell: (row) => duration(secondsBetween(row.started_at, row.ended_at)) },
                { head: "Started", num: true, wide: true, cell: (row) => <Time at={row.started_at} /> },
              ]} />
            </>
          )}
      </Load>
    </Panel>
  );
}

const LINES_KEPT = 2000;

/** The output of an attempt; follows it while it runs. */
function Logs({ task }: { task: TaskView }): JSX.Element {
  const lines = useSignal<LogPage["lines"]>([]);
  const state = useSignal<"loading" | "ready" | string>("loading");
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const abort = new AbortController();
    let timer: number | undefined;
    let after = 0;
    lines.value = [];
    const follow = async (): Promise<void> => {
      if (document.hidden) return void (timer = window.setTimeout(() => void follow(), 1000));
      try {
        const page = await get<LogPage>(`/v1/tasks/${task.task_id}/logs`, { attempt: task.attempt || undefined, after }, abort.signal);
        const atEnd = !box.current || box.current.scrollHeight - box.current.scrollTop - box.current.clientHeight < 40;
        if (page.lines.length) lines.value = [...lines.value, ...page.lines].slice(-LINES_KEPT);
        after = page.next;
        state.value = "ready";
        if (atEnd) requestAnimationFrame(() => box.current?.scrollTo(0, box.current.scrollHeight));
        if (page.more || !page.ended) timer = window.setTimeout(() => void follow(), page.more ? 0 : 1000);
      } catch (error) {
        if (!abort.signal.aborted) state.value = error instanceof Error ? error.message : String(error);
      }
    };
    void follow();
    return () => {
      abort.abort();
      window.clearTimeout(timer);
    };
  }, [task.task_id, task.attempt]);
  return (
    <Panel title="Output" aside={task.attempt > 0 && `attempt ${task.attempt}`}>
      {state.value === "loading" ? <Skeleton lines={3} />
        : state.value !== "ready" ? <Note tone="warn">{state.value}</Note>
        : lines.value.length === 0 ? <Empty title="No output.">What the operator prints or logs appears here.</Empty>
        : (
          <div class="log" ref={box} tabIndex={0} role="log" aria-label="Output">
            {lines.value.map((line, at) => <p key={at} class={line.stream}><time dateTime={line.at} class="faint">{localHour(line.at)}</time><span>{line.text}</span></p>)}
          </div>
        )}
    </Panel>
  );
}

function Details({ task }: { task: TaskView }): JSX.Element {
  return (
    <Panel title="Task">
      <Facts of={[
        ["Task", <Id id={task.task_id} whole />],
        ["Job", <JobName job={task.job} id={task.job_id} />],
        task.run_id && ["Run", <><Id id={task.run_id} href={runLink(task.run_id)} /> {task.index !== null && `# ${task.index}`}</>],
        ["Attempt", task.attempt],
        ["Priority", task.priority],
        ["Created", <Time at={task.created_at} full />],
        ["Started", <Time at={task.started_at} full />],
        ["Ended", <Time at={task.ended_at} full />],
        task.started_at && ["Took", duration(secondsBetween(task.started_at, task.ended_at))],
        task.retry_at && ["Next attempt", <Time at={task.retry_at} />],
        task.worker_id && ["Worker", task.worker_id],
        task.lease_expires_at && ["Lease until", <Time at={task.lease_expires_at} />],
        task.progress !== null && ["Progress", `${Math.round(task.progress * 100)} % ${task.progress_text ?? ""}`],
      ]} />
    </Panel>
  );
}

export default function TaskPage(): JSX.Element {
  const id = useRoute().params.id!;
  const path = `/v1/tasks/${encodeURIComponent(id)}`;
  const task = useGet<TaskView>(path, { every: (data) => (isOver(data) ? 0 : 2) });
  const moving = { every: isOver(task.data) ? 0 : 2 };
  const key = task.data ? `${task.data.status}${task.data.attempt}` : "";
  const explanation = useGet<Explanation>(`${path}/explain`, { ...moving, query: {} });
  const attempts = useGet<{ attempts: AttemptView[] }>(`${path}/attempts`, moving);
  useEffect(() => {
    if (key) {
      explanation.reload();
      attempts.reload();
    }
  }, [key]);
  useTitle(`Task ${shortId(id)}`);
  return (
    <Load of={task} lines={10}>
      {(view) => (
        <>
          <Header kind={<>Task of <JobName job={view.job} id={view.job_id} /></>} title={view.index === null ? jobText(view.job) || "Task" : `${jobText(view.job) || "Task"} # ${view.index}`} state={<Badge state={view.dead ? "Dead" : view.status} label={view.dead ? "Failed for good" : view.status} />} actions={<Actions of={actions(view, task.reload)} />}>
            <Id id={view.task_id} whole />
          </Header>
          <Explain of={explanation} />
          <Attempts task={view} of={attempts} />
          <div class="columns uneven">
            <div>
              {view.error_message && <Panel title={`Error: ${view.error_class}`}><Code text={view.error_message} label="error" /></Panel>}
              <Logs task={view} />
              <Panel title="Payload"><Json value={view.payload} label="payload" /></Panel>
              <Panel title="Result" aside={<>{view.result_bytes != null && bytes(view.result_bytes)} {view.result_url && <a href={view.result_url} target="_blank" rel="noreferrer">Link to the result, valid for a day</a>}</>}><Json value={view.result} label="result" /></Panel>
            </div>
            <Details task={view} />
          </div>
        </>
      )}
    </Load>
  );
}
