"use strict";
const root = document.documentElement;
root.classList.add("scripted");

document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

// Show the attribute data-tip of the element under the pointer. It is set as text, never as markup.
const tip = document.getElementById("tip");
for (const title of document.querySelectorAll("[data-tip] > title")) title.remove();
for (const element of document.querySelectorAll("[data-tip][title]")) element.removeAttribute("title");
document.addEventListener("pointermove", (event) => {
  const element = event.target.closest ? event.target.closest("[data-tip]") : null;
  tip.hidden = !element;
  if (!element) return;
  tip.textContent = element.dataset.tip;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, event.clientY - box.height - 10)}px`;
});
document.addEventListener("pointerleave", () => { tip.hidden = true; });
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

for (const timeline of document.querySelectorAll(".timeline")) {
  const first = Number(timeline.dataset.first), last = Number(timeline.dataset.last);
  const lanes = [...timeline.querySelectorAll(".lane svg")];
  const ticks = timeline.querySelector(".ticks"), strip = timeline.querySelector(".overview");
  const mark = timeline.querySelector(".window");
  let from = Number(timeline.dataset.from), to = Number(timeline.dataset.to);

  const show = (start, end) => {
    const span = Math.min(Math.max(end - start, 0.05), last - first);
    from = Math.min(Math.max(start, first), last - span);
    to = from + span;
    for (const lane of lanes) lane.setAttribute("viewBox", `${from} 0 ${span} ${lane.viewBox.baseVal.height}`);
    mark.style.left = `${(100 * (from - first)) / (last - first)}%`;
    mark.style.right = `${(100 * (last - to)) / (last - first)}%`;
    const raw = span / Math.max(2, ticks.clientWidth / 110);
    const size = 10 ** Math.floor(Math.log10(raw));
    const gap = [1, 2, 5, 10].map((factor) => factor * size).find((step) => step >= raw);
    ticks.replaceChildren();
    for (let at = Math.ceil(from / gap) * gap; at <= to; at += gap) {
      const label = document.createElement("span");
      label.textContent = `${Number(at.toPrecision(6))} s`;
      label.style.left = `${(100 * (at - from)) / span}%`;
      ticks.append(label);
    }
  };
  show(from, to);
  addEventListener("resize", () => show(from, to));

  const moves = {
    earlier: () => show(from - (to - from) / 2, to - (to - from) / 2),
    later: () => show(from + (to - from) / 2, to + (to - from) / 2),
    closer: () => show(from + (to - from) / 4, to - (to - from) / 4),
    farther: () => show(from - (to - from) / 2, to + (to - from) / 2),
    all: () => show(first, last),
  };
  for (const button of timeline.parentElement.querySelectorAll("[data-move]"))
    button.addEventListener("click", moves[button.dataset.move]);

  const brush = document.createElement("i");
  brush.className = "brush";
  for (const lane of lanes) {
    let begun = null;
    lane.addEventListener("pointerdown", (event) => { begun = event.clientX; lane.setPointerCapture(event.pointerId); });
    lane.addEventListener("pointermove", (event) => {
      if (begun === null || Math.abs(event.clientX - begun) < 4) return;
      const box = timeline.getBoundingClientRect(), left = Math.min(begun, event.clientX);
      brush.style.left = `${left - box.left}px`;
      brush.style.width = `${Math.abs(event.clientX - begun)}px`;
      brush.style.height = `${ticks.getBoundingClientRect().top - box.top}px`;
      timeline.append(brush);
    });
    lane.addEventListener("pointerup", (event) => {
      const box = lane.getBoundingClientRect();
      const at = (x) => from + ((Math.min(Math.max(x, box.left), box.right) - box.left) / box.width) * (to - from);
      if (begun !== null && Math.abs(event.clientX - begun) >= 4)
        show(Math.min(at(begun), at(event.clientX)), Math.max(at(begun), at(event.clientX)));
      begun = null;
      brush.remove();
    });
    lane.addEventListener("pointercancel", () => { begun = null; brush.remove(); });
    lane.addEventListener("dblclick", moves.all);
  }
  const move = (event) => {
    const box = strip.getBoundingClientRect();
    const middle = first + ((event.clientX - box.left) / box.width) * (last - first);
    show(middle - (to - from) / 2, middle + (to - from) / 2);
  };
  strip.addEventListener("pointerdown", (event) => { strip.setPointerCapture(event.pointerId); move(event); });
  strip.addEventListener("pointermove", (event) => { if (event.buttons) move(event); });
}
