// Tables and pages of them. A page holds what the server sent: sorting and counting are not done in the browser.
import { useLocation } from "preact-iso";
import type { ComponentChildren, JSX } from "preact";
import type { Loaded } from "../api/use";
import { Empty, ErrorNote, Skeleton } from "./basics";

export interface Column<Row> {
  head: string;
  cell: (row: Row) => ComponentChildren;
  /** Right-aligned, so that digits line up. */
  num?: boolean;
  /** Hidden on narrow screens. */
  wide?: boolean;
  /** Takes the rest of the width; long text is cut, and complete on hover. */
  grow?: boolean;
}

interface TableProps<Row> {
  label: string;
  columns: Column<Row>[];
  rows: Row[];
  rowKey: (row: Row) => string;
  empty?: ComponentChildren;
}

const classOf = ({ num, wide, grow }: Column<never>): string =>
  [num && "num", wide && "wide", grow && "grow"].filter(Boolean).join(" ");

export function Table<Row>({ label, columns, rows, rowKey, empty }: TableProps<Row>): JSX.Element {
  if (!rows.length) return <>{empty ?? <Empty title="Nothing here." />}</>;
  return (
    <div class="table-scroll" tabIndex={0} role="region" aria-label={label}>
      <table aria-label={label}>
        <thead>
          <tr>
            {columns.map((column) => (
              <th key={column.head} class={classOf(column)} scope="col">
                {column.head}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={rowKey(row)} data-row>
              {columns.map((column) => (
                <td key={column.head} class={classOf(column)}>
                  {column.cell(row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** Returns the query of the current URL with some parameters replaced; null removes one. */
export function useQuery(): { query: Record<string, string>; href: (change: Record<string, string | null>) => string; set: (change: Record<string, string | null>) => void } {
  const { path, query, route } = useLocation();
  const href = (change: Record<string, string | null>): string => {
    const next = new URLSearchParams(query);
    for (const [name, value] of Object.entries(change)) {
      if (value) next.set(name, value);
      else next.delete(name);
    }
    const text = next.toString();
    return text ? `${path}?${text}` : path;
  };
  return { query, href, set: (change) => route(href(change)) };
}

interface PagedProps<Page, Row> extends Omit<TableProps<Row>, "rows"> {
  of: Loaded<Page>;
  rows: (page: Page) => Row[];
  /** The name of the cursor in the URL, where a page shows several lists. */
  cursor?: string;
}

/** A page of a list, with links to the next one and back to the first. */
export function PagedTable<Page extends { next_cursor?: string | null }, Row>({ of, rows, cursor = "cursor", ...table }: PagedProps<Page, Row>): JSX.Element {
  const { query, href } = useQuery();
  const next = of.data?.next_cursor;
  return (
    <>
      <ErrorNote of={of} />
      {of.data ? <Table {...table} rows={rows(of.data)} /> : !of.error && <Skeleton lines={6} />}
      {(next || query[cursor]) && (
        <nav class="pager" aria-label={`Pages of ${table.label}`}>
          {query[cursor] ? <a href={href({ [cursor]: null })}>First page</a> : <span />}
          {next && <a href={href({ [cursor]: next })}>Next page</a>}
        </nav>
      )}
    </>
  );
}

interface Filter {
  name: string;
  label: string;
  options?: string[];
  placeholder?: string;
  type?: "text" | "datetime-local" | "number";
}

/** Filters of a list. They live in the URL, so that a filtered page can be shared. */
export function Filters({ of }: { of: Filter[] }): JSX.Element {
  const { query, set } = useQuery();
  const change = (name: string) => (event: Event) =>
    set({ [name]: (event.currentTarget as HTMLInputElement).value.trim() || null, cursor: null });
  const active = of.filter(({ name }) => query[name]);
  return (
    <form class="filters" role="search" aria-label="Filters" onSubmit={(event) => event.preventDefault()}>
      {of.map(({ name, label, options, placeholder, type }) => (
        <label key={name}>
          <span>{label}</span>
          {options ? (
            <select name={name} value={query[name] ?? ""} onChange={change(name)}>
              <option value="">Any</option>
              {options.map((option) => (
                <option key={option} value={option}>
                  {option}
                </option>
              ))}
            </select>
          ) : (
            <input name={name} type={(type ?? "text") as "text"} value={query[name] ?? ""} placeholder={placeholder ?? ""} onChange={change(name)} autocomplete="off" spellcheck={false} />
          )}
        </label>
      ))}
      {active.length > 0 && (
        <button type="button" class="link" onClick={() => set(Object.fromEntries([...active.map(({ name }) => [name, null]), ["cursor", null]]))}>
          Clear filters
        </button>
      )}
    </form>
  );
}
