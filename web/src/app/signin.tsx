// Sign-in: as a page before the first request, and over a page whose session has ended.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { ApiError, get, session, signIn } from "../api/client";
import type { SignInMethods } from "../api/types";
import { Note } from "../ui/basics";

const FAILURES: Record<string, string> = {
  bad_token: "The identity provider's token could not be verified.",
  not_a_member: "You are signed in at the identity provider, but you are a member of no org here. Ask an admin to add you.",
  login_expired: "The sign-in took too long. Start again.",
  provider_refused: "The identity provider refused the sign-in.",
  link_used: "This sign-in link has been used, or has expired. `interlock open` prints a new one.",
};

/** Takes the one-time token, or the failure of an identity provider, out of the address. */
function takeFragment(): { token?: string; failure?: string } {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const token = fragment.get("sign-in");
  const failure = fragment.get("sign-in-failed");
  if (token || failure) history.replaceState(null, "", location.pathname + location.search);
  return { ...(token ? { token } : {}), ...(failure ? { failure } : {}) };
}

export const arrival = takeFragment();

export function SignInForm(): JSX.Element {
  const key = useSignal("");
  const busy = useSignal(false);
  const problem = useSignal(arrival.failure ? (FAILURES[arrival.failure] ?? arrival.failure) : "");
  const methods = useSignal<SignInMethods | null>(null);
  const input = useRef<HTMLInputElement>(null);
  const enter = async (path: string, body: unknown): Promise<void> => {
    busy.value = true;
    problem.value = "";
    try {
      await signIn(path, body);
    } catch (error) {
      const code = error instanceof ApiError ? error.code : "";
      problem.value = FAILURES[code] ?? (error instanceof Error ? error.message : String(error));
      input.current?.focus();
    } finally {
      busy.value = false;
    }
  };
  useEffect(() => {
    input.current?.focus();
    get<SignInMethods>("/v1/sign-in").then((reply) => (methods.value = reply), () => undefined);
    const { token } = arrival;
    delete arrival.token;
    if (token) void enter("/v1/sign-in/link", { token });
  }, []);
  const back = encodeURIComponent(location.pathname + location.search);
  return (
    <form class="sign-in" onSubmit={(event) => { event.preventDefault(); void enter("/v1/sign-in/key", { key: key.value.trim() }); }}>
      {problem.value && <Note tone="bad">{problem.value}</Note>}
      <label class="field">
        <span>API key</span>
        <input ref={input} name="key" type="password" autocomplete="current-password" placeholder="ilk_…" required value={key.value} onInput={(event) => (key.value = event.currentTarget.value)} />
      </label>
      <button type="submit" class="button primary" disabled={busy.value}>
        {busy.value ? "Signing in…" : "Sign in"}
      </button>
      {methods.value?.oidc && (
        <a class="button" href={`${methods.value.oidc_url}?return_to=${back}`} target="_self" rel="external">
          Sign in with your identity provider
        </a>
      )}
      <p class="faint">
        On this machine, <code>interlock open</code> opens the page signed in. The key is exchanged for a session and is not kept.
      </p>
    </form>
  );
}

export function SignInPage(): JSX.Element {
  return (
    <main class="sign-in-page">
      <div class="sign-in-card">
        <h1>
          <span class="mark" aria-hidden="true" /> Interlock
        </h1>
        <SignInForm />
      </div>
    </main>
  );
}

/** The sign-in over a page whose session has ended: forms keep what was typed, and waiting requests are sent afterwards. */
export function SignInAgain(): JSX.Element {
  const ref = useRef<HTMLDialogElement>(null);
  useEffect(() => ref.current?.showModal(), []);
  return (
    <dialog ref={ref} class="sign-in-again" aria-label="Sign in again" onCancel={(event) => event.preventDefault()}>
      <div class="dialog-body">
        <h2>Your session has ended</h2>
        <p>Sign in again as {session.value?.user} to continue. Nothing on this page is lost.</p>
        <SignInForm />
      </div>
    </dialog>
  );
}
