// The one live stream of an open page. A hidden tab closes it.
import { signal } from "@preact/signals";
import { offline, sessionEnded } from "./client";
import type { LiveUpdate } from "./types";

/** The last update of the stream; null before the first one. */
export const live = signal<LiveUpdate | null>(null);
export const connected = signal(false);

const LONGEST_PAUSE_SECONDS = 15;
let source: EventSource | null = null;
let retry: number | undefined;
let pause = 1;

function close(): void {
  window.clearTimeout(retry);
  source?.close();
  source = null;
  connected.value = false;
}

function open(): void {
  close();
  if (document.hidden || sessionEnded.value) return;
  source = new EventSource("/v1/live");
  source.addEventListener("open", () => {
    connected.value = true;
    offline.value = false;
    pause = 1;
  });
  source.addEventListener("overview", (event) => {
    live.value = JSON.parse((event as MessageEvent<string>).data) as LiveUpdate;
  });
  source.addEventListener("end", () => {
    close();
    sessionEnded.value = true;
  });
  source.addEventListener("error", () => {
    close();
    retry = window.setTimeout(open, pause * 1000);
    pause = Math.min(pause * 2, LONGEST_PAUSE_SECONDS);
  });
}

/** Opens the stream after a sign-in, and keeps it open while the tab is visible. */
export function followLive(): () => void {
  document.addEventListener("visibilitychange", open);
  open();
  return () => {
    document.removeEventListener("visibilitychange", open);
    close();
  };
}
