// Parts that several pages share.

import { hasEpisode } from "./api.js";
import { h, replace } from "./dom.js";
import { ago, amount } from "./format.js";

const WORDS = { live: "running", silent: "no end recorded", finished: "finished", failed: "failed", stopped: "stopped" };
const KINDS = { live: "good", failed: "bad" };

export function badge(run) {
  const late = (run.state === "live" || run.state === "silent") && run.age_s !== null ? `, written ${ago(run.age_s)}` : "";
  const about = run.state === "silent" ? "The run was killed, or is in a long step." : run.detail || run.reason;
  return h("span", { class: `badge ${KINDS[run.state] || ""}`, title: about }, `${WORDS[run.state] || run.state}${late}`);
}

export const toRun = (name) => `#/run/${encodeURIComponent(name)}`;

// A link to an episode, or only its text if this page cannot show it.
export function toEpisode(run, number, text = `episode ${number}`) {
  return hasEpisode(number) ? h("a", { href: `${toRun(run)}/episode/${number}` }, text) : text;
}

export function problem(text) {
  return h("p", { class: "warning", role: "alert" }, text);
}

// Put an error in the place of a page.
export function failed(content, error) {
  replace(content, h("h1", {}, "This cannot be shown"), problem(error.message), h("p", {}, h("a", { href: "#/" }, "All runs")));
}

export function tile(name, value, about) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value), h("dd", { class: "about" }, about));
}

// An evaluation on held-out tasks, with the texts of the server.
export function success(evaluation) {
  return evaluation ? h("span", {}, evaluation.share, evaluation.about ? h("small", {}, ` ${evaluation.tasks && evaluation.interval ? `${evaluation.tasks} tasks, ` : ""}${evaluation.about}`) : null) : "—";
}

// Name of a cell's value for people.
export function cell(name, value) {
  if (value === undefined || value === null) return "";
  if (name === "success") return value ? "yes" : "no";
  return typeof value === "number" ? (Number.isInteger(value) ? String(value) : amount(value)) : String(value);
}

// Parts that the user opened or closed, by their anchor. On a narrow page all are closed at first.
const opened = new Map();

// A part of the page below its title, which can be closed.
export function part(id, title, ...content) {
  const open = opened.get(id) ?? !matchMedia("(max-width: 760px)").matches;
  const body = h("details", { class: "part", open }, h("summary", {}, h("h2", {}, title)), content);
  body.querySelector("summary").addEventListener("click", () => opened.set(id, !body.open));
  return h("section", { id }, body);
}
// What a part has below its title, with the title.
export const bodyOf = (section) => section.querySelector(".part");
