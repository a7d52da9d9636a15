// The difference of two texts, line by line.
import type { JSX } from "preact";

type Line = [sign: " " | "+" | "-", text: string];

const LONGEST = 2000;

/** Returns the lines of both texts, by their longest common subsequence. */
export function diff(before: string, after: string): Line[] {
  const old = before.split("\n").slice(0, LONGEST);
  const now = after.split("\n").slice(0, LONGEST);
  const common = Array.from({ length: old.length + 1 }, () => new Uint16Array(now.length + 1));
  for (let i = old.length - 1; i >= 0; i -= 1) {
    for (let j = now.length - 1; j >= 0; j -= 1) {
      common[i]![j] = old[i] === now[j] ? common[i + 1]![j + 1]! + 1 : Math.max(common[i + 1]![j]!, common[i]![j + 1]!);
    }
  }
  const lines: Line[] = [];
  let i = 0;
  let j = 0;
  while (i < old.length || j < now.length) {
    if (i < old.length && j < now.length && old[i] === now[j]) {
      lines.push([" ", old[i]!]);
      i += 1;
      j += 1;
    } else if (j < now.length && (i === old.length || common[i]![j + 1]! >= common[i + 1]![j]!)) lines.push(["+", now[j++]!]);
    else lines.push(["-", old[i++]!]);
  }
  return lines;
}

const CONTEXT = 3;

export function Diff({ before, after, label }: { before: string; after: string; label: string }): JSX.Element {
  const lines = diff(before, after);
  const near = (at: number): boolean => lines.slice(Math.max(at - CONTEXT, 0), at + CONTEXT + 1).some(([sign]) => sign !== " ");
  if (lines.every(([sign]) => sign === " ")) return <p class="faint">No difference.</p>;
  return (
    <div class="diff" tabIndex={0} role="region" aria-label={label}>
      {lines.map(([sign, text], at) =>
        near(at) ? <span key={at} class={sign === "+" ? "plus" : sign === "-" ? "minus" : ""}>{sign} {text}</span> : near(at - 1) ? <span key={at} class="faint">…</span> : null,
      )}
    </div>
  );
}

export const pretty = (value: unknown): string => (value === null || value === undefined ? "" : JSON.stringify(value, null, 2));
