// Plots over the steps, with keys of the keyboard and the colours of the page. They are drawn by the
// global uPlot, from a script of its own before this one.

import { h, replace } from "./dom.js";
import { NONE, amount, amounts, shown } from "./format.js";

export const COLOURS = ["engine", "trainer", "s", "good", "lag-4", "d", "bad", "v5-line"];
// Distances between marks of an axis over the steps, which are whole numbers.
const WHOLE_STEPS = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((each) => each * 10 ** power)).flat();
export const charts = new Set();

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Draw all plots again, in the colours of a new theme.
export const recolour = () => {
  charts.forEach((chart) => chart.draw());
  drawings.forEach((draw) => draw());
};

// Call `draw` after each change of the theme, until it is null. There is one for each key.
const drawings = new Map();
export const onTheme = (key, draw) => (draw ? drawings.set(key, draw) : drawings.delete(key));

const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => target.resize?.()));

// A plot. `series` is [{name, x, y, colour?, dots?, faint?, low?, high?}]; each has its own steps.
export class Plot {
  constructor({ title, unit = "", scale = "count", height = 190, label = "step", names = [], empty = "Nothing was recorded yet." }) {
    Object.assign(this, { title, unit, scale, height, label, names, empty, series: [], changes: [], plot: null });
    this.box = h("div", { class: "plot-box", tabindex: "0", role: "img", "aria-label": title, onkeydown: (event) => this.key(event) });
    this.keys = h("div", { class: "keys" });
    this.element = h("div", {}, this.keys, this.box);
    this.box.resize = () => this.resize();
    resized.observe(this.box);
    charts.add(this);
  }

  remove() {
    this.plot?.destroy();
    resized.unobserve(this.box);
    charts.delete(this);
  }

  // `changes` are steps with a vertical line.
  set(series, changes = []) {
    Object.assign(this, { series, changes });
    if (!this.update()) this.draw();
  }

  // Draw anew. The part of the steps that was chosen and the step at the cursor stay.
  draw() {
    const [part, at] = [this.part(), this.stepAtCursor()];
    this.plot?.destroy();
    this.plot = null;
    const made = this.columns();
    if (!made) {
      replace(this.keys);
      replace(this.box, h("p", { class: "gap" }, this.empty));
      return;
    }
    replace(this.box);
    const { data, drawn, bands } = made;
    Object.assign(this, { data, shape: made.shape });
    this.plot = new uPlot(
      {
        width: this.width(),
        height: this.height,
        legend: { show: false },
        cursor: { points: { size: 7 }, drag: { x: true, y: false } },
        scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: (_, low, high) => this.range(low, high) } },
        axes: [this.axis({ size: 30, space: this.label === "step" ? 50 : 90, incrs: WHOLE_STEPS, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? this.placeName(tick) : "")) }), this.axis({ size: 56, values: (_, ticks) => this.marks(ticks) })],
        series: drawn,
        bands,
        hooks: { draw: [(plot) => this.drawChanges(plot)], setCursor: [(plot) => this.name(plot.cursor.idx)] },
      },
      data,
      this.box,
    );
    // The scales are only set when a batch of changes ends.
    this.plot.batch(() => part && this.plot.setScale("x", part));
    this.point(at);
  }

  // Draw new values in place if there are the same lines as before. Return false if not.
  update() {
    const made = this.plot && this.columns();
    if (!made || made.shape !== this.shape) return false;
    const [part, at] = [this.part(), this.stepAtCursor()];
    this.data = made.data;
    this.plot.batch(() => {
      this.plot.setData(this.data, !part);
      if (part) this.plot.setScale("x", part);
    });
    this.point(at);
    return true;
  }

  // The part of the steps that was chosen by a drag, or null if all are shown.
  part() {
    if (!this.plot) return null;
    const { min, max } = this.plot.scales.x;
    return min > this.data[0][0] || max < this.data[0].at(-1) ? { min, max } : null;
  }

  stepAtCursor() {
    const at = this.plot?.cursor.idx ?? null;
    return at === null ? null : this.data[0][at];
  }

  // Return data, options of the lines and bands, or null without values. `shape` is a text that two
  // plots share if their lines look the same.
  columns() {
    const series = this.series.filter((each) => each.x.length);
    if (!series.length) return null;
    const steps = [...new Set(series.flatMap((each) => each.x))].sort((a, b) => a - b);
    const place = new Map(steps.map((step, at) => [step, at]));
    const column = (x, y) => {
      const values = new Array(steps.length).fill(null);
      x.forEach((step, index) => (values[place.get(step)] = y[index]));
      return values;
    };
    const data = [steps];
    const drawn = [{}];
    const bands = [];
    series.forEach((each, number) => {
      const ink = colour(each.colour || COLOURS[number % COLOURS.length]);
      if (each.low) {
        const hidden = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true, scale: "y" };
        data.push(column(each.x, each.high), column(each.x, each.low));
        drawn.push({ ...hidden }, { ...hidden });
        bands.push({ series: [data.length - 2, data.length - 1], fill: `${ink}22` });
      }
      data.push(column(each.x, each.y));
      drawn.push({
        label: each.name,
        stroke: each.faint ? `${ink}66` : ink,
        width: each.faint ? 1 : 2,
        dash: each.dash,
        spanGaps: true,
        points: { show: Boolean(each.dots) || each.x.length < 2, size: 7, fill: colour("card"), stroke: ink, width: 2 },
      });
      each.column = data.length - 1;
    });
    this.shownSeries = series;
    return { data, drawn, bands, shape: JSON.stringify(drawn) };
  }

  drawChanges({ ctx, bbox, valToPos }) {
    ctx.save();
    ctx.strokeStyle = colour("bad");
    ctx.lineWidth = 2 * devicePixelRatio;
    ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const step of this.changes) {
      const x = valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // The text of a place on the horizontal axis.
  placeName(place) {
    return this.names.length ? (this.names[place] ?? "") : amount(place);
  }

  width() {
    return Math.max(160, this.box.clientWidth || 320);
  }

  resize() {
    if (this.plot && Math.abs(this.plot.width - this.width()) > 1) this.plot.setSize({ width: this.width(), height: this.height });
  }

  axis(options) {
    const ink = colour("quiet");
    return { stroke: ink, font: "12px system-ui, sans-serif", grid: { stroke: colour("rule"), width: 1 }, ticks: { show: false }, ...options };
  }

  marks(values) {
    return this.unit === "share" ? amounts(values.map((value) => 100 * value)).map((text) => `${text}%`) : amounts(values);
  }

  range(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.scale === "share") return [0, 1];
    if (this.scale === "count") [low, high] = [Math.min(0, low), Math.max(0, high)];
    if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
    const space = 0.06 * (high - low);
    return [low < 0 || this.scale === "value" ? low - space : low, high + space];
  }

  // Write the values at the cursor, or the last ones.
  name(at) {
    const inside = at !== null && at !== undefined;
    const parts = this.shownSeries.map((each, number) => {
      const values = this.data[each.column];
      let index = inside ? at : values.length - 1;
      while (index > 0 && (values[index] === null || values[index] === undefined)) index -= 1;
      const value = values[index];
      return { name: each.name, text: value === null || value === undefined ? NONE : shown(value, this.unit), tint: each.colour || COLOURS[number % COLOURS.length], each };
    });
    const step = inside ? this.data[0][at] : this.data[0].at(-1);
    const where = h("span", { class: "where" }, `${this.label} ${this.placeName(step)}`);
    const keys = parts.map(({ name, text, tint }) => h("span", { class: "key" }, h("i", { class: `swatch ${tint}` }), name, " ", h("b", {}, text)));
    replace(this.keys, where, keys);
    const text = parts.map(({ name, text }) => `${name} ${text}`).join(", ");
    this.box.setAttribute("aria-label", `${this.title}, ${this.label} ${this.placeName(step)}: ${text}. Left and right arrow keys move along the steps.`);
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity };
    if (!this.plot) return;
    const places = this.data[0];
    if (event.key === "Escape") {
      const at = this.stepAtCursor();
      this.plot.batch(() => this.plot.setScale("x", { min: places[0], max: places.at(-1) }));
      return this.point(at);
    }
    if (!(event.key in steps)) return;
    event.preventDefault();
    const { min, max } = this.plot.scales.x;
    const shown = places.map((_, at) => at).filter((at) => places[at] >= min && places[at] <= max);
    if (!shown.length) return;
    const now = this.plot.cursor.idx ?? shown.at(-1);
    this.point(places[Math.min(shown.at(-1), Math.max(shown[0], now + steps[event.key]))]);
  }

  // Move the cursor to a step, or to the nearest one with values. Null stands for no cursor.
  point(step) {
    if (step === null) return this.name(null);
    const nearest = this.data[0][this.plot.valToIdx(step)];
    this.plot.setCursor({ left: this.plot.valToPos(nearest, "x"), top: this.plot.over.clientHeight / 2 });
  }
}

// A small curve without axes, for a row of a table.
export function sparkline(lines, label) {
  const box = h("span", { class: "spark", role: "img", "aria-label": label });
  const points = lines.flatMap((line) => line.x);
  if (!points.length) return box;
  const [low, high] = [Math.min(...points), Math.max(...points)];
  const canvas = h("canvas", { width: 240, height: 60 });
  box.append(canvas);
  const draw = () => {
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, 240, 60);
    pen.lineJoin = "round";
    for (const line of lines) {
      pen.strokeStyle = pen.fillStyle = colour(line.colour);
      pen.globalAlpha = line.faint ? 0.5 : 1;
      pen.lineWidth = line.faint ? 2 : 4;
      pen.beginPath();
      line.x.forEach((step, index) => {
        const [x, y] = [6 + (228 * (step - low)) / (high - low || 1), 54 - 48 * Math.min(1, Math.max(0, line.y[index]))];
        if (index) pen.lineTo(x, y);
        else pen.moveTo(x, y);
        if (line.x.length === 1) pen.fillRect(x - 3, y - 3, 6, 6);
      });
      pen.stroke();
    }
  };
  draw();
  box.draw = draw;
  const chart = { draw: () => (box.isConnected ? draw() : charts.delete(chart)) };
  charts.add(chart);
  return box;
}
