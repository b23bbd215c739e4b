// The table of all episodes: filter, full-text search, sorting and paging, all by the server. The
// columns can be chosen, also rewards and facts of the environment.

import { ask, follow } from "./api.js";
import { h, replace, settled } from "./dom.js";
import { whole } from "./format.js";
import { cell, problem, toRun } from "./parts.js";

const USUAL = ["episode", "group_number", "task", "outcome", "stop", "reward", "success", "advantage", "step", "lag_max", "log_d_abs_max", "log_s_abs_max", "dropped_tokens", "clipped_tokens", "turns", "sampled_tokens"];
// Those trained on last come first. Episodes that wait have no step yet, so they are behind them.
const USUAL_SORT = "-step";
// Rewards and facts that an answer names at most.
const MAX_FIGURES = 200;
const SHORT = { group_number: "group", lag_max: "lag, max", sampled_tokens: "sampled", log_d_abs_max: "|log D|", log_s_abs_max: "|log S|", dropped_tokens: "dropped", clipped_tokens: "clipped", behavior_logp_mean: "mean logp", behavior_logp_min: "min logp", version_min: "oldest version", version_max: "newest version" };
const EXAMPLES = [["failures", "success=0 outcome=trained"], ["cut short", "stop~max"], ["several versions", "versions>1"], ["stale", "lag_max>=2"], ["clipped", "clipped_tokens>0"], ["dropped", "dropped_tokens>0"], ["not trained on", "outcome!=trained"]];

export function episodes(content, { run }, query) {
  const state = { filter: query.get("filter") || "", search: query.get("search") || "", sort: query.get("sort") || USUAL_SORT, page: Number(query.get("page")) || 0 };
  let shownColumns = query.getAll("column");
  if (!shownColumns.length) shownColumns = USUAL;
  let columns = null;
  let own = [];
  let figures = null;
  let rows = [];
  let shown = "";
  let turn = 0;
  const note = h("p", { class: "quiet", role: "status" }, "Reading the episodes…");
  const wrong = h("div");
  const progress = h("progress", { max: "1", value: "0", hidden: true, "aria-label": "Episodes that are in the index" });
  const filter = h("input", { id: "filter", type: "text", value: state.filter, spellcheck: "false", autocomplete: "off", placeholder: "reward>=0.5 stop=done", oninput: () => changed() });
  const search = h("input", { id: "search", type: "search", value: state.search, spellcheck: "false", placeholder: "words of a conversation", oninput: () => changed() });
  const head = h("tr");
  const body = h("tbody");
  const choice = h("details", { class: "choice" }, h("summary", {}, "Columns"));
  const pager = h("nav", { class: "bar pager", "aria-label": "Pages" });
  const example = ([name, text]) => h("button", { type: "button", onclick: () => ((filter.value = text), changed()) }, name);
  replace(content, h("h1", {}, "Episodes"), note, progress, h("div", { class: "form" }, h("label", { for: "filter" }, "filter"), filter, h("label", { for: "search" }, "search"), search),
    h("div", { class: "bar tools" }, EXAMPLES.map(example), h("button", { type: "button", onclick: () => ((filter.value = search.value = ""), changed()) }, "all")), wrong, choice,
    h("div", { class: "scroll" }, h("table", { class: "results episodes" }, h("thead", {}, head), body)), pager);

  const changed = settled(250, () => {
    Object.assign(state, { filter: filter.value, search: search.value, page: 0 });
    keep();
    load();
  });

  function keep() {
    const params = new URLSearchParams(Object.entries(state).filter(([, value]) => value && value !== USUAL_SORT));
    if (shownColumns !== USUAL) for (const name of shownColumns) params.append("column", name);
    history.replaceState(null, "", `${toRun(run)}/episodes${params.size ? `?${params}` : ""}`);
  }

  function sort(name) {
    state.sort = state.sort === `-${name}` ? name : `-${name}`;
    state.page = 0;
    keep();
    load();
  }

  // Boxes with which columns are chosen. A filter can name all of them.
  function chooser() {
    const box = ({ name, about }) => h("div", {}, h("dt", {}, h("label", {}, h("input", { type: "checkbox", value: name, checked: shownColumns.includes(name), disabled: name === "episode", onchange: choose }), h("code", {}, name))), h("dd", {}, about));
    const usual = h("button", { type: "button", onclick: () => show(USUAL) }, "usual columns");
    const missing = shownColumns.filter((name) => !columns.some((each) => each.name === name));
    replace(choice, h("summary", {}, "Columns"), h("p", { class: "quiet" }, "Chosen columns are shown. A filter can name all of them. ", figures.length < MAX_FIGURES ? "" : `Only the first ${MAX_FIGURES} rewards and facts are listed. `, usual), h("dl", { class: "names" }, [...columns, ...missing.map((name) => ({ name, about: "no episode has a value so far" }))].map(box)));
  }

  function choose() {
    const boxes = [...choice.querySelectorAll("input")];
    const chosen = new Set(boxes.filter((each) => each.checked).map((each) => each.value));
    const kept = shownColumns.filter((name) => chosen.has(name));
    show([...kept, ...[...chosen].filter((name) => !kept.includes(name))]);
  }

  function show(names) {
    const usual = names.length === USUAL.length && names.every((name, index) => name === USUAL[index]);
    shownColumns = usual ? USUAL : names;
    for (const each of choice.querySelectorAll("input")) each.checked = names.includes(each.value);
    keep();
    draw();
  }

  function heading(name) {
    const column = columns.find((each) => each.name === name);
    const order = state.sort === name ? "ascending" : state.sort === `-${name}` ? "descending" : "none";
    const mark = { ascending: " ▲", descending: " ▼", none: "" }[order];
    return h("th", { scope: "col", "aria-sort": order }, h("button", { type: "button", title: `${column?.about ?? "No episode has a value so far"}. Sort.`, onclick: () => sort(name) }, SHORT[name] || name, mark));
  }

  function row(each) {
    const link = { episode: `${toRun(run)}/episode/${each.episode}`, group_number: `${toRun(run)}/group/${each.group_number}` };
    const about = Object.entries(each.figures).map(([name, value]) => `${name} ${cell("", value)}`).join("\n");
    return h("tr", { title: [each.note, about].filter(Boolean).join("\n") }, names().map((name) => {
      const text = cell(name, name.includes(":") ? each.figures[name] : each[name]);
      const kind = name === "success" && text ? (each.success ? "won" : "lost") : name === "outcome" && each.outcome === "damaged" ? "lost" : undefined;
      return h("td", { class: kind }, link[name] ? h("a", { href: link[name] }, text) : text);
    }));
  }

  // The usual columns, with the role if the policy has several.
  const names = () => (shownColumns === USUAL && rows.some((each) => each.role) ? USUAL.toSpliced(3, 0, "role") : shownColumns);

  // Draw the table from the newest answer. The button that has the focus keeps it.
  function draw() {
    const now = JSON.stringify([rows, names()]);
    if (now !== shown) replace(body, rows.map(row));
    shown = now;
    const focused = head.contains(document.activeElement) ? [...head.querySelectorAll("button")].indexOf(document.activeElement) : -1;
    replace(head, names().map(heading));
    if (focused >= 0) head.querySelectorAll("button")[focused]?.focus();
  }

  function pages(answer) {
    const last = Math.max(0, Math.ceil(answer.total / answer.size) - 1);
    const go = (page) => ((state.page = page), keep(), load(), window.scrollTo(0, 0));
    const step = (text, label, page) => h("button", { type: "button", "aria-label": label, disabled: page < 0 || page > last || page === state.page, onclick: () => go(page) }, text);
    replace(pager, step("⇤", "First page", 0), step("◂", "Page before", state.page - 1), h("span", { class: "quiet" }, `page ${whole(state.page + 1)} of ${whole(last + 1)}`), step("▸", "Next page", state.page + 1), step("⇥", "Last page", last));
  }

  function filled(index) {
    const [done, all] = index.ended < index.episodes || index.episodes < index.started || !state.search ? [index.ended, index.started] : [index.searchable, index.ended];
    progress.hidden = index.complete;
    progress.value = all ? done / all : 0;
    return index.complete ? "" : ` The index is being filled: ${whole(done)} of ${whole(all)} episodes.`;
  }

  async function load() {
    const mine = (turn += 1);
    try {
      if (!own.length) {
        own = (await ask("run", { run })).columns;
      }
      const answer = await ask("episodes", { run, ...state });
      if (mine !== turn) return;
      rows = answer.rows;
      if (JSON.stringify(answer.figure_names) !== JSON.stringify(figures)) {
        figures = answer.figure_names;
        columns = [...own, ...figures.map((name) => ({ name, about: "number that the environment gave" }))];
        chooser();
      }
      draw();
      pages(answer);
      const narrowed = state.filter || state.search;
      note.textContent = `${whole(answer.total)} episodes${narrowed ? ` of ${whole(answer.index.episodes)}` : ""}.${filled(answer.index)}`;
      replace(wrong, answer.index.problems.map(problem));
    } catch (error) {
      if (mine === turn) replace(wrong, problem(error.message));
    }
  }
  const reload = settled(700, load);
  const close = follow(run, reload, { episodes: true });
  load();
  return { close: () => (close(), changed.cancel(), reload.cancel(), (turn += 1)) };
}
