import { useRoute } from "preact-iso";
import type { JSX } from "preact";
import type { BulkView } from "../api/types";
import { useGet } from "../api/use";
import { runLink, tasksLink } from "../app/links";
import { useTitle } from "../app/title";
import { Actions } from "../ui/action";
import { Badge, Facts, Header, Id, Load, Note, Panel, Stat, Time } from "../ui/basics";
import { Bar } from "../ui/charts";
import { commandLine } from "../ui/commands";
import { number, percent } from "../ui/format";
import { filterText } from "./operations";

const given = (view: BulkView): Record<string, string> =>
  Object.fromEntries(Object.entries(view.filter).filter((entry): entry is [string, string] => typeof entry[1] === "string"));

export default function OperationPage(): JSX.Element {
  const id = useRoute().params.id!;
  const path = `/v1/bulk-operations/${encodeURIComponent(id)}`;
  const operation = useGet<BulkView>(path, { every: (data) => (data?.ended_at ? 0 : 1) });
  useTitle(`Operation ${operation.data?.kind ?? ""}`);
  return (
    <Load of={operation}>
      {(view) => (
        <>
          <Header kind="Bulk operation" title={`${view.kind} ${view.unit}`} state={<Badge state={view.state} />}
            actions={<Actions of={[{
              label: "Cancel", danger: true, scope: "tasks:write", confirm: "Stop the operation", blocked: (view.ended_at !== null || view.cancel_requested) && "The operation has ended, or is being canceled",
              about: <p>Stops after the part in progress. What is changed already stays changed.</p>,
              request: () => ({ method: "POST", path: `${path}/cancel` }), cli: () => commandLine(["bulk", "cancel", view.operation_id]), done: operation.reload,
            }]} />}>
            <Id id={view.operation_id} whole />
          </Header>
          {view.cancel_requested && !view.ended_at && <Note tone="warn" title="Canceling.">What is changed already stays changed.</Note>}
          <div class="stats">
            <Stat label="Changed" value={number(view.changed)} />
            <Stat label="Matched" value={number(view.matched)} />
            <Stat label="Skipped" value={number(view.skipped)} hint="ended or changed meanwhile" />
            <Stat label="Progress" value={view.progress === null ? (view.ended_at ? "done" : "–") : percent(view.progress)} />
          </div>
          <Panel><Bar tall of={1} label={percent(view.progress ?? 0)} parts={[[view.ended_at ? "good" : "live", view.progress ?? (view.ended_at ? 1 : 0)]]} /></Panel>
          <Panel title="Request">
            <Facts of={[
              ["Filter", filterText(view.filter)],
              view.priority && ["Priority", view.priority],
              ["Reason", view.reason],
              ["Requested by", view.requested_by],
              ["Asked", <Time at={view.created_at} full />],
              ["Ended", <Time at={view.ended_at} full />],
              view.filter.run && ["Run", <a href={runLink(view.filter.run)}>{view.filter.run}</a>],
              ["Tasks", <a href={tasksLink(given(view))}>that match the filter now</a>],
            ]} />
          </Panel>
        </>
      )}
    </Load>
  );
}
