// A layered graph. The layout is computed in a web worker, which is loaded only where a graph is shown.
import { useSignal } from "@preact/signals";
import type { ElkExtendedEdge, ElkNode } from "elkjs/lib/elk-api";
import { useLocation } from "preact-iso";
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { Note, Skeleton } from "./basics";

export interface GraphNode {
  id: string;
  title: string;
  sub?: string;
  href?: string;
  tone?: string;
}

export interface GraphEdge {
  from: string;
  to: string;
  label?: string;
  tone?: string;
}

const LIMIT = 26;
const cut = (text: string): string => (text.length > LIMIT ? `${text.slice(0, LIMIT - 1)}…` : text);
const widthOf = ({ title, sub }: GraphNode): number => Math.max(110, 7.4 * Math.min(Math.max(title.length, (sub ?? "").length * 0.92), LIMIT) + 26);

async function layout(nodes: GraphNode[], edges: GraphEdge[]): Promise<ElkNode> {
  const [{ default: Elk }, { default: worker }] = await Promise.all([import("elkjs/lib/elk-api.js"), import("elkjs/lib/elk-worker.min.js")]);
  const elk = new Elk({ workerUrl: worker as unknown as string });
  try {
    return await elk.layout({
      id: "root",
      layoutOptions: { "elk.algorithm": "layered", "elk.direction": "RIGHT", "elk.layered.spacing.nodeNodeBetweenLayers": "56", "elk.spacing.nodeNode": "22", "elk.edgeRouting": "SPLINES" },
      children: nodes.map((node) => ({ id: node.id, width: widthOf(node), height: node.sub ? 48 : 34 })),
      edges: edges.map(({ from, to }, at) => ({ id: String(at), sources: [from], targets: [to] })),
    });
  } finally {
    elk.terminateWorker();
  }
}

function pathOf(edge: ElkExtendedEdge): string {
  return (edge.sections ?? [])
    .map(({ startPoint, bendPoints = [], endPoint }) => {
      const points = [...bendPoints, endPoint].map(({ x, y }) => `${x} ${y}`);
      const curve = points.length % 3 === 0 ? `C ${points.join(", ")}` : points.map((point) => `L ${point}`).join(" ");
      return `M ${startPoint.x} ${startPoint.y} ${curve}`;
    })
    .join(" ");
}

function Drawing({ nodes, edges, drawn, label }: { nodes: GraphNode[]; edges: GraphEdge[]; drawn: ElkNode; label: string }): JSX.Element {
  const { route } = useLocation();
  const width = (drawn.width ?? 0) + 16;
  const height = (drawn.height ?? 0) + 16;
  const open = (event: Event, href: string): void => {
    event.preventDefault();
    route(href);
  };
  const byId = new Map(nodes.map((node) => [node.id, node]));
  return (
    <div class="graph" tabIndex={0} role="region" aria-label={label}>
      <svg width={width} height={height} viewBox={`-8 -8 ${width} ${height}`}>
        {(drawn.edges ?? []).map((edge) => {
          const { tone, label: text } = edges[Number(edge.id)]!;
          const end = edge.sections?.[0]?.endPoint;
          return (
            <g key={edge.id}>
              <path class={`edge ${tone ?? ""}`} d={pathOf(edge)}>{text && <title>{text}</title>}</path>
              {end && <path class="tip" d={`M ${end.x} ${end.y} l -7 -3.5 v 7 z`} />}
            </g>
          );
        })}
        {(drawn.children ?? []).map(({ id, x, y, width: w, height: h }) => {
          const { title, sub, href, tone } = byId.get(id)!;
          const box = (
            <g class={`node ${tone ?? ""}`} transform={`translate(${x} ${y})`}>
              <title>{[title, sub].filter(Boolean).join(" ")}</title>
              <rect width={w} height={h} rx="7" />
              <text x="13" y={sub ? 20 : 22}>{cut(title)}</text>
              {sub && <text class="sub" x="13" y="36">{cut(sub)}</text>}
            </g>
          );
          return href ? <a key={id} href={href} onClick={(event) => open(event, href)}>{box}</a> : <g key={id}>{box}</g>;
        })}
      </svg>
    </div>
  );
}

export function Graph({ nodes, edges, label }: { nodes: GraphNode[]; edges: GraphEdge[]; label: string }): JSX.Element {
  const drawn = useSignal<ElkNode | null>(null);
  const failed = useSignal("");
  const shape = JSON.stringify([nodes.map(({ id, title, sub }) => [id, title, sub]), edges.map(({ from, to }) => [from, to])]);
  useEffect(() => {
    let gone = false;
    layout(nodes, edges).then(
      (result) => void (gone || (drawn.value = result)),
      (error: unknown) => void (failed.value = String(error)),
    );
    return () => void (gone = true);
  }, [shape]);
  const fits = drawn.value && drawn.value.children?.every(({ id }) => nodes.some((node) => node.id === id)) && (drawn.value.edges?.length ?? 0) === edges.length;
  if (failed.value) return <Note tone="warn" title="The graph could not be drawn.">{failed.value}</Note>;
  return fits ? <Drawing nodes={nodes} edges={edges} drawn={drawn.value!} label={label} /> : <Skeleton lines={5} />;
}
