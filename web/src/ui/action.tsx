// Actions: a button that opens a dialog which says what will happen, previews it where the server can, and does it.
import { useSignal, type Signal } from "@preact/signals";
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";
import { ApiError, may, send, type Request } from "../api/client";
import { Note, Skeleton } from "./basics";
import { Commands, curlOf } from "./commands";
import { Icon } from "./icons";

export type Values = Record<string, string>;

export interface Field {
  name: string;
  label: string;
  type?: "text" | "number" | "textarea" | "select" | "checkbox" | "file" | "password";
  options?: { value: string; label: string }[];
  value?: string;
  hint?: string;
  required?: boolean;
}

// The replies of different actions have different types: each action knows its own.
type Reply = any;

export interface Action {
  label: string;
  /** What will happen, and what it will not touch. */
  about: ComponentChildren;
  request: (values: Values) => Request;
  fields?: Field[];
  scope?: string;
  danger?: boolean;
  primary?: boolean;
  /** The verb of the button that confirms. */
  confirm?: string;
  /** Why the action is not possible now. */
  blocked?: string | false | null | undefined;
  /** A dry run, shown before the action is confirmed. */
  preview?: (values: Values) => Request;
  show?: (reply: Reply) => ComponentChildren;
  cli?: (values: Values) => string;
  /** Shown in the dialog afterwards, such as a secret that is shown once. Without it, the dialog closes. */
  result?: (reply: Reply) => ComponentChildren;
  done?: (reply: Reply) => void;
}

const initial = (fields: Field[]): Values => Object.fromEntries(fields.map(({ name, value }) => [name, value ?? ""]));

function Input({ field, values }: { field: Field; values: Signal<Values> }): JSX.Element {
  const id = useId();
  const set = (value: string): void => void (values.value = { ...values.value, [field.name]: value });
  const common = { id, name: field.name, required: field.required ?? false, value: values.value[field.name] ?? "" };
  const onInput = (event: Event): void => set((event.currentTarget as HTMLInputElement).value);
  const read = async (event: Event): Promise<void> => {
    const file = (event.currentTarget as HTMLInputElement).files?.[0];
    if (file) set(await file.text());
  };
  if (field.type === "checkbox") {
    const checked = values.value[field.name] === "true";
    return (
      <label class="check" for={id}>
        <input id={id} type="checkbox" checked={checked} onChange={() => set(checked ? "" : "true")} /> {field.label}
        {field.hint && <small>{field.hint}</small>}
      </label>
    );
  }
  return (
    <label class="field" for={id}>
      <span>
        {field.label}
        {!field.required && <em> optional</em>}
      </span>
      {field.type === "select" ? (
        <select {...common} onChange={onInput}>
          {field.options?.map(({ value, label }) => <option key={value} value={value}>{label}</option>)}
        </select>
      ) : field.type === "textarea" || field.type === "file" ? (
        <>
          {field.type === "file" && <input type="file" aria-label={`${field.label}: choose a file`} onChange={(event) => void read(event)} />}
          <textarea {...common} rows={field.type === "file" ? 10 : 4} spellcheck={false} onInput={onInput} />
        </>
      ) : (
        <input {...common} type={(field.type ?? "text") as "text"} autocomplete="off" spellcheck={false} onInput={onInput} />
      )}
      {field.hint && <small>{field.hint}</small>}
    </label>
  );
}

const asError = (error: unknown): ApiError =>
  error instanceof ApiError ? error : new ApiError(0, "internal", String(error), {});

export function Problems({ of }: { of: ApiError }): JSX.Element {
  const lines = [...(of.problem.errors ?? []), ...(of.problem.problems ?? []).map((one) => `Line ${one.line}: ${one.message} ${one.suggestion}`)];
  return (
    <Note tone="bad" title={of.status === 403 ? "Not allowed." : "Refused."}>
      {of.message}
      {lines.length > 0 && <ul>{lines.map((line) => <li key={line}>{line}</li>)}</ul>}
    </Note>
  );
}

/** Shows the dry run of an action, and repeats it when the form changes. */
function Preview({ action, values }: { action: Action; values: Values }): JSX.Element {
  const state = useSignal<{ reply?: Reply; error?: ApiError }>({});
  const key = JSON.stringify(values);
  const complete = (action.fields ?? []).every(({ name, required }) => !required || values[name]);
  useEffect(() => {
    if (!complete || !action.preview) return undefined;
    const abort = new AbortController();
    const run = async (): Promise<void> => {
      try {
        state.value = { reply: await send(action.preview!(values), abort.signal) };
      } catch (error) {
        if (!abort.signal.aborted) state.value = { error: asError(error) };
      }
    };
    const timer = window.setTimeout(() => void run(), 300);
    return () => {
      window.clearTimeout(timer);
      abort.abort();
    };
  }, [key, complete]);
  if (!complete) return <p class="faint">Fill in the form to see a dry run.</p>;
  const { reply, error } = state.value;
  return (
    <div class="preview" aria-live="polite">
      <h3>Dry run</h3>
      {error ? <Problems of={error} /> : reply === undefined ? <Skeleton lines={2} /> : action.show?.(reply)}
    </div>
  );
}

function ActionForm({ action, close }: { action: Action; close: () => void }): JSX.Element {
  const fields = action.fields ?? [];
  const values = useSignal(initial(fields));
  const busy = useSignal(false);
  const outcome = useSignal<{ reply?: Reply; error?: ApiError }>({});
  const submit = async (event: Event): Promise<void> => {
    event.preventDefault();
    if (busy.value) return;
    busy.value = true;
    outcome.value = {};
    try {
      const reply = await send<Reply>(action.request(values.value));
      action.done?.(reply);
      if (action.result) outcome.value = { reply };
      else close();
    } catch (error) {
      outcome.value = { error: asError(error) };
    } finally {
      busy.value = false;
    }
  };
  if (outcome.value.reply !== undefined && action.result) {
    return (
      <div class="dialog-body">
        {action.result(outcome.value.reply)}
        <footer>
          <button type="button" class="button primary" onClick={close}>Close</button>
        </footer>
      </div>
    );
  }
  return (
    <form class="dialog-body" onSubmit={(event) => void submit(event)}>
      <div class="about">{action.about}</div>
      {fields.map((field) => <Input key={field.name} field={field} values={values} />)}
      {action.preview && <Preview action={action} values={values.value} />}
      {outcome.value.error && <Problems of={outcome.value.error} />}
      <details class="terminal">
        <summary>From a terminal</summary>
        <Commands cli={action.cli?.(values.value)} curl={curlOf(action.request(values.value))} />
      </details>
      <footer>
        <button type="button" class="button" onClick={close}>Back</button>
        <button type="submit" class={`button ${action.danger ? "danger" : "primary"}`} disabled={busy.value}>
          {busy.value ? "Working…" : (action.confirm ?? action.label)}
        </button>
      </footer>
    </form>
  );
}

export function Dialog({ title, close, children }: { title: string; close: () => void; children: ComponentChildren }): JSX.Element {
  const ref = useRef<HTMLDialogElement>(null);
  const id = useId();
  useEffect(() => {
    ref.current?.showModal();
  }, []);
  return (
    <dialog ref={ref} aria-labelledby={id} onClose={close} onCancel={close}>
      <header>
        <h2 id={id}>{title}</h2>
        <button type="button" class="icon-button" aria-label="Close" onClick={close}>
          <Icon name="close" />
        </button>
      </header>
      {children}
    </dialog>
  );
}

/** A button with its dialog, and beside it the same action for a terminal. */
export function ActionButton({ action }: { action: Action }): JSX.Element {
  const open = useSignal<"no" | "dialog" | "commands">("no");
  const close = (): void => void (open.value = "no");
  const allowed = may(action.scope);
  const reason = !allowed ? `Needs the scope ${action.scope}, which your role does not have` : action.blocked || undefined;
  const request = (): Request => action.request(initial(action.fields ?? []));
  return (
    <span class="split">
      <button type="button" class={`button ${action.primary ? "primary" : ""} ${action.danger ? "danger-quiet" : ""}`} disabled={Boolean(reason)} title={reason} onClick={() => (open.value = "dialog")}>
        {action.label}
      </button>
      <button type="button" class="button attached" title={`${action.label} from a terminal`} aria-label={`${action.label} from a terminal`} onClick={() => (open.value = "commands")}>
        <Icon name="terminal" />
      </button>
      {open.value === "dialog" && (
        <Dialog title={action.label} close={close}>
          <ActionForm action={action} close={close} />
        </Dialog>
      )}
      {open.value === "commands" && (
        <Dialog title={`${action.label} from a terminal`} close={close}>
          <div class="dialog-body">
            <Commands cli={action.cli?.(initial(action.fields ?? []))} curl={curlOf(request())} />
          </div>
        </Dialog>
      )}
    </span>
  );
}

export function Actions({ of }: { of: (Action | false | null | undefined)[] }): JSX.Element {
  return <>{of.filter((action): action is Action => Boolean(action)).map((action) => <ActionButton key={action.label} action={action} />)}</>;
}
