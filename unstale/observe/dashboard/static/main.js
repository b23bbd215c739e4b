// Choose the page by the part of the address after #, and the theme.

import { audit } from "./audit.js";
import { recolour } from "./chart.js";
import { h, replace } from "./dom.js";
import { compare } from "./compare.js";
import { episode } from "./episode.js";
import { episodes } from "./episodes.js";
import { factors } from "./factors.js";
import { group } from "./group.js";
import { run } from "./run.js";
import { runs } from "./runs.js";

const content = document.getElementById("content");
const trail = document.getElementById("trail");

// Pages by pattern: the parts of the address, `:name` for a part that varies. A page returns
// {close, moved}: `moved` is called, if there is one, when only its own parts changed.
const PAGES = [
  ["", runs, () => []],
  ["compare", compare, () => [["compare", "#/compare"]]],
  ["run/:run", run, ofRun],
  ["run/:run/audit", audit, (at) => [...ofRun(at), ["audit", `${toRun(at)}/audit`]]],
  ["run/:run/episodes", episodes, (at) => [...ofRun(at), ["episodes", `${toRun(at)}/episodes`]]],
  ["run/:run/factors", factors, (at) => [...ofRun(at), ["D against S", `${toRun(at)}/factors`]]],
  ["run/:run/group/:group", group, (at) => [...ofEpisodes(at), [`group ${at.group}`, `${toRun(at)}/group/${at.group}`]]],
  ["run/:run/episode/:episode", episode, (at) => [...ofEpisodes(at), [`episode ${at.episode}`, `${toRun(at)}/episode/${at.episode}`]]],
  ["run/:run/episode/:episode/token/:token", episode, (at) => [...ofEpisodes(at), [`episode ${at.episode}`, `${toRun(at)}/episode/${at.episode}`]]],
];

const toRun = (at) => `#/run/${encodeURIComponent(at.run)}`;
function ofRun(at) {
  return [[at.run, toRun(at)]];
}
function ofEpisodes(at) {
  return [...ofRun(at), ["episodes", `${toRun(at)}/episodes`]];
}

function read() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.replace(/\/$/, "").split("/");
  for (const [pattern, page, crumbs] of PAGES) {
    const wanted = pattern.split("/");
    if (wanted.length !== parts.length) continue;
    const at = {};
    const fits = wanted.every((want, index) => {
      if (!want.startsWith(":")) return want === parts[index];
      try {
        at[want.slice(1)] = decodeURIComponent(parts[index]);
      } catch {
        return false;
      }
      return true;
    });
    if (fits) return { page, at, crumbs: crumbs(at), query: new URLSearchParams(query) };
  }
  return null;
}

let current = null;

function show() {
  if (location.hash === "#content") return;
  const found = read();
  const same = found && current && found.page === current.page && found.at.run === current.at.run && found.at.episode === current.at.episode && found.at.group === current.at.group;
  if (same && current.moved) {
    current.at = found.at;
    current.moved(found.at, found.query);
    return;
  }
  current?.close?.();
  replace(content);
  window.scrollTo(0, 0);
  if (!found) {
    current = null;
    replace(trail);
    replace(content, h("h1", {}, "There is no such page"), h("p", {}, h("a", { href: "#/" }, "All runs")));
    return;
  }
  const last = found.crumbs.length - 1;
  replace(trail, found.crumbs.map(([text, href], index) => h("a", { href, "aria-current": index === last ? "page" : undefined }, text)));
  document.title = `${[...found.crumbs.map(([text]) => text)].reverse().join(" · ") || "runs"} · unstale`;
  current = { ...found, ...found.page(content, found.at, found.query) };
}

const theme = document.getElementById("theme");
const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
function themed() {
  theme.textContent = isDark() ? "Light" : "Dark";
  recolour();
}
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
addEventListener("hashchange", show);
themed();
show();
