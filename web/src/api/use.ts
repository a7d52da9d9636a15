// Hooks that load data. Each keeps the last reply while it loads the next one, so that a page never jumps.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { ApiError, get, pathOf, type Query } from "./client";

export interface Loaded<Data> {
  data: Data | undefined;
  error: ApiError | undefined;
  reload: () => void;
}

export interface Options<Data> {
  query?: Query;
  /** Seconds between two requests while the tab is visible; none without it. */
  every?: number | ((data: Data | undefined) => number | undefined);
}

function asApiError(error: unknown): ApiError {
  if (error instanceof ApiError) return error;
  return new ApiError(0, "internal", error instanceof Error ? error.message : String(error), {});
}

/** Loads a path again and again while the tab is visible. A null path loads nothing. */
export function useGet<Data>(path: string | null, { query, every }: Options<Data> = {}): Loaded<Data> {
  const url = path === null ? null : pathOf(path, query);
  const [reply, setReply] = useState<{ of: string | null; data?: Data; error?: ApiError }>({ of: null });
  const [round, setRound] = useState(0);
  const interval = useRef(every);
  interval.current = every;

  useEffect(() => {
    if (url === null) return undefined;
    const abort = new AbortController();
    let timer: number | undefined;
    let current: Data | undefined;
    const again = (failed: boolean): void => {
      const chosen = typeof interval.current === "function" ? interval.current(current) : interval.current;
      const seconds = failed ? Math.max(chosen ?? 0, 3) : chosen;
      if (seconds && !abort.signal.aborted) timer = window.setTimeout(load, seconds * 1000);
    };
    const load = async (): Promise<void> => {
      window.clearTimeout(timer);
      if (document.hidden) return;
      try {
        current = await get<Data>(url, {}, abort.signal);
        setReply({ of: url, data: current });
        again(false);
      } catch (error) {
        if (abort.signal.aborted) return;
        const problem = asApiError(error);
        setReply((last) => ({ of: url, error: problem, ...(last.of === url && last.data ? { data: last.data } : {}) }));
        again(problem.status === 0 || problem.status >= 500 || problem.status === 429);
      }
    };
    const shown = (): void => void (document.hidden || load());
    document.addEventListener("visibilitychange", shown);
    void load();
    return () => {
      abort.abort();
      window.clearTimeout(timer);
      document.removeEventListener("visibilitychange", shown);
    };
  }, [url, round]);

  const reload = useCallback(() => setRound((number) => number + 1), []);
  return { data: reply.of === url ? reply.data : undefined, error: reply.of === url ? reply.error : undefined, reload };
}
