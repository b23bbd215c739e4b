// Tokens in the plane of log D and log S: counts, points, histograms by lag, limits and a brush.
// Both axes are about linear up to `unit` nats, and logarithmic beyond.

import { charts, colour } from "./chart.js";
import { h, replace, svg } from "./dom.js";
import { amount, whole } from "./format.js";
import { LAST_LAG, lagName } from "./lags.js";
import { outcomeWord } from "./outcomes.js";

const LEFT = 70, BOTTOM = 46, SIDE = 74, GAP = 6;
const TICKS = [-10, -1, -0.1, -0.01, -0.001, 0, 0.001, 0.01, 0.1, 1, 10];
const INKS = { d: "d", s: "s", ds: "bad" };
// Pixels within which a point is near, and a pointer that moves less has clicked. Fingers are wide.
const NEAR = 8, NEAR_TOUCH = 20;
const CLICK = 4, CLICK_TOUCH = 10;
const isTouch = (event) => event.pointerType === "touch";

export class Scatter {
  // `onBrush` gets the limits of a rectangle that was drawn, `onChoose` a token that was clicked.
  // `hint` says how to choose tokens.
  constructor({ onBrush, onChoose, hint }) {
    Object.assign(this, { onBrush, onChoose, hint, found: null, brush: {}, drag: null, near: null });
    this.canvas = h("canvas", { class: "scatter", role: "img", "aria-label": "Tokens by log D and log S" });
    this.about = h("p", { class: "quiet under", role: "status" });
    this.legend = h("div", { class: "legend keys" });
    this.element = h("div", {}, this.legend, this.canvas, this.about);
    for (const name of ["pointerdown", "pointermove", "pointerup", "pointercancel", "pointerleave"]) this.canvas.addEventListener(name, (event) => this[name](event));
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.element);
    charts.add(this);
  }

  remove() {
    this.resized.disconnect();
    charts.delete(this);
  }

  set(found, brush) {
    Object.assign(this, { found, brush });
    replace(this.legend, found.by_lag.map(([lag, tokens]) => h("span", { class: "key" }, svg("svg", { class: `dot lag-${lag}`, viewBox: "0 0 10 10" }, svg("circle", { cx: 5, cy: 5, r: 4.5 })), lagName(lag), " ", h("b", {}, whole(tokens)))));
    const [d, s] = ["log_d", "log_s"].map((name) => found.axes[name].map((at) => amount(this.value(at))));
    this.canvas.setAttribute("aria-label", `${whole(found.placed)} tokens. log D from ${d[0]} to ${d[1]}, log S from ${s[0]} to ${s[1]}. ${this.hint}`);
    this.draw();
  }

  value = (at) => this.found.unit * Math.sinh(at);
  position = (value) => Math.asinh(value / this.found.unit);

  layout() {
    const width = Math.max(260, this.element.clientWidth);
    const side = width < 520 ? 44 : SIDE;
    const plot = width - LEFT - side - GAP;
    const tall = Math.round(Math.min(480, Math.max(260, 0.62 * plot)));
    return { width, height: side + GAP + tall + BOTTOM, side, left: LEFT, right: LEFT + plot, top: side + GAP, bottom: side + GAP + tall };
  }

  x(value) {
    const [low, high] = this.found.axes.log_d;
    return this.box.left + ((this.position(value) - low) / (high - low)) * (this.box.right - this.box.left);
  }

  y(value) {
    const [low, high] = this.found.axes.log_s;
    return this.box.bottom - ((this.position(value) - low) / (high - low)) * (this.box.bottom - this.box.top);
  }

  valueAt(left, top) {
    const [d, s] = [this.found.axes.log_d, this.found.axes.log_s];
    const inside = (share) => Math.min(1, Math.max(0, share));
    const across = inside((left - this.box.left) / (this.box.right - this.box.left));
    const up = inside((this.box.bottom - top) / (this.box.bottom - this.box.top));
    return [this.value(d[0] + across * (d[1] - d[0])), this.value(s[0] + up * (s[1] - s[0]))];
  }

  draw() {
    if (!this.found) return;
    this.box = this.layout();
    const { width, height, left, right, top, bottom } = this.box;
    const scale = window.devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * scale, height: height * scale });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = (this.pen = this.canvas.getContext("2d"));
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    this.axes();
    pen.save();
    pen.beginPath();
    pen.rect(left, top, right - left, bottom - top);
    pen.clip();
    this.cells();
    this.points();
    this.lines();
    this.rectangle();
    pen.restore();
    this.labels();
    this.histogram("log_d");
    this.histogram("log_s");
  }

  axes() {
    const { left, right, top, bottom } = this.box;
    const pen = this.pen;
    pen.fillStyle = colour("quiet");
    pen.strokeStyle = colour("rule");
    pen.lineWidth = 1;
    const line = (...points) => {
      pen.beginPath();
      points.forEach(([x, y], index) => (index ? pen.lineTo(x, y) : pen.moveTo(x, y)));
      pen.stroke();
    };
    let last = -Infinity;
    pen.textAlign = "center";
    for (const tick of TICKS.filter((each) => this.within(each, "log_d"))) {
      const x = this.x(tick);
      line([x, top], [x, bottom]);
      if (x - last > 44) pen.fillText(String(tick), (last = x), bottom + 16);
    }
    pen.fillText("log D = old_logp − behavior_logp (nats)", (left + right) / 2, bottom + 36);
    pen.textAlign = "right";
    last = Infinity;
    for (const tick of TICKS.filter((each) => this.within(each, "log_s"))) {
      const y = this.y(tick);
      line([left, y], [right, y]);
      if (last - y > 14) pen.fillText(String(tick), left - 6, (last = y) + 4);
    }
    pen.save();
    pen.translate(11, (top + bottom) / 2);
    pen.rotate(-Math.PI / 2);
    pen.textAlign = "center";
    pen.fillText("log S = logp − old_logp (nats)", 0, 0);
    pen.restore();
  }

  within(value, name) {
    const [low, high] = this.found.axes[name];
    return this.position(value) >= low && this.position(value) <= high;
  }

  cells() {
    const { counts, cells } = this.found;
    const { left, right, top, bottom } = this.box;
    const [wide, tall] = [(right - left) / cells, (bottom - top) / cells];
    const most = Math.max(2, ...counts.map((each) => each[2]));
    this.pen.fillStyle = colour("quiet");
    for (const [column, row, count] of counts) {
      this.pen.globalAlpha = 0.14 + (0.5 * Math.log(count)) / Math.log(most);
      this.pen.fillRect(left + column * wide, bottom - (row + 1) * tall, wide + 0.4, tall + 0.4);
    }
    this.pen.globalAlpha = 1;
  }

  points() {
    const { log_d, log_s, lag } = this.found.points;
    const inks = Array.from({ length: LAST_LAG + 1 }, (_, each) => colour(`lag-${each}`));
    const pen = this.pen;
    const chosen = log_d.map((_, index) => this.isInside(index));
    const some = Object.keys(this.brush).length > 0;
    const order = lag.map((_, index) => index).sort((a, b) => chosen[a] - chosen[b] || lag[a] - lag[b]);
    this.places = log_d.map((each, index) => [this.x(each), this.y(log_s[index])]);
    for (const index of order) {
      pen.globalAlpha = some && !chosen[index] ? 0.18 : 0.85;
      pen.fillStyle = inks[Math.min(LAST_LAG, Math.max(0, lag[index]))];
      pen.beginPath();
      pen.arc(...this.places[index], some && chosen[index] ? 3 : 2.2, 0, 2 * Math.PI);
      pen.fill();
    }
    pen.globalAlpha = 1;
  }

  isInside(index) {
    const { log_d, log_s } = this.found.points;
    const { d_min = -Infinity, d_max = Infinity, s_min = -Infinity, s_max = Infinity } = this.brush;
    return log_d[index] >= d_min && log_d[index] <= d_max && log_s[index] >= s_min && log_s[index] <= s_max;
  }

  lines() {
    const pen = this.pen;
    const { left, right, top, bottom } = this.box;
    for (const line of this.found.lines) {
      pen.strokeStyle = colour(INKS[line.on]);
      pen.lineWidth = 1.5;
      pen.globalAlpha = line.faint ? 0.55 : 1;
      pen.setLineDash(line.faint ? [2, 3] : []);
      pen.beginPath();
      if (line.on === "d") [pen.moveTo(this.x(line.at), top), pen.lineTo(this.x(line.at), bottom)];
      else if (line.on === "s") [pen.moveTo(left, this.y(line.at)), pen.lineTo(right, this.y(line.at))];
      else this.diagonal(line.at).forEach(([d, s], index) => (index ? pen.lineTo(this.x(d), this.y(s)) : pen.moveTo(this.x(d), this.y(s))));
      pen.stroke();
    }
    pen.setLineDash([]);
    pen.globalAlpha = 1;
  }

  // Points of log D + log S = at, which is no straight line on these axes.
  diagonal(at) {
    const along = ([low, high]) => Array.from({ length: 121 }, (_, index) => this.value(low + ((high - low) * index) / 120));
    const across = [...along(this.found.axes.log_d), ...along(this.found.axes.log_s).map((s) => at - s)];
    return across.sort((a, b) => a - b).map((d) => [d, at - d]);
  }

  labels() {
    const pen = this.pen;
    const { left, right, top, bottom } = this.box;
    const write = (text, x, y, ink, align) => {
      const wide = pen.measureText(text).width;
      pen.textAlign = align;
      pen.fillStyle = colour("card");
      pen.fillRect(align === "left" ? x - 2 : x - wide - 2, y - 11, wide + 4, 14);
      pen.fillStyle = colour(ink);
      pen.fillText(text, x, y);
    };
    let crowded = 0;
    for (const line of this.found.lines) {
      if (line.on === "d" && this.within(line.at, "log_d")) {
        const x = this.x(line.at);
        const space = x + 60 < right;
        write(line.label, space ? x + 4 : x - 4, bottom - 6 - 14 * (crowded++ % 2), "d", space ? "left" : "right");
      }
      if (line.on === "s" && this.within(line.at, "log_s")) write(line.label, left + 5, this.y(line.at) - 4, "s", "left");
      if (line.on === "ds") this.writeDiagonal(line, write);
    }
  }

  // Write the name of a diagonal where it leaves the plot: at the right side, or else at the bottom.
  writeDiagonal(line, write) {
    const { left, right, top, bottom } = this.box;
    const y = this.y(line.at - this.value(this.found.axes.log_d[1]));
    if (y >= top && y <= bottom) return write(line.label, right - 5, Math.max(top + 12, y - 6), "bad", "right");
    const x = this.x(line.at - this.value(this.found.axes.log_s[0]));
    if (x < left || x > right) return;
    const fits = x + 6 + this.pen.measureText(line.label).width < right;
    write(line.label, fits ? x + 6 : x - 6, bottom - 34, "bad", fits ? "left" : "right");
  }

  rectangle() {
    const { left, right, top, bottom } = this.box;
    const { d_min, d_max, s_min, s_max } = this.brush;
    let box = null;
    if (this.drag?.to) box = [this.drag.from, this.drag.to].map(([x, y]) => [Math.min(right, Math.max(left, x)), Math.min(bottom, Math.max(top, y))]);
    else if (Object.keys(this.brush).length) box = [[d_min === undefined ? left - 2 : this.x(d_min), s_min === undefined ? bottom + 2 : this.y(s_min)], [d_max === undefined ? right + 2 : this.x(d_max), s_max === undefined ? top - 2 : this.y(s_max)]];
    if (!box) return;
    const [[x0, y0], [x1, y1]] = box;
    this.pen.strokeStyle = colour("ink");
    this.pen.lineWidth = 1.2;
    this.pen.strokeRect(x0, y0, x1 - x0, y1 - y0);
    this.pen.globalAlpha = 0.05;
    this.pen.fillStyle = colour("ink");
    this.pen.fillRect(x0, y0, x1 - x0, y1 - y0);
    this.pen.globalAlpha = 1;
  }

  // Steps of each lag at the side of an axis. Heights are logarithms of counts.
  histogram(name) {
    const { left, right, top, bottom, side } = this.box;
    const marginals = this.found.marginals[name];
    const most = Math.log1p(Math.max(1, ...marginals.flatMap((each) => each.counts)));
    const { cells } = this.found;
    const pen = this.pen;
    pen.lineWidth = 1.6;
    for (const { lag, counts } of marginals) {
      pen.strokeStyle = colour(`lag-${lag}`);
      pen.beginPath();
      counts.forEach((count, cell) => {
        const size = (Math.log1p(count) / most) * (side - 4);
        for (const edge of [cell, cell + 1]) {
          const [x, y] = name === "log_d" ? [left + (edge / cells) * (right - left), top - GAP - size] : [right + GAP + size, bottom - (edge / cells) * (bottom - top)];
          if (cell || edge) pen.lineTo(x, y);
          else pen.moveTo(x, y);
        }
      });
      pen.stroke();
    }
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  pointerdown(event) {
    if (!this.found || event.button || !event.isPrimary) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { from: this.at(event), to: null };
  }

  pointermove(event) {
    if (!this.found || !event.isPrimary) return;
    const now = this.at(event);
    if (this.drag) {
      this.drag.to = now;
      this.draw();
      return;
    }
    const index = this.nearest(now, NEAR);
    this.canvas.classList.toggle("near", index !== null);
    replace(this.about, index === null ? "" : this.describe(index));
  }

  pointerup(event) {
    if (!this.drag || !event.isPrimary) return;
    const { from } = this.drag;
    const to = this.at(event);
    this.drag = null;
    if (Math.hypot(to[0] - from[0], to[1] - from[1]) < (isTouch(event) ? CLICK_TOUCH : CLICK)) {
      const index = this.nearest(to, isTouch(event) ? NEAR_TOUCH : NEAR);
      const { episode, token, step } = this.found.points;
      this.draw();
      if (index !== null) this.onChoose(episode[index], token[index], step[index]);
      return;
    }
    const [one, two] = [this.valueAt(...from), this.valueAt(...to)];
    const ends = (axis) => [one[axis], two[axis]].sort((a, b) => a - b).map((value) => Number(value.toPrecision(4)));
    const [[d_min, d_max], [s_min, s_max]] = [ends(0), ends(1)];
    this.onBrush({ d_min, d_max, s_min, s_max });
  }

  pointercancel() {
    this.drag = null;
    this.draw();
  }

  pointerleave() {
    if (!this.drag) replace(this.about);
  }

  nearest([left, top], size) {
    let best = null;
    this.places.forEach(([x, y], index) => {
      const far = Math.hypot(x - left, y - top);
      if (far < size) [best, size] = [index, far];
    });
    return best;
  }

  describe(index) {
    const each = (name) => this.found.points[name][index];
    return `Episode ${each("episode")}, token ${each("token")}, step ${each("step")}, lag ${each("lag")}: log D ${amount(each("log_d"))}, log S ${amount(each("log_s"))}, ${outcomeWord(this.found.outcomes[each("outcome")])}. Click to read it.`;
  }
}
