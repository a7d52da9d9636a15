// Values as text. Numbers are grouped by narrow spaces in the viewer's locale, times are in the viewer's zone.
import { signal } from "@preact/signals";
import { serverNow } from "../api/client";

/** Changes every ten seconds, so that relative times stay true. */
export const clock = signal(0);
window.setInterval(() => (clock.value += 1), 10_000);

const count = new Intl.NumberFormat();
const short = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });

export const number = (value: number | null | undefined): string => (value == null ? "–" : count.format(value));

export function rate(value: number | null | undefined): string {
  if (value == null) return "–";
  return `${value >= 100 ? count.format(Math.round(value)) : short.format(value)}/s`;
}

export const percent = (share: number): string => `${short.format(share * 100)} %`;

export function bytes(value: number | null | undefined): string {
  if (value == null) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  let size = value;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${short.format(size)} ${units[unit]}`;
}

export function duration(seconds: number | null | undefined): string {
  if (seconds == null || Number.isNaN(seconds)) return "–";
  if (seconds < 0.001) return "< 1 ms";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${short.format(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 172_800) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86_400)} d ${Math.floor((seconds % 86_400) / 3600)} h`;
}

export const secondsBetween = (from: string, to: string | null): number =>
  ((to ? Date.parse(to) : serverNow()) - Date.parse(from)) / 1000;

export function ago(at: string): string {
  const seconds = (serverNow() - Date.parse(at)) / 1000;
  const size = Math.abs(seconds);
  if (size < 5) return "now";
  const text =
    size < 60
      ? `${Math.floor(size)} s`
      : size < 3600
        ? `${Math.floor(size / 60)} min`
        : size < 86_400
          ? `${Math.floor(size / 3600)} h`
          : `${Math.floor(size / 86_400)} d`;
  return seconds < 0 ? `in ${text}` : `${text} ago`;
}

const local = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const hours = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });

export const localTime = (at: string): string => local.format(new Date(at));
export const localHour = (at: string): string => hours.format(new Date(at));
export const utcTime = (at: string): string => `${new Date(at).toISOString().replace("T", " ").replace(/\.\d+Z$/, "")} UTC`;

/** The start of an id, enough for a person to recognise it. Ids of one moment share their start, so the end is shown. */
export const shortId = (id: string): string => (id.length > 18 ? `${id.slice(0, 4)}…${id.slice(-6)}` : id);
