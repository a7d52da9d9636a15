// The dashboard of Interlock: starts the session, then shows the page of the address.
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/layout.css";
import "./styles/charts.css";
import icon from "./icon.svg";
import { effect, useSignal } from "@preact/signals";
import { lazy, LocationProvider, Route, Router } from "preact-iso";
import { render, type JSX } from "preact";
import { useEffect } from "preact/hooks";
import { loadSession, session, sessionEnded } from "./api/client";
import { followLive } from "./api/live";
import { arrival, SignInPage } from "./app/signin";
import { Shell } from "./app/shell";
import { Empty, Note, Skeleton } from "./ui/basics";

const SESSION_SECONDS = 300;

const Overview = lazy(() => import("./pages/overview"));
const Runs = lazy(() => import("./pages/runs"));
const Run = lazy(() => import("./pages/run"));
const Job = lazy(() => import("./pages/job"));
const Tasks = lazy(() => import("./pages/tasks"));
const Task = lazy(() => import("./pages/task"));
const Operations = lazy(() => import("./pages/operations"));
const Operation = lazy(() => import("./pages/operation"));
const Dags = lazy(() => import("./pages/dags"));
const Dag = lazy(() => import("./pages/dag"));
const Backfills = lazy(() => import("./pages/backfills"));
const Backfill = lazy(() => import("./pages/backfill"));
const Datasets = lazy(() => import("./pages/datasets"));
const Dataset = lazy(() => import("./pages/dataset"));
const Sql = lazy(() => import("./pages/sql"));
const Queues = lazy(() => import("./pages/queues"));
const Bus = lazy(() => import("./pages/bus"));
const Alerts = lazy(() => import("./pages/alerts"));
const Access = lazy(() => import("./pages/access"));

function Missing(): JSX.Element {
  return <Empty title="There is no such page."><a href="/ui/">Overview</a></Empty>;
}

function Pages(): JSX.Element {
  return (
    <Router onRouteChange={() => window.scrollTo(0, 0)}>
      <Route path="/ui" component={Overview} />
      <Route path="/ui/runs" component={Runs} />
      <Route path="/ui/run/:id" component={Run} />
      <Route path="/ui/job/:id" component={Job} />
      <Route path="/ui/tasks" component={Tasks} />
      <Route path="/ui/task/:id" component={Task} />
      <Route path="/ui/operations" component={Operations} />
      <Route path="/ui/operation/:id" component={Operation} />
      <Route path="/ui/dags" component={Dags} />
      <Route path="/ui/dag/:id" component={Dag} />
      <Route path="/ui/backfills" component={Backfills} />
      <Route path="/ui/backfill/:id" component={Backfill} />
      <Route path="/ui/datasets" component={Datasets} />
      <Route path="/ui/dataset/:id" component={Dataset} />
      <Route path="/ui/sql" component={Sql} />
      <Route path="/ui/queues" component={Queues} />
      <Route path="/ui/bus" component={Bus} />
      <Route path="/ui/alerts" component={Alerts} />
      <Route path="/ui/access" component={Access} />
      <Route default component={Missing} />
    </Router>
  );
}

/** Renews the session while the page is visible, and follows the live stream. */
function useSession(): void {
  const open = session.value !== null && !sessionEnded.value;
  useEffect(() => {
    if (!open) return undefined;
    const stop = followLive();
    const renew = window.setInterval(() => void (document.hidden || loadSession().catch(() => undefined)), SESSION_SECONDS * 1000);
    return () => {
      stop();
      window.clearInterval(renew);
    };
  }, [open]);
}

function App(): JSX.Element {
  const state = useSignal<"loading" | "ready" | string>("loading");
  useEffect(() => {
    loadSession().then(
      () => (state.value = "ready"),
      (error: unknown) => (state.value = error instanceof Error ? error.message : String(error)),
    );
  }, []);
  useSession();
  if (state.value === "loading") return <div class="sign-in-page"><div class="sign-in-card"><Skeleton /></div></div>;
  if (!session.value && state.value !== "ready") {
    return (
      <div class="sign-in-page"><div class="sign-in-card">
        <Note tone="bad" title="Interlock does not answer.">{state.value}</Note>
        <button type="button" class="button" onClick={() => location.reload()}>Try again</button>
      </div></div>
    );
  }
  if (!session.value || arrival.token) return <SignInPage />;
  return <Shell><Pages /></Shell>;
}

// The icon is bundled because index.html names it.
effect(() => void (document.documentElement.dataset.icon = icon));
render(<LocationProvider scope="/ui"><App /></LocationProvider>, document.getElementById("app")!);
