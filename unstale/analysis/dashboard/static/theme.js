// The button that switches between a light and a dark page.

import { recolour } from "./chart.js";

const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

export function switchable() {
  const theme = document.getElementById("theme");
  const themed = () => {
    theme.textContent = isDark() ? "Light" : "Dark";
    recolour();
  };
  try {
    const kept = localStorage.getItem("theme");
    if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
  } catch {
    // the browser keeps nothing, so the theme is that of the system
  }
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("theme", document.documentElement.dataset.theme);
    } catch {
      // as above
    }
    themed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themed);
  themed();
}
