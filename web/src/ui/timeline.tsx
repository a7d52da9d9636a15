// Attempts on a common axis of time. The hatched parts are the gaps in which a task was idle.
import type { JSX } from "preact";
import { serverNow } from "../api/client";
import type { TimelineAttempt } from "../api/types";
import { taskLink } from "../app/links";
import { toneOf } from "./basics";
import { duration, localHour, secondsBetween } from "./format";

type Attempt = Omit<TimelineAttempt, "index"> & { index: number | null };

const startOf = (attempts: Attempt[]): number => Math.min(...attempts.map(({ started_at }) => Date.parse(started_at)));
const endOf = (attempts: Attempt[]): number =>
  Math.max(...attempts.map(({ ended_at }) => (ended_at ? Date.parse(ended_at) : serverNow())));

function Span({ attempt, from, width }: { attempt: Attempt; from: number; width: number }): JSX.Element {
  const left = ((Date.parse(attempt.started_at) - from) / width) * 100;
  const seconds = Math.max(secondsBetween(attempt.started_at, attempt.ended_at), 0);
  const text = `Attempt ${attempt.attempt}: ${attempt.outcome ?? "running"}, ${duration(seconds)}, worker ${attempt.worker_id ?? "unknown"}`;
  const tone = attempt.outcome ? toneOf(attempt.outcome) : "live";
  return <span class={`span ${tone}`} title={text} style={{ left: `${left}%`, width: `${((seconds * 1000) / width) * 100}%` }} />;
}

function gaps(attempts: Attempt[], from: number): number {
  let idle = 0;
  let until = from;
  for (const { started_at, ended_at } of attempts) {
    idle += Math.max(Date.parse(started_at) - until, 0);
    until = Math.max(until, ended_at ? Date.parse(ended_at) : serverNow());
  }
  return idle / 1000;
}

interface TimelineProps {
  attempts: Attempt[];
  /** One lane per attempt of one task, instead of one lane per task. */
  single?: boolean;
  /** When the task was created: the axis starts there, so that the first wait shows. */
  since?: string;
}

export function Timeline({ attempts, single, since }: TimelineProps): JSX.Element | null {
  if (!attempts.length) return null;
  const sorted = [...attempts].sort((one, other) => Date.parse(one.started_at) - Date.parse(other.started_at));
  const from = since ? Math.min(Date.parse(since), startOf(sorted)) : startOf(sorted);
  const width = Math.max(endOf(sorted) - from, 1);
  const lanes = new Map<string, Attempt[]>();
  for (const attempt of sorted) {
    const lane = single ? String(attempt.attempt) : attempt.task_id;
    lanes.set(lane, [...(lanes.get(lane) ?? []), attempt]);
  }
  const idle = single ? gaps(sorted, from) : 0;
  return (
    <div class="timeline" tabIndex={0} role="region" aria-label="Attempts over time">
      {[...lanes].map(([lane, spans]) => (
        <div class="lane" key={lane}>
          {single ? <span class="faint">Attempt {lane}</span> : <a class="cut" href={taskLink(lane)}>{spans[0]!.index === null ? lane.slice(0, 8) : `# ${spans[0]!.index}`}</a>}
          <div class="track">{spans.map((attempt) => <Span key={attempt.started_at} attempt={attempt} from={from} width={width} />)}</div>
        </div>
      ))}
      <div class="axis">
        <span>{localHour(new Date(from).toISOString())}</span>
        <span>{single && idle >= 0.001 ? `idle for ${duration(idle)} of ${duration(width / 1000)}` : duration(width / 1000)}</span>
        <span>{localHour(new Date(from + width).toISOString())}</span>
      </div>
    </div>
  );
}
