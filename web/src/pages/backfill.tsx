import { useLocation, useRoute } from "preact-iso";
import type { JSX } from "preact";
import type { BackfillView } from "../api/types";
import { useGet } from "../api/use";
import { dagLink, JobName, runLink, tasksLink } from "../app/links";
import { useTitle } from "../app/title";
import { Actions, type Action } from "../ui/action";
import { Badge, Facts, Header, Id, Load, Note, Panel, Stat, Time } from "../ui/basics";
import { BulkActions } from "../ui/bulk";
import { Bar } from "../ui/charts";
import { commandLine } from "../ui/commands";
import { number, shortId } from "../ui/format";
import { backfillAction } from "./backfills";

function actions(view: BackfillView, reload: () => void): Action[] {
  const ended = view.ended_at !== null && "The backfill has ended";
  const post = (verb: string) => () => ({ method: "POST" as const, path: `/v1/backfills/${view.run_id}/${verb}` });
  const paused = view.state === "Paused";
  const verb = paused ? "resume" : "pause";
  return [
    { label: paused ? "Resume" : "Pause", primary: paused, scope: "jobs:write", blocked: ended, about: <p>{paused ? "Releases tasks again." : "Releases no more tasks. Those that are released continue."}</p>, request: post(verb), cli: () => commandLine(["backfill", verb, view.run_id]), done: reload },
    { label: "Cancel", danger: true, scope: "jobs:write", blocked: ended, confirm: "Cancel the backfill", about: <p>Releases no more tasks and cancels those that have not ended. Committed partitions stay.</p>, request: post("cancel"), cli: () => commandLine(["backfill", "cancel", view.run_id], { yes: true }), done: reload },
  ];
}

export default function BackfillPage(): JSX.Element {
  const id = useRoute().params.id!;
  const { route } = useLocation();
  const backfill = useGet<BackfillView>(`/v1/backfills/${encodeURIComponent(id)}`, { every: (data) => (data?.ended_at ? 0 : 2) });
  useTitle(`Backfill ${shortId(id)}`);
  return (
    <Load of={backfill}>
      {(view) => (
        <>
          <Header kind={<>Backfill of <JobName job={view.job} id={view.job_id} /></>} title={`${number(view.start)} – ${number(view.end)}`} state={<Badge state={view.state} />}
            actions={<>{view.job.dag_name && view.job.name && <Actions of={[{ ...backfillAction(view.job.dag_name, view.job.name, route, view), label: "Start again" }]} />}<BulkActions filter={{ run: view.run_id }} kinds={["retry"]} /><Actions of={actions(view, backfill.reload)} /></>}>
            <Id id={view.run_id} whole />
          </Header>
          {view.run_reason && <Note tone="bad" title="Given up.">{view.run_reason}</Note>}
          <div class="stats">
            <Stat label="Failed" value={number(view.counts.Failed ?? 0)} {...(view.counts.Failed ? { tone: "bad" } : {})} href={tasksLink({ run: view.run_id, status: "Failed" })} />
            <Stat label="Running" value={number(view.counts.Running ?? 0)} href={tasksLink({ run: view.run_id, status: "Running" })} />
            <Stat label="Completed" value={number(view.counts.Completed ?? 0)} href={tasksLink({ run: view.run_id, status: "Completed" })} />
            <Stat label="Released" value={number(view.made)} hint={`of ${number(view.total)}`} />
          </div>
          <Panel><Bar tall of={view.total ?? 1} label="Progress" parts={[["good", view.counts.Completed ?? 0], ["bad", view.counts.Failed ?? 0], ["live", view.counts.Running ?? 0]]} /></Panel>
          <Panel title="Request">
            <Facts of={[["Reason", view.reason], ["Requested by", view.requested_by], ["Priority", view.priority], ["Started", <Time at={view.created_at} full />], ["Ended", <Time at={view.ended_at} full />], ["Run", <a href={runLink(view.run_id)}>Its tasks as a run</a>], view.job.dag_name && ["DAG", <a href={dagLink(view.job.dag_name)}>{view.job.dag_name}</a>]]} />
          </Panel>
        </>
      )}
    </Load>
  );
}
