// Charts: throughput, histograms, results. uPlot is loaded with the first chart.
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import type uPlot from "uplot";
import { theme } from "../app/theme";
import { number } from "./format";

export interface Series {
  label: string;
  tone: "good" | "bad" | "live" | "warn" | "idle";
  values: (number | null)[];
}

interface ChartProps {
  label: string;
  x: number[];
  series: Series[];
  height?: number;
  kind?: "bars" | "line";
  /** X values are times in seconds; otherwise they are plain numbers, or positions of `names`. */
  time?: boolean;
  names?: string[];
}

const colour = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Stacks series on each other, as a stacked bar chart needs it; the last one is drawn first. */
function stacked(series: Series[]): (number | null)[][] {
  const sums: number[] = [];
  return series.map(({ values }) => values.map((value, at) => (sums[at] = (sums[at] ?? 0) + (value ?? 0)))).reverse();
}

function optionsOf(props: ChartProps, width: number, bars: uPlot.Series.PathBuilder | undefined): uPlot.Options {
  const faint = colour("faint");
  const line = colour("line");
  const axis = { stroke: faint, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: '11px "Inter", sans-serif' };
  const reversed = [...props.series].reverse();
  const names = props.names;
  return {
    width,
    height: props.height ?? 150,
    cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
    legend: { show: false },
    padding: [8, 6, 0, 0],
    scales: { x: { time: props.time ?? false }, y: { range: (_plot, _low, high) => [0, Math.max(high * 1.08, 1)] } },
    axes: [
      { ...axis, grid: { show: false }, ...(names ? { values: (_plot: uPlot, splits: number[]) => splits.map((at) => names[at] ?? "") } : {}) },
      { ...axis, size: 44, values: (_plot, splits) => splits.map((value) => (Number.isInteger(value) ? number(value) : "")) },
    ],
    series: [
      {},
      ...reversed.map(({ label, tone }) => ({
        label,
        stroke: colour(`${tone}-mark`),
        width: props.kind === "line" ? 1.6 : 0,
        points: { show: false },
        ...(props.kind === "line" ? {} : { fill: colour(`${tone}-mark`) }),
        ...(bars && props.kind !== "line" ? { paths: bars } : {}),
      })),
    ],
  };
}

export function Chart(props: ChartProps): JSX.Element {
  const holder = useRef<HTMLDivElement>(null);
  const content = JSON.stringify([props.x, props.series, theme.value]);
  useEffect(() => {
    let plot: uPlot | undefined;
    let gone = false;
    const size = new ResizeObserver(([entry]) => plot?.setSize({ width: entry!.contentRect.width, height: props.height ?? 150 }));
    const draw = async (): Promise<void> => {
      const { default: Plot } = await import("uplot");
      if (gone || !holder.current) return;
      const data = [props.x, ...(props.kind === "line" ? [...props.series].reverse().map(({ values }) => values) : stacked(props.series))];
      const paths = Plot.paths.bars?.({ size: [0.75, 40], align: props.names ? 0 : 1 });
      plot = new Plot(optionsOf(props, holder.current.clientWidth || 300, paths), data as uPlot.AlignedData, holder.current);
      size.observe(holder.current);
    };
    void draw();
    return () => {
      gone = true;
      size.disconnect();
      plot?.destroy();
    };
  }, [content]);
  const last = props.series.map(({ label, values }) => `${label}: ${number(values.reduce<number>((sum, value) => sum + (value ?? 0), 0))}`);
  return <div class="chart" ref={holder} style={{ minHeight: `${props.height ?? 150}px` }} role="img" aria-label={`${props.label}. ${last.join(", ")}`} />;
}

export function Legend({ of }: { of: [tone: string, label: string][] }): JSX.Element {
  return (
    <div class="legend">
      {of.map(([tone, label]) => <span key={label} class={tone}>{label}</span>)}
    </div>
  );
}

/** The parts of a whole, as one bar. */
export function Bar({ parts, of, label, tall }: { parts: [tone: string, value: number][]; of: number; label: string; tall?: boolean }): JSX.Element {
  const whole = Math.max(of, 1);
  return (
    <div class={tall ? "bar tall" : "bar"} role="img" aria-label={label} title={label}>
      {parts.filter(([, value]) => value > 0).map(([tone, value]) => <i key={tone} class={tone} style={{ width: `${(value / whole) * 100}%` }} />)}
    </div>
  );
}
