// Load what an element shows only while it is in view, because answers take time of the server, which
// may share its processor with the training.

// `load` is called after `refresh`, once one of the elements is in view or close to it. Between two
// calls there are at least `pause` milliseconds, and `rest` times the time that the answer took.
export function whileInView(elements, load, { pause = 0, rest = 10 } = {}) {
  const inView = new Set();
  let [isStale, isResting] = [false, false];
  async function next() {
    if (!inView.size || !isStale || isResting) return;
    [isStale, isResting] = [false, true];
    const began = performance.now();
    await load();
    setTimeout(() => {
      isResting = false;
      next();
    }, Math.max(pause, rest * (performance.now() - began)));
  }
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) inView[isIntersecting ? "add" : "delete"](target);
    next();
  }, { rootMargin: "300px" });
  for (const element of elements) watch.observe(element);
  return { refresh: () => ((isStale = true), next()), close: () => (watch.disconnect(), inView.clear()) };
}
