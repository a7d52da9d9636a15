// Requests to the gateway. A request that fails because the session ended waits for the next sign-in, and is sent again.
import { signal } from "@preact/signals";
import type { Problem, Session } from "./types";

export type Method = "GET" | "POST" | "PUT" | "DELETE";
export type Query = Record<string, string | number | boolean | null | undefined>;

export interface Request {
  method: Method;
  path: string;
  query?: Query;
  body?: unknown;
  /** Sent instead of JSON. */
  text?: string;
}

/** Null before the first sign-in. */
export const session = signal<Session | null>(null);
/** True while a page is open whose session has ended. */
export const sessionEnded = signal(false);
export const offline = signal(false);

let serverAheadMs = 0;
let signedInAgain: (() => void)[] = [];

/** The time of the server, also where the clock of the browser is wrong. */
export function serverNow(): number {
  return Date.now() + serverAheadMs;
}

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly problem: Partial<Problem>,
  ) {
    super(message);
  }
}

export function pathOf(path: string, query: Query = {}): string {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  if (!given.length) return path;
  return `${path}?${new URLSearchParams(given.map(([name, value]) => [name, String(value)]))}`;
}

export function adopt(next: Session | null): void {
  session.value = next;
  if (!next) return;
  serverAheadMs = Date.parse(next.server_time) - Date.now();
  sessionEnded.value = false;
  for (const resume of signedInAgain.splice(0)) resume();
}

async function problemOf(reply: Response): Promise<ApiError> {
  let problem: Partial<Problem> = {};
  try {
    problem = (await reply.json()) as Partial<Problem>;
  } catch {
    problem = { title: reply.statusText };
  }
  const detail = problem.detail || problem.title || `The server answered with status ${reply.status}.`;
  return new ApiError(reply.status, problem.code ?? String(reply.status), detail, problem);
}

function optionsOf(request: Request, abort?: AbortSignal): RequestInit {
  const headers: Record<string, string> = { Accept: "application/json" };
  if (request.method !== "GET" && session.value) headers["X-Interlock-CSRF"] = session.value.csrf;
  if (request.body !== undefined) headers["Content-Type"] = "application/json";
  if (request.text !== undefined) headers["Content-Type"] = "text/plain";
  return {
    method: request.method,
    headers,
    body: request.text ?? (request.body === undefined ? null : JSON.stringify(request.body)),
    signal: abort ?? null,
  };
}

async function reach(request: Request, abort?: AbortSignal): Promise<Response> {
  try {
    const reply = await fetch(pathOf(request.path, request.query), optionsOf(request, abort));
    offline.value = false;
    return reply;
  } catch (error) {
    if (abort?.aborted) throw error;
    offline.value = true;
    throw new ApiError(0, "unreachable", "The server does not answer. The page tries again by itself.", {});
  }
}

function nextSignIn(): Promise<void> {
  sessionEnded.value = true;
  return new Promise((resolve) => signedInAgain.push(resolve));
}

/** Sends a request. If the session has ended, the request waits for the next sign-in and is then repeated. */
export async function send<Reply>(request: Request, abort?: AbortSignal): Promise<Reply> {
  for (;;) {
    const reply = await reach(request, abort);
    if (reply.status === 401 && session.value) {
      await nextSignIn();
      continue;
    }
    if (!reply.ok) throw await problemOf(reply);
    return (reply.status === 204 ? null : await reply.json()) as Reply;
  }
}

export function get<Reply>(path: string, query: Query = {}, abort?: AbortSignal): Promise<Reply> {
  return send({ method: "GET", path, query }, abort);
}

/** Sends a request of the sign-in page, where 401 means that the credential is wrong. */
export async function signIn(path: string, body: unknown): Promise<void> {
  const reply = await reach({ method: "POST", path, body });
  if (!reply.ok) throw await problemOf(reply);
  adopt((await reply.json()) as Session);
}

/** Loads the session of the cookie. Without one, the sign-in page follows. */
export async function loadSession(): Promise<void> {
  const reply = await reach({ method: "GET", path: "/v1/session" });
  if (reply.ok) adopt((await reply.json()) as Session);
  else if (reply.status === 401 && session.value) sessionEnded.value = true;
  else if (reply.status !== 401) throw await problemOf(reply);
}

export async function signOut(): Promise<void> {
  await reach({ method: "DELETE", path: "/v1/session" });
  location.assign("/ui/");
}

export function may(scope: string | undefined): boolean {
  return !scope || (session.value?.scopes.includes(scope) ?? false);
}
