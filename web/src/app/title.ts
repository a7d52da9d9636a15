import { useEffect } from "preact/hooks";

/** Names the tab of the browser after the page. */
export function useTitle(title: string): void {
  useEffect(() => {
    document.title = `${title} · Interlock`;
  }, [title]);
}
