// The same action as a command line and as a curl call.
import type { JSX } from "preact";
import { pathOf, type Request } from "../api/client";
import { CopyButton } from "./basics";

const PLAIN = /^[A-Za-z0-9_./:@%+,=-]+$/;

/** Quotes a word for a POSIX shell. */
export const quoted = (word: string): string => (PLAIN.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/** A command line of words, each quoted if it needs to be. Options without a value are left out. */
export function commandLine(words: string[], options: Record<string, string | number | boolean | null | undefined> = {}): string {
  const flags = Object.entries(options).flatMap(([name, value]) => {
    if (value === null || value === undefined || value === "" || value === false) return [];
    const flag = `--${name.replaceAll("_", "-")}`;
    return value === true ? [flag] : [flag, quoted(String(value))];
  });
  return ["interlock", ...words.map(quoted), ...flags].join(" ");
}

export function curlOf(request: Request): string {
  const lines = [`curl -X ${request.method} ${quoted(location.origin + pathOf(request.path, request.query))}`];
  lines.push(`-H "Authorization: Bearer $INTERLOCK_API_KEY"`);
  if (request.body !== undefined) lines.push("-H 'Content-Type: application/json'", `-d ${quoted(JSON.stringify(request.body))}`);
  if (request.text !== undefined) lines.push("-H 'Content-Type: text/plain'", `--data-binary ${quoted(request.text)}`);
  return lines.join(" \\\n  ");
}

export function Commands({ cli, curl }: { cli: string | undefined; curl: string }): JSX.Element {
  return (
    <div class="commands">
      {[["Command line", cli], ["curl", curl]].map(
        ([label, text]) =>
          text && (
            <div key={label}>
              <span>
                {label} <CopyButton text={text} label={`Copy as ${label}`} />
              </span>
              <pre tabIndex={0} aria-label={label}>{text}</pre>
            </div>
          ),
      )}
    </div>
  );
}
