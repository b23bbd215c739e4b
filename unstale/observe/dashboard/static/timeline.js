// The timeline of a run: what engine and trainer did when, with zoom by wheel, drag and keys.

import { ask } from "./api.js";
import { colour } from "./chart.js";
import { h, replace, settled } from "./dom.js";
import { duration, whole } from "./format.js";

const LANES = [
  ["engine", "generation", "engine"], ["wait", "trainer waits", "wait"], ["old_logps", "scoring", "d"], ["trainer", "training", "trainer"],
  ["publish", "publishing", "s"], ["standstill", "engine pauses", "ink"], ["checkpoint", "checkpoints", "lag-4"], ["eval", "evaluation", "good"],
];
const HEIGHT = 26;

export function timeline(run) {
  const canvas = h("canvas", { class: "lanes", tabindex: "0", role: "img" });
  const names = h("div", { class: "lane-names" });
  const note = h("p", { class: "quiet", role: "status" });
  const under = h("p", { class: "quiet under" }, " ");
  const button = (text, label, action) => h("button", { type: "button", "aria-label": label, onclick: action }, text);
  const controls = h("div", { class: "controls" }, button("−", "Zoom out", () => zoom(2)), button("+", "Zoom in", () => zoom(0.5)), button("◂", "Earlier", () => move(-0.5)), button("▸", "Later", () => move(0.5)), button("whole run", "Show the whole run", () => whole_run()), note);
  const element = h("section", { id: "section-timeline" }, h("h2", {}, "Timeline"), h("p", { class: "lead" }, "Where the time went. Drag to look at a part, or use the buttons; arrow keys move, + and − zoom."), h("figure", { class: "card" }, controls, h("div", { class: "lanes-box" }, names, canvas), under));
  let answer = null;
  let view = null;
  let lanes = [];
  let drag = null;

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

  async function load() {
    try {
      const asked = view && !view.whole ? { start: view.start, end: view.end } : {};
      answer = await ask("spans", { run, ...asked });
    } catch (error) {
      note.textContent = error.message;
      return;
    }
    if (!view || view.whole) view = { start: answer.first, end: Math.max(answer.last, answer.first + 0.01), whole: true };
    const found = new Set(answer.spans.map(([lane]) => lane));
    lanes = LANES.filter(([lane]) => found.has(lane) || lanes.some(([known]) => known === lane));
    for (const lane of found) if (!LANES.some(([known]) => known === lane)) lanes.push([lane, lane, "quiet"]);
    draw();
  }

  function draw() {
    if (!answer || !canvas.isConnected) return;
    const [width, height] = [canvas.parentElement.clientWidth - names.offsetWidth - 8, lanes.length * HEIGHT + 20];
    const scale = devicePixelRatio || 1;
    Object.assign(canvas, { width: Math.max(50, width) * scale, height: height * scale });
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const x = (time) => ((time - view.start) / (view.end - view.start)) * width;
    lanes.forEach((_, row) => {
      pen.fillStyle = colour("soft");
      pen.fillRect(0, row * HEIGHT + 2, width, HEIGHT - 6);
    });
    const rows = new Map(lanes.map(([lane], row) => [lane, row]));
    for (const [lane, start, end] of answer.spans) {
      const row = rows.get(lane);
      if (row === undefined) continue;
      pen.fillStyle = colour(lanes[row][2]);
      pen.fillRect(x(start), row * HEIGHT + 2, Math.max(1, x(end) - x(start)), HEIGHT - 6);
    }
    pen.fillStyle = colour("quiet");
    pen.font = "12px system-ui, sans-serif";
    const count = Math.max(2, Math.floor(width / 90));
    for (let tick = 0; tick <= count; tick += 1) {
      const time = view.start + ((view.end - view.start) * tick) / count;
      pen.textAlign = tick === 0 ? "left" : tick === count ? "right" : "center";
      pen.fillText(duration(time), x(time), height - 5);
    }
    replace(names, lanes.map(([, name]) => h("span", {}, name)));
    const left = answer.left_out ? `, ${whole(answer.left_out)} shorter ones are left out: zoom in to see them` : "";
    note.textContent = `${duration(view.start)} to ${duration(view.end)}, ${whole(answer.spans.length)} activities${left}`;
    canvas.setAttribute("aria-label", `Timeline from ${duration(view.start)} to ${duration(view.end)}: ${lanes.map(([lane, name]) => `${name} ${duration(sum(lane))}`).join(", ")}`);
  }

  const sum = (lane) => answer.spans.filter(([each]) => each === lane).reduce((total, [, start, end]) => total + end - start, 0);
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
    const [from, to] = [drag, at(event)].sort((a, b) => a - b);
    drag = null;
    if (answer && to - from > 0.01) set(view.start + from * (view.end - view.start), view.start + to * (view.end - view.start));
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!answer) return;
    const time = view.start + at(event) * (view.end - view.start);
    const lane = lanes[Math.floor((event.clientY - canvas.getBoundingClientRect().top) / HEIGHT)]?.[0];
    const hit = answer.spans.find(([each, start, end]) => each === lane && start <= time && time <= end);
    under.textContent = hit ? `${lane} ${hit[3]}: ${duration(hit[1])} to ${duration(hit[2])}, ${duration(hit[2] - hit[1])}` : `${duration(time)}`;
  });
  canvas.addEventListener("keydown", (event) => {
    const actions = { ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": whole_run, Home: whole_run };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
  const resized = new ResizeObserver(draw);
  resized.observe(element);
  return { element, load, close: () => resized.disconnect() };
}
