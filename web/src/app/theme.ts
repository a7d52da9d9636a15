// Light, dark, or as the system prefers. The choice is kept in this browser.
import { effect, signal } from "@preact/signals";

const THEMES = ["system", "light", "dark"] as const;
type Theme = (typeof THEMES)[number];
const PLACE = "interlock.theme";

const kept = localStorage.getItem(PLACE) as Theme | null;
export const theme = signal<Theme>(kept && THEMES.includes(kept) ? kept : "system");

effect(() => {
  document.documentElement.dataset.theme = theme.value;
  localStorage.setItem(PLACE, theme.value);
});

export function cycleTheme(): void {
  theme.value = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length]!;
}
