// Links that save a selection as a file, which the server sends in parts.

import { h } from "./dom.js";

// `what` names the rows, `params` is the selection. Parquet is explained where it cannot be written.
export function downloads(what, params, parquetProblem) {
  const query = (format) => {
    const given = Object.entries({ ...params, format }).filter(([, value]) => value !== undefined && value !== null && value !== "");
    return `/api/export?${new URLSearchParams(given)}`;
  };
  const link = (format, name) => h("a", { class: "go", href: query(format), download: "" }, name);
  return h("span", { class: "downloads" }, `save ${what} as `, link("jsonl", "JSONL"), parquetProblem ? h("small", { class: "quiet" }, ` (${parquetProblem})`) : [" or ", link("parquet", "Parquet")]);
}
