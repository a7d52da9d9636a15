// The smallest pieces: states, times, ids, messages, and the three states of a load.
import { useSignal } from "@preact/signals";
import type { ComponentChildren, JSX } from "preact";
import type { Loaded } from "../api/use";
import { ago, clock, localTime, shortId, utcTime } from "./format";
import { Icon, type IconName } from "./icons";

const TONES: Record<string, string> = {
  Completed: "good", Done: "good", Loaded: "good", Delivered: "good", Current: "good", healthy: "good", ok: "good",
  current: "good", ready: "good", up: "good", Signed: "good", done: "good", running: "live",
  Running: "live", Ingesting: "live", Sending: "live", Loading: "live", Building: "live", Selecting: "live", Staging: "live",
  Failed: "bad", Dead: "bad", Refused: "bad", unhealthy: "bad", stalled: "bad", misrouted: "bad", LeaseExpired: "bad",
  TimedOut: "bad", OverLimit: "bad", Lost: "bad", revoked: "idle", critical: "bad", down: "bad", dead: "bad",
  CompletedWithFailures: "warn", Paused: "warn", degraded: "warn", unpolled: "warn", restarting: "warn", paused: "warn",
  Busy: "warn", draining: "warn", previous: "warn",
};
const WORDS: Record<string, string> = {
  CompletedWithFailures: "With failures", LeaseExpired: "Lease expired", TimedOut: "Timed out", OverLimit: "Over limit",
};

/** A state as a dot and a word: the colour never stands alone. */
export function Badge({ state, label }: { state: string | null | undefined; label?: string }): JSX.Element {
  if (!state) return <span class="faint">–</span>;
  return <span class={`badge ${TONES[state] ?? "idle"}`}>{label ?? WORDS[state] ?? state}</span>;
}

export const toneOf = (state: string): string => TONES[state] ?? "idle";

/** A time in the viewer's zone; UTC on hover. */
export function Time({ at, full }: { at: string | null | undefined; full?: boolean }): JSX.Element {
  void clock.value;
  if (!at) return <span class="faint">–</span>;
  const title = full ? utcTime(at) : `${localTime(at)} · ${utcTime(at)}`;
  return (
    <time class="nowrap" dateTime={at} title={title}>
      {full ? localTime(at) : ago(at)}
    </time>
  );
}

export function CopyButton({ text, label = "Copy" }: { text: string; label?: string }): JSX.Element {
  const copied = useSignal(false);
  const copy = async (): Promise<void> => {
    await navigator.clipboard.writeText(text);
    copied.value = true;
    window.setTimeout(() => (copied.value = false), 1500);
  };
  return (
    <button type="button" class="icon-button" onClick={() => void copy()} title={label} aria-label={label}>
      <Icon name={copied.value ? "check" : "copy"} />
    </button>
  );
}

/** An id: shortened in lists, complete with a copy button on its own page. */
export function Id({ id, href, whole }: { id: string | null | undefined; href?: string; whole?: boolean }): JSX.Element {
  if (!id) return <span class="faint">–</span>;
  const text = <code title={id}>{whole ? id : shortId(id)}</code>;
  return (
    <span class="id">
      {href ? <a href={href}>{text}</a> : text}
      {whole && <CopyButton text={id} label="Copy the id" />}
    </span>
  );
}

type Tone = "info" | "good" | "warn" | "bad";
const NOTE_ICONS: Record<Tone, IconName> = { info: "info", good: "check", warn: "alert", bad: "alert" };

export function Note({ tone = "info", title, children }: { tone?: Tone; title?: string; children?: ComponentChildren }): JSX.Element {
  return (
    <div class={`note ${tone}`} role={tone === "bad" ? "alert" : "note"}>
      <Icon name={NOTE_ICONS[tone]} />
      <div>
        {title && <strong>{title}</strong>} {children}
      </div>
    </div>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }): JSX.Element {
  return (
    <div class="empty">
      <p>{title}</p>
      {children && <div class="faint">{children}</div>}
    </div>
  );
}

/** Grey lines in the size of what is being loaded. */
export function Skeleton({ lines = 4 }: { lines?: number }): JSX.Element {
  return (
    <div class="skeleton" aria-busy="true" aria-label="Loading">
      {Array.from({ length: lines }, (_, line) => (
        <span key={line} />
      ))}
    </div>
  );
}

export function ErrorNote({ of }: { of: Loaded<unknown> }): JSX.Element | null {
  if (!of.error) return null;
  const { status, message, problem } = of.error;
  if (of.error.code === "no_identity_provider") return <Note title="No identity provider is configured.">{message}</Note>;
  const title = status === 403 ? "Not allowed." : status === 404 ? "Not found." : status === 0 ? "Offline." : "Could not load this.";
  return (
    <Note tone={status === 403 ? "warn" : "bad"} title={title}>
      {message} {problem.request_id && <span class="faint">Request {problem.request_id}. </span>}
      <button type="button" class="link" onClick={of.reload}>
        Try again
      </button>
    </Note>
  );
}

/** Renders loaded data, or the state of the load. Data that is already there stays while an error is shown above it. */
export function Load<Data>({ of, lines, children }: { of: Loaded<Data>; lines?: number; children: (data: Data) => ComponentChildren }): JSX.Element {
  return (
    <>
      <ErrorNote of={of} />
      {of.data !== undefined ? children(of.data) : !of.error && <Skeleton lines={lines ?? 4} />}
    </>
  );
}

export function Panel({ title, aside, children, flush }: { title?: ComponentChildren; aside?: ComponentChildren; children: ComponentChildren; flush?: boolean }): JSX.Element {
  return (
    <section class="panel">
      {title && (
        <header>
          <h2>{title}</h2>
          {aside && <div class="aside">{aside}</div>}
        </header>
      )}
      <div class={flush ? "panel-body flush" : "panel-body"}>{children}</div>
    </section>
  );
}

export type Fact = [label: string, value: ComponentChildren] | false | null | undefined | "";

/** A list of names and values. */
export function Facts({ of }: { of: Fact[] }): JSX.Element {
  return (
    <dl class="facts">
      {of.filter((fact): fact is [string, ComponentChildren] => Boolean(fact)).map(([label, value]) => (
        <div key={label}>
          <dt>{label}</dt>
          <dd>{value ?? <span class="faint">–</span>}</dd>
        </div>
      ))}
    </dl>
  );
}

export function Stat({ label, value, tone, href, hint }: { label: string; value: ComponentChildren; tone?: string; href?: string; hint?: string }): JSX.Element {
  const body = (
    <>
      <span class="stat-label">{label}</span>
      <span class={`stat-value ${tone ?? ""}`}>{value}</span>
      {hint && <span class="faint small">{hint}</span>}
    </>
  );
  return href ? <a class="stat" href={href}>{body}</a> : <div class="stat">{body}</div>;
}

const LINES_SHOWN = 24;

/** Text of users: shown as text, cut when long, with a copy button. */
export function Code({ text, label }: { text: string; label: string }): JSX.Element {
  const open = useSignal(false);
  const lines = text.split("\n");
  const long = lines.length > LINES_SHOWN || text.length > 6000;
  const shown = open.value || !long ? text : lines.slice(0, LINES_SHOWN).join("\n").slice(0, 6000);
  return (
    <div class="code">
      <CopyButton text={text} label={`Copy ${label}`} />
      <pre tabIndex={0} aria-label={label}>{shown}</pre>
      {long && (
        <button type="button" class="link" onClick={() => (open.value = !open.value)}>
          {open.value ? "Show less" : `Show all ${lines.length.toLocaleString()} lines`}
        </button>
      )}
    </div>
  );
}

export function Json({ value, label }: { value: unknown; label: string }): JSX.Element {
  if (value === null || value === undefined) return <span class="faint">none</span>;
  return <Code text={JSON.stringify(value, null, 2)} label={label} />;
}

export interface Tab {
  id: string;
  label: ComponentChildren;
  href: string;
}

export function Tabs({ tabs, current }: { tabs: Tab[]; current: string }): JSX.Element {
  return (
    <nav class="tabs" aria-label="Parts of this page">
      {tabs.map((tab) => (
        <a key={tab.id} href={tab.href} aria-current={tab.id === current ? "page" : undefined}>
          {tab.label}
        </a>
      ))}
    </nav>
  );
}

export function Header({ title, kind, state, actions, children }: { title: ComponentChildren; kind?: ComponentChildren; state?: ComponentChildren; actions?: ComponentChildren; children?: ComponentChildren }): JSX.Element {
  return (
    <header class="page-header">
      <div class="page-title">
        {kind && <p class="crumb">{kind}</p>}
        <h1>
          {title} {state}
        </h1>
        {children}
      </div>
      {actions && <div class="actions">{actions}</div>}
    </header>
  );
}
