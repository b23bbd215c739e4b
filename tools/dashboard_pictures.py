"""Take the pictures of docs/dashboard.md, in Chromium.

    python -m tools.dashboard_pictures RUNS     # a folder with the two runs of the page's story

docs/dashboard.md has the commands that train the runs. Each picture must be below 60 kB.
"""

import argparse
import base64
import json
import threading
import time
from pathlib import Path

from tests.support.chromium import Page, browser
from unstale.analysis.dashboard.server import Dashboard

DOCS = Path(__file__).parent.parent / "docs"
MAX_BYTES = 60_000
WIDTH = 1180
RUN, OTHER = "recompute", "exact"
EPISODE, TOKEN = 400, 194

PICTURES = {
    "run": (f"run/{RUN}", ".uplot", 860),
    "timeline": (f"run/{OTHER}", ".lanes", 460),
    "episodes": (
        f"run/{RUN}/episodes?filter=step%3D7&sort=-log_d_abs_max",
        "tbody tr:first-child",
        560,
    ),
    "episode": (f"run/{RUN}/episode/{EPISODE}/token/{TOKEN}?colour=log_d", ".selected", 640),
    "factors": (f"run/{RUN}/factors", ".scatter[aria-label*=' tokens.']", 760),
    "selected": (f"run/{RUN}/factors?step_max=7&d_max=-0.693147", "#selected tr", 520),
    "compare": (f"compare?a={RUN}&b={OTHER}", ".uplot", 640),
}
"""Pictures by name: address, an element that exists when the page is complete, height."""

READ = f"""(async () => {{
  for (const run of ['{RUN}', '{OTHER}']) {{
    for (;;) {{
      const found = await (await fetch(`/api/run?run=${{run}}`)).json();
      if (found.index.complete) break;
      await new Promise((done) => setTimeout(done, 300));
    }}
  }}
}})()"""
"""Wait until the index has both runs."""

SETTLE_S = 4.0
"""Seconds in which the plots of a complete page get their values."""


def take(page: Page, name: str, target: Path) -> None:
    """Save a picture of a page as WebP. Raises ValueError if it is too large."""
    path, element, height = PICTURES[name]
    page.resize(WIDTH, height)
    page.run(f"location.hash = {json.dumps('#/' + path)}")
    page.wait(f"document.querySelector({json.dumps(element)})")
    for _ in range(2):  # plots that come into view move what is below them
        centre = "scrollIntoView({ block: 'center' })"
        page.run(f"document.querySelector({json.dumps(element)}).{centre}")
        time.sleep(SETTLE_S / 2)
    shot = page.call("Page.captureScreenshot", format="webp", quality=72)
    content = base64.b64decode(shot["data"])
    if len(content) > MAX_BYTES:
        raise ValueError(f"{target} has {len(content)} bytes, at most {MAX_BYTES} are allowed")
    target.write_bytes(content)
    print(f"{target}: {len(content) / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, help=f"a folder with the runs {RUN} and {OTHER}")
    parser.add_argument("--out", type=Path, default=DOCS)
    parser.add_argument("--only", choices=PICTURES, nargs="*", default=[*PICTURES])
    chosen = parser.parse_args()
    dashboard = Dashboard(chosen.runs)
    thread = threading.Thread(target=dashboard.serve)
    thread.start()
    try:
        with browser() as page:
            page.resize(WIDTH, 800)
            page.open(dashboard.url)
            page.wait("document.querySelector('tbody tr')")
            page.run(READ)
            for name in chosen.only:
                take(page, name, chosen.out / f"dashboard-{name}.webp")
    finally:
        dashboard.stop()
        thread.join()


if __name__ == "__main__":
    main()
