// Line icons on a grid of 16.
import type { JSX } from "preact";

const PATHS = {
  overview: "M2.500 2.500h4.500v5h-4.500z M9 2.500h4.500v3h-4.500z M9 7.500h4.500v6h-4.500z M2.500 9.500h4.500v4h-4.500z",
  runs: "M4.500 3l8 5-8 5z",
  tasks: "M2.500 4l1.200 1.200L5.800 3 M8 4h5.500 M2.500 8.200l1.200 1.200 2.100-2.200 M8 8.200h5.500 M2.500 12.400l1.200 1.200 2.100-2.200 M8 12.400h5.500",
  operations: "M2.500 5h8l-2-2 M13.500 11h-8l2 2",
  dags: "M2 6h4v4H2z M10 2h4v4h-4z M10 10h4v4h-4z M6 8h2 M10 4H8v8h2",
  backfills: "M2.500 3h3v3h-3z M6.500 3h3v3h-3z M10.500 3h3v3h-3z M2.500 7h3v3h-3z M6.500 7h3v3h-3z M2.500 11h3v2.500h-3z",
  datasets: "M2.500 4c0-2.700 11-2.700 11 0v8c0 2.700-11 2.700-11 0z M2.500 4c0 2.700 11 2.700 11 0 M2.500 8c0 2.700 11 2.700 11 0",
  sql: "M5 4L1.500 8 5 12 M11 4l3.500 4L11 12 M9.200 3L6.800 13",
  queues: "M2.500 3.500h11 M2.500 8h11 M2.500 12.500h6",
  bus: "M8 8m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0 M2 8h4 M10 8h4 M8 2v4 M8 10v4",
  alerts: "M8 2a4 4 0 0 1 4 4c0 4 1.500 5 1.500 5h-11S4 10 4 6a4 4 0 0 1 4-4z M6.500 13.500h3",
  access: "M10.500 5.500m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0 M8.300 7.700L2.500 13.500 M4.500 11.500l2 2",
  search: "M7 7m-4.500 0a4.500 4.500 0 1 0 9 0a4.500 4.500 0 1 0-9 0 M10.500 10.500L14 14",
  copy: "M5.500 5.500h8v8h-8z M10.500 5.500v-3h-8v8h3",
  check: "M3 8.500L6.500 12 13 4.500",
  alert: "M8 2L14.500 13.500h-13z M8 6.500v3.500 M8 11.800v.2",
  info: "M8 8m-6 0a6 6 0 1 0 12 0a6 6 0 1 0-12 0 M8 7.200v4 M8 4.900v.2",
  close: "M4 4l8 8 M12 4l-8 8",
  menu: "M2.500 4.500h11 M2.500 8h11 M2.500 11.500h11",
  down: "M4 6l4 4 4-4",
  right: "M6 4l4 4-4 4",
  terminal: "M2.500 4l4 4-4 4 M8 12h5.500",
  sun: "M8 8m-2.800 0a2.800 2.800 0 1 0 5.600 0a2.800 2.800 0 1 0-5.600 0 M8 1.500v1.500 M8 13v1.500 M1.500 8H3 M13 8h1.500 M3.400 3.400l1 1 M11.600 11.600l1 1 M3.400 12.600l1-1 M11.600 4.400l1-1",
  moon: "M13 9.500A5.500 5.500 0 0 1 6.500 3a5.500 5.500 0 1 0 6.500 6.500z",
  user: "M8 5.500m-2.500 0a2.500 2.500 0 1 0 5 0a2.500 2.500 0 1 0-5 0 M3 13.500c0-5 10-5 10 0",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }): JSX.Element {
  return (
    <svg class="icon" viewBox="0 0 16 16" width="16" height="16" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}
