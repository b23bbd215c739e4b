// Show the page that the part of the address after # names.

import { h, replace } from "./dom.js";
import { switchable } from "./theme.js";

const content = document.getElementById("content");
const trail = document.getElementById("trail");

// Begin with some pages by pattern: the parts of the address, `:name` for a part that varies, the
// page, and a function of the parts that returns the trail. A page returns {close, moved}: `moved`
// is called, if there is one, when only its own parts changed. `absent` is what no pattern fits.
export function start(pages, absent) {
  let current = null;

  function read() {
    const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
    const parts = path.replace(/\/$/, "").split("/");
    for (const [pattern, page, crumbs] of pages) {
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
      replace(content, absent());
      return;
    }
    const last = found.crumbs.length - 1;
    replace(trail, found.crumbs.map(([text, href], index) => h("a", { href, "aria-current": index === last ? "page" : undefined }, text)));
    document.title = `${[...found.crumbs.map(([text]) => text)].reverse().join(" · ") || "runs"} · unstale`;
    current = { ...found, ...found.page(content, found.at, found.query) };
  }

  switchable();
  addEventListener("hashchange", show);
  show();
}
