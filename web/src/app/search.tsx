// The search box: any id, the start of an id or of a name.
import { useSignal } from "@preact/signals";
import { useLocation } from "preact-iso";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { get } from "../api/client";
import type { SearchHit } from "../api/types";
import { Icon } from "../ui/icons";
import { linkTo } from "./links";

const PAUSE_MS = 180;

const hrefOf = ({ kind, id, name }: SearchHit): string => linkTo(kind, kind === "dag" ? (name ?? id) : id);

export function SearchBox(): JSX.Element {
  const { route, url } = useLocation();
  const text = useSignal("");
  const hits = useSignal<SearchHit[] | null>(null);
  const failed = useSignal("");
  const chosen = useSignal(0);
  const form = useRef<HTMLFormElement>(null);
  useEffect(() => {
    text.value = "";
    hits.value = null;
  }, [url]);
  const query = text.value.trim();
  useEffect(() => {
    if (!query) {
      hits.value = null;
      return undefined;
    }
    const abort = new AbortController();
    const find = async (): Promise<void> => {
      try {
        hits.value = (await get<{ hits: SearchHit[] }>("/v1/search", { q: query }, abort.signal)).hits;
        failed.value = "";
        chosen.value = 0;
      } catch (error) {
        if (abort.signal.aborted) return;
        hits.value = [];
        failed.value = error instanceof Error ? error.message : String(error);
      }
    };
    const timer = window.setTimeout(() => void find(), PAUSE_MS);
    return () => {
      window.clearTimeout(timer);
      abort.abort();
    };
  }, [query]);
  const open = (hit: SearchHit | undefined): void => {
    if (!hit) return;
    form.current?.querySelector("input")?.blur();
    route(hrefOf(hit));
  };
  const press = (event: KeyboardEvent): void => {
    const last = (hits.value?.length ?? 0) - 1;
    if (event.key === "ArrowDown") chosen.value = Math.min(chosen.value + 1, last);
    else if (event.key === "ArrowUp") chosen.value = Math.max(chosen.value - 1, 0);
    else if (event.key === "Escape") {
      text.value = "";
      (event.currentTarget as HTMLElement).blur();
    } else return;
    event.preventDefault();
  };
  const shown = hits.value !== null;
  return (
    <form class="search" ref={form} role="search" aria-label="Everything" onSubmit={(event) => { event.preventDefault(); open(hits.value?.[chosen.value]); }}>
      <Icon name="search" />
      <input id="search" type="search" placeholder="Search an id or a name" aria-label="Search an id or a name" role="combobox" list={undefined} aria-expanded={shown} aria-controls="search-hits" aria-autocomplete="list"
        aria-activedescendant={shown && hits.value!.length ? `hit-${chosen.value}` : undefined}
        autocomplete="off" spellcheck={false} value={text.value} onInput={(event) => (text.value = event.currentTarget.value)} onKeyDown={press} />
      <kbd>/</kbd>
      <div id="search-hits" class="hits" role="listbox" aria-label="Results" hidden={!shown}>
        {hits.value?.map((hit, index) => (
          <a key={hit.kind + hit.id} id={`hit-${index}`} role="option" aria-selected={index === chosen.value} href={hrefOf(hit)}>
            <span class="hit-kind">{hit.kind}</span> <span class="hit-name">{hit.name || hit.id}</span> <span class="faint">{hit.detail}</span>
          </a>
        ))}
        {shown && !hits.value!.length && <p role="option" aria-selected={false} class="faint">{failed.value || `Nothing has the id or the name “${query}”.`}</p>}
      </div>
    </form>
  );
}
