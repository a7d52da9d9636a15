import type { JSX } from "preact";
import { useTitle } from "../app/title";
import { Header, Tabs } from "../ui/basics";
import { useQuery } from "../ui/table";
import { Changes, Feed, Replays } from "./bus_history";
import { Acls, Keys, Limits, Routes, Services } from "./bus_registry";

const TABS = { routes: ["Routes", Routes], services: ["Services", Services], acls: ["ACLs", Acls], limits: ["Limits", Limits], keys: ["Keys", Keys], changes: ["Changelog", Changes], feed: ["Decisions", Feed], replays: ["Replays", Replays] } as const;

export default function BusPage(): JSX.Element {
  useTitle("Bus");
  const { query, href } = useQuery();
  const tab = (query.tab && query.tab in TABS ? query.tab : "routes") as keyof typeof TABS;
  const [, Part] = TABS[tab];
  return (
    <>
      <Header title="Bus" />
      <Tabs current={tab} tabs={Object.entries(TABS).map(([id, [label]]) => ({ id, label, href: href({ tab: id === "routes" ? null : id, cursor: null, change: null }) }))} />
      <Part />
    </>
  );
}
