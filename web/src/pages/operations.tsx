import type { JSX } from "preact";
import type { BulkFilter, BulkView } from "../api/types";
import { useGet } from "../api/use";
import { operationLink } from "../app/links";
import { useTitle } from "../app/title";
import { Badge, Empty, Header, Panel, Time } from "../ui/basics";
import { Bar } from "../ui/charts";
import { number, percent } from "../ui/format";
import { Filters, PagedTable, useQuery } from "../ui/table";
import { failedFirst, PAGE } from "./runs";

export const filterText = (filter: BulkFilter): string =>
  Object.entries(filter).filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ");

export default function OperationsPage(): JSX.Element {
  useTitle("Bulk operations");
  const { query } = useQuery();
  const operations = useGet<{ operations: BulkView[]; next_cursor: string | null }>("/v1/bulk-operations", { query: { state: query.state, cursor: query.cursor, limit: PAGE }, every: 5 });
  return (
    <>
      <Header title="Bulk operations"><p class="faint">Actions on all tasks or runs that match a filter, and the record of who asked for them. Start one on the pages of tasks, runs and jobs.</p></Header>
      <Filters of={[{ name: "state", label: "State", options: ["Running", "Failed", "Canceled", "Completed"] }]} />
      <Panel flush>
        <PagedTable label="Bulk operations" of={operations} rows={(page) => failedFirst(page.operations)} rowKey={(row) => row.operation_id} empty={<Empty title="No bulk operations yet." />} columns={[
          { head: "Operation", cell: (row) => <a href={operationLink(row.operation_id)}>{row.kind}</a> },
          { head: "State", cell: (row) => <Badge state={row.state} /> },
          { head: "On", grow: true, cell: (row) => <span title={filterText(row.filter)}>{row.unit}: {filterText(row.filter)}</span> },
          { head: "Changed", num: true, cell: (row) => number(row.changed) },
          { head: "Progress", wide: true, cell: (row) => <Bar of={1} label={percent(row.progress ?? (row.ended_at ? 1 : 0))} parts={[[row.ended_at ? "good" : "live", row.progress ?? (row.ended_at ? 1 : 0)]]} /> },
          { head: "By", wide: true, cell: (row) => row.requested_by },
          { head: "Asked", num: true, cell: (row) => <Time at={row.created_at} /> },
        ]} />
      </Panel>
    </>
  );
}
