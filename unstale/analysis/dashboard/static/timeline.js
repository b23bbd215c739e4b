// The timeline of a run: what engines, tools and trainer did when, with zoom by wheel, drag and keys.

import { ask } from "./api.js";
import { colour, onTheme } from "./chart.js";
import { h, replace, settled } from "./dom.js";
import { duration, percent, whole } from "./format.js";
import { part } from "./parts.js";
import { whileInView } from "./view.js";

const LANES = [
  ["engine", "generation", "engine"], ["tools", "tools", "good"], ["wait", "trainer waits", "wait"], ["old_logps", "scoring", "d"], ["trainer", "training", "trainer"],
  ["publish", "publishing", "s"], ["standstill", "engines pause", "ink"], ["checkpoint", "checkpoints", "lag-4"], ["eval", "evaluation", "good"],
];
const HEIGHT = 26;
const NARROW = 42;
const MARKS = 18;

// Lanes in the order of the page: generation of each engine, tools, then the trainer's activities.
function order(found) {
  const engines = [...found].filter((lane) => /^engine \d+$/.test(lane)).sort((a, b) => Number(a.slice(7)) - Number(b.slice(7))).map((lane) => [lane, lane, "engine"]);
  const known = LANES.filter(([lane]) => found.has(lane));
  const rest = [...found].filter((lane) => ![...engines, ...known].some(([each]) => each === lane)).map((lane) => [lane, lane, "quiet"]);
  return [...engines, ...known, ...rest];
}

export function timeline(run) {
  const canvas = h("canvas", { class: "lanes", tabindex: "0", role: "img", "aria-label": "Timeline" });
  const names = h("div", { class: "lane-names" });
  const note = h("p", { class: "quiet", role: "status" });
  const under = h("p", { class: "quiet under" }, " ");
  const button = (text, label, action) => h("button", { type: "button", "aria-label": label, onclick: action }, text);
  const controls = h("div", { class: "controls" }, button("−", "Zoom out", () => zoom(2)), button("+", "Zoom in", () => zoom(0.5)), button("◂", "Earlier", () => move(-0.5)), button("▸", "Later", () => move(0.5)), button("last steps", "Show the last eight steps", () => last_steps()), button("whole run", "Show the whole run", () => whole_run()), note);
  const about = "Where the time went. The height of generation is the busy share of an engine in a step, that of tools the number of episodes in their environment. Lines with a number mark when a version was in all engines. Drag to look at a part; Ctrl and the wheel, or + and −, zoom; arrow keys move; 0 shows the whole run.";
  const element = part("section-timeline", "Timeline", h("p", { class: "lead" }, about), h("figure", { class: "card" }, controls, h("div", { class: "lanes-box" }, names, canvas), under));
  let answer = null;
  let view = null;
  let lanes = [];
  let drag = null;
  let over = null;

  const fetch_spans = settled(120, load);
  function set(start, end) {
    const [first, last] = [answer.first, Math.max(answer.last, answer.first + 0.01)];
    const width = Math.min(last - first, Math.max(0.01, end - start));
    start = Math.min(Math.max(first, start), last - width);
    view = { start, end: start + width, whole: width >= last - first - 1e-9 };
    draw();
    fetch_spans();
  }
  const zoom = (factor, at = 0.5) => answer && set(view.start + (view.end - view.start) * at * (1 - factor), view.start + (view.end - view.start) * (at + factor * (1 - at)));
  const move = (part) => answer && set(view.start + part * (view.end - view.start), view.end + part * (view.end - view.start));
  const whole_run = () => answer && set(answer.first, answer.last);
  const last_steps = () => answer && answer.ends.length > 1 && set(answer.ends[Math.max(0, answer.ends.length - 9)], answer.last);

  async function load() {
    try {
      const asked = view && !view.whole ? { start: view.start, end: view.end } : {};
      const [found, { series }] = await Promise.all([ask("spans", { run, ...asked }), ask("series", { run, name: "time_s", points: 500 })]);
      answer = { ...found, ends: series.time_s[1] };
    } catch (error) {
      note.textContent = error.message;
      return;
    }
    if (!view || view.whole) view = { start: answer.first, end: Math.max(answer.last, answer.first + 0.01), whole: true };
    const found = [...answer.spans, ...answer.parts, ...answer.levels].map(([lane]) => lane);
    lanes = order(new Set([...lanes.map(([lane]) => lane), ...found]));
    draw();
  }

  // A narrow page has no space for names beside the lanes, so each has one above its bars.
  const laneHeight = () => (getComputedStyle(names).display === "none" ? NARROW : HEIGHT);

  function draw() {
    if (!answer || !canvas.isConnected) return;
    const pitch = laneHeight();
    const [width, height] = [canvas.parentElement.clientWidth - names.offsetWidth - 8, MARKS + lanes.length * laneHeight() + 20];
    const scale = devicePixelRatio || 1;
    Object.assign(canvas, { width: Math.max(50, width) * scale, height: height * scale });
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    const x = (time) => ((time - view.start) / (view.end - view.start)) * width;
    const top = (row) => MARKS + (row + 1) * pitch - HEIGHT + 2;
    const box = (row, from, to, level = 1) => {
      const tall = (HEIGHT - 6) * Math.max(level, 0.04);
      pen.fillRect(x(from), top(row) + HEIGHT - 6 - tall, Math.max(1, x(to) - x(from)), tall);
    };
    lanes.forEach((_, row) => {
      pen.fillStyle = colour("soft");
      pen.fillRect(0, top(row), width, HEIGHT - 6);
    });
    const rows = new Map(lanes.map(([lane], row) => [lane, row]));
    pen.fillStyle = colour("rule");
    for (const end of answer.steps) pen.fillRect(x(end), MARKS, 1, lanes.length * laneHeight());
    const inks = lanes.map(([, , ink]) => colour(ink));
    for (const [lane, start, end, level] of answer.levels) {
      pen.fillStyle = inks[rows.get(lane)];
      box(rows.get(lane), start, end, level);
    }
    for (const [lane, start, end] of answer.spans) {
      pen.fillStyle = inks[rows.get(lane)];
      box(rows.get(lane), start, end);
    }
    for (const [lane, shares] of answer.parts) {
      pen.fillStyle = inks[rows.get(lane)];
      const part = (answer.end - answer.start) / shares.length;
      shares.forEach((share, at) => share > 0 && box(rows.get(lane), answer.start + at * part, answer.start + (at + 1) * part, share));
    }
    if (pitch === NARROW) {
      pen.fillStyle = colour("ink");
      pen.textAlign = "left";
      lanes.forEach(([, name], row) => pen.fillText(name, 0, top(row) - 4));
    }
    marks(pen, x, width);
    pen.fillStyle = colour("quiet");
    const count = answer.last > answer.first ? Math.max(2, Math.floor(width / 90)) : 0; // an empty run has one time
    for (let tick = 0; tick <= count; tick += 1) {
      const time = view.start + ((view.end - view.start) * tick) / (count || 1);
      pen.textAlign = tick === 0 ? "left" : tick === count ? "right" : "center";
      pen.fillText(duration(time), x(time), height - 5);
    }
    if (drag !== null && over !== null) {
      pen.fillStyle = colour("ink");
      pen.globalAlpha = 0.12;
      pen.fillRect(Math.min(drag, over) * width, MARKS, Math.abs(over - drag) * width, lanes.length * laneHeight());
      pen.globalAlpha = 1;
    }
    replace(names, lanes.map(([, name]) => h("span", {}, name)));
    const how = answer.parts.length ? ", too many to draw: the height is the share of the time of each part; zoom in to see them" : "";
    const left = answer.left_out ? `, the oldest ${whole(answer.left_out)} are left out` : "";
    note.textContent = `${duration(view.start)} to ${duration(view.end)}, ${whole(answer.inside)} activities${how}${left}`;
    canvas.setAttribute("aria-label", `Timeline from ${duration(view.start)} to ${duration(view.end)}: ${lanes.map(([lane, name]) => `${name} ${busy(lane)}`).join(", ")}`);
  }

  // Lines where versions arrived, with as many numbers as have space.
  function marks(pen, x, width) {
    pen.textAlign = "center";
    let free = -Infinity;
    for (const [time, label] of answer.marks) {
      const at = x(time);
      if (at < 0 || at > width) continue;
      pen.fillStyle = colour("s");
      pen.fillRect(at, MARKS - 4, 1, lanes.length * laneHeight() + 4);
      const text = label.replace(/^version /, "v");
      const wide = pen.measureText(text).width;
      if (at - wide / 2 < free || at - wide / 2 < 0 || at + wide / 2 > width) continue;
      pen.fillStyle = colour("ink");
      pen.fillText(text, at, MARKS - 6);
      free = at + wide / 2 + 6;
    }
  }

  // The share of the shown time in which a lane was busy.
  function busy(lane) {
    const inside = (start, end) => Math.max(0, Math.min(end, view.end) - Math.max(start, view.start));
    const parts = answer.parts.find(([each]) => each === lane);
    const seconds = parts ? (parts[1].reduce((sum, share) => sum + share, 0) / parts[1].length) * (answer.end - answer.start)
      : [...answer.spans.map(([each, start, end]) => [each, start, end, 1]), ...answer.levels].filter(([each]) => each === lane).reduce((sum, [, start, end, level]) => sum + level * inside(start, end), 0);
    return percent(Math.min(1, seconds / (view.end - view.start)));
  }

  const at = (event) => Math.min(1, Math.max(0, (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth));

  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, at(event));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    drag = at(event);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag === null) return;
    const [from, to] = [drag, at(event)].sort((a, b) => a - b);
    drag = null;
    if (answer && to - from > 0.01) set(view.start + from * (view.end - view.start), view.start + to * (view.end - view.start));
    else draw();
  });
  canvas.addEventListener("pointercancel", () => {
    drag = null;
    draw();
  });
  canvas.addEventListener("dblclick", whole_run);
  canvas.addEventListener("pointermove", (event) => {
    if (!answer) return;
    over = at(event);
    if (drag !== null) draw();
    const time = view.start + over * (view.end - view.start);
    const row = Math.floor((event.clientY - canvas.getBoundingClientRect().top - MARKS) / laneHeight());
    const [lane, name] = lanes[row] || [];
    const hit = answer.spans.find(([each, start, end]) => each === lane && start <= time && time <= end);
    const level = answer.levels.find(([each, start, end]) => each === lane && start <= time && time <= end);
    if (hit) under.textContent = `${name} ${hit[3]}: ${duration(hit[1])} to ${duration(hit[2])}, ${duration(hit[2] - hit[1])}`;
    else if (level) under.textContent = `${name}, ${level[4]}, ${duration(level[1])} to ${duration(level[2])}`;
    else under.textContent = duration(time);
  });
  canvas.addEventListener("keydown", (event) => {
    const actions = { ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": whole_run, Home: whole_run, End: last_steps };
    if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    actions[event.key]();
  });
  const viewed = whileInView([element], load);
  const resized = new ResizeObserver(draw);
  resized.observe(element);
  onTheme("timeline", draw);
  return { element, load: viewed.refresh, close: () => { viewed.close(); resized.disconnect(); onTheme("timeline", null); } };
}
