// The frame around every page: navigation, search, session, keyboard shortcuts.
import { useSignal } from "@preact/signals";
import { useLocation } from "preact-iso";
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { offline, session, sessionEnded, signOut } from "../api/client";
import { connected, live } from "../api/live";
import { Dialog } from "../ui/action";
import { Icon, type IconName } from "../ui/icons";
import { SearchBox } from "./search";
import { SignInAgain } from "./signin";
import { cycleTheme, theme } from "./theme";

interface Place {
  href: string;
  label: string;
  icon: IconName;
  key: string;
}

const PLACES: [string, Place[]][] = [
  ["", [{ href: "/ui/", label: "Overview", icon: "overview", key: "o" }]],
  [
    "Work",
    [
      { href: "/ui/runs", label: "Runs", icon: "runs", key: "r" },
      { href: "/ui/tasks", label: "Tasks", icon: "tasks", key: "t" },
      { href: "/ui/operations", label: "Bulk operations", icon: "operations", key: "u" },
    ],
  ],
  [
    "Data",
    [
      { href: "/ui/dags", label: "DAGs", icon: "dags", key: "d" },
      { href: "/ui/backfills", label: "Backfills", icon: "backfills", key: "f" },
      { href: "/ui/datasets", label: "Datasets", icon: "datasets", key: "s" },
      { href: "/ui/sql", label: "SQL", icon: "sql", key: "l" },
    ],
  ],
  [
    "System",
    [
      { href: "/ui/queues", label: "Queues and workers", icon: "queues", key: "q" },
      { href: "/ui/bus", label: "Bus", icon: "bus", key: "b" },
      { href: "/ui/alerts", label: "Alerts", icon: "alerts", key: "a" },
      { href: "/ui/access", label: "Access", icon: "access", key: "k" },
    ],
  ],
];

const within = (path: string, href: string): boolean => (href === "/ui/" ? path === "/ui/" || path === "/ui" : path === href || path.startsWith(`${href}/`));

function Navigation({ path, close }: { path: string; close: () => void }): JSX.Element {
  const place = path.replace(/^\/ui\/(run|task|dag|backfill|dataset|operation)\//, "/ui/$1s/");
  return (
    <nav class="places" aria-label="Pages">
      {PLACES.map(([group, places]) => (
        <div key={group}>
          {group && <h2>{group}</h2>}
          {places.map(({ href, label, icon }) => (
            <a key={href} href={href} aria-current={within(place, href) ? "page" : undefined} onClick={close}>
              <Icon name={icon} /> {label}
            </a>
          ))}
        </div>
      ))}
    </nav>
  );
}

function Status(): JSX.Element {
  const state = offline.value ? "bad" : connected.value && live.value ? "good" : "idle";
  const text = offline.value ? "Offline" : connected.value && live.value ? "Live" : "Connecting";
  return (
    <span class={`live-status badge ${state}`} role="status" title="Updates arrive over one stream, at most one per second">
      {text}
    </span>
  );
}

function Account(): JSX.Element {
  const menu = useRef<HTMLDetailsElement>(null);
  const { user, org, role, version } = session.value!;
  return (
    <details class="menu" ref={menu}>
      <summary title={`Account of ${user} in ${org}`}>
        <Icon name="user" />
        <span class="account-name">{user}</span>
        <span class="faint account-org">{org}</span>
      </summary>
      <div class="menu-body">
        <p>
          <strong>{user}</strong>
          <br />
          <span class="faint">{role} of {org}</span>
        </p>
        <a href="/ui/access?tab=sessions" onClick={() => menu.current?.removeAttribute("open")}>Sessions</a>
        <a href="/openapi.json" target="_blank" rel="noreferrer">HTTP API</a>
        <button type="button" onClick={() => void signOut()}>Sign out</button>
        <p class="faint small">Interlock {version}</p>
      </div>
    </details>
  );
}

const typing = (target: EventTarget | null): boolean =>
  target instanceof HTMLElement && (target.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName));

function moveRow(step: number): void {
  const rows = [...document.querySelectorAll<HTMLElement>("tr[data-row]")];
  const now = rows.findIndex((row) => row.contains(document.activeElement));
  const next = rows[Math.min(Math.max(now + step, 0), rows.length - 1)];
  next?.querySelector<HTMLElement>("a, button")?.focus();
}

/** `/` focuses the search, `g` and a letter opens a page, `j` and `k` move through a table, `?` lists them. */
function useShortcuts(help: () => void): void {
  const { route } = useLocation();
  useEffect(() => {
    let prefix = false;
    const press = (event: KeyboardEvent): void => {
      if (typing(event.target) || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      const place = prefix && PLACES.flatMap(([, places]) => places).find(({ key }) => key === event.key);
      prefix = event.key === "g";
      if (place) route(place.href);
      else if (event.key === "/") document.querySelector<HTMLElement>("#search")?.focus();
      else if (event.key === "?") help();
      else if (event.key === "j" || event.key === "k") moveRow(event.key === "j" ? 1 : -1);
      else return;
      event.preventDefault();
    };
    document.addEventListener("keydown", press);
    return () => document.removeEventListener("keydown", press);
  }, [route]);
}

function Shortcuts({ close }: { close: () => void }): JSX.Element {
  return (
    <Dialog title="Keyboard" close={close}>
      <div class="dialog-body">
        <dl class="facts">
          {[["/", "Search"], ["j, k", "Next, previous row"], ["Enter", "Open the row"], ["?", "This list"]].map(([key, text]) => (
            <div key={key}><dt><kbd>{key}</kbd></dt><dd>{text}</dd></div>
          ))}
          {PLACES.flatMap(([, places]) => places).map(({ key, label }) => (
            <div key={key}><dt><kbd>g</kbd> <kbd>{key}</kbd></dt><dd>{label}</dd></div>
          ))}
        </dl>
      </div>
    </Dialog>
  );
}

export function Shell({ children }: { children: ComponentChildren }): JSX.Element {
  const { path } = useLocation();
  const drawer = useSignal(false);
  const help = useSignal(false);
  useShortcuts(() => (help.value = true));
  return (
    <div class={`shell ${drawer.value ? "drawer-open" : ""}`}>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.querySelector<HTMLElement>("#main")?.focus(); }}>Skip to the content</a>
      <header class="topbar">
        <button type="button" class="icon-button drawer-button" aria-label="Pages" aria-expanded={drawer.value} onClick={() => (drawer.value = !drawer.value)}>
          <Icon name="menu" />
        </button>
        <a class="brand" href="/ui/"><span class="mark" aria-hidden="true" /> <span>Interlock</span></a>
        <SearchBox />
        <Status />
        <button type="button" class="icon-button" onClick={cycleTheme} aria-label={`Colours: ${theme.value}. Change`} title={`Colours: ${theme.value}`}>
          <Icon name={theme.value === "dark" ? "moon" : "sun"} />
        </button>
        <Account />
      </header>
      <aside class="sidebar"><Navigation path={path} close={() => (drawer.value = false)} /></aside>
      <main id="main" tabIndex={-1}>{children}</main>
      {help.value && <Shortcuts close={() => (help.value = false)} />}
      {sessionEnded.value && <SignInAgain />}
    </div>
  );
}
