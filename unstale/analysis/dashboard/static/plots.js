// The plots of a comparison or a study, from the attribute that report/plots.py writes.

import { Plot } from "./chart.js";
import { switchable } from "./theme.js";

switchable();
for (const box of document.querySelectorAll("[data-plot]")) {
  const { series, ...options } = JSON.parse(box.dataset.plot);
  const plot = new Plot(options);
  box.append(plot.element);
  plot.set(series);
}
