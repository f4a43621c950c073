// Adds the event listeners and starts the page.

Chart.prototype.listen = function () {
  const { box, over } = this;
  const at = (event) => {
    const frame = over.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top];
  };
  box.addEventListener("scroll", () => this.ask());
  window.addEventListener("resize", () => {
    this.layOut();
    this.ask();
  });
  box.addEventListener(
    "wheel",
    (event) => {
      const [x] = at(event);
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
      if (!sideways && x < LEFT) return; // the wheel scrolls over the names of ranks
      event.preventDefault();
      if (sideways) this.pan(sideways / (this.wide - LEFT));
      else this.zoom(Math.exp(Math.min(200, Math.max(-200, event.deltaY)) * 0.002), this.scale.time(Math.max(x, LEFT)));
    },
    { passive: false },
  );
  let drag = null;
  over.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const [x, y] = at(event);
    drag = { x, y, from: this.from, until: this.until, scrolled: box.scrollTop, selects: event.shiftKey || y < AXIS };
    over.setPointerCapture(event.pointerId);
    over.classList.toggle("dragged", !drag.selects);
  });
  over.addEventListener("pointermove", (event) => {
    const [x, y] = (this.pointer = at(event));
    if (!drag) return this.point(x, y);
    if (drag.selects) {
      const context = this.fitted(over);
      context.fillStyle = scheme().memory;
      context.globalAlpha = 0.25;
      context.fillRect(Math.min(x, drag.x), 0, Math.abs(x - drag.x), this.high);
      context.globalAlpha = 1;
      return;
    }
    const by = ((x - drag.x) / (this.scale.right - LEFT)) * (drag.until - drag.from);
    box.scrollTop = drag.scrolled - (y - drag.y);
    this.show(drag.from - by, drag.until - by);
  });
  const release = (event) => {
    if (drag?.selects && event.type === "pointerup") {
      const [first, last] = [drag.x, at(event)[0]].sort((a, b) => a - b).map((x) => this.scale.time(x));
      if (last - first > (this.until - this.from) * 0.005) this.show(first, last);
      else this.ask();
    }
    drag = null;
    over.classList.remove("dragged");
  };
  over.addEventListener("pointerup", release);
  over.addEventListener("pointercancel", release);
  over.addEventListener("pointerleave", () => {
    this.pointer = null;
    this.tip.hidden = true;
    this.fitted(over);
  });
  over.addEventListener("dblclick", (event) => this.zoom(0.25, this.scale.time(at(event)[0])));

  const actions = {
    nearer: () => this.zoom(0.5),
    farther: () => this.zoom(2),
    fit: () => this.fit(),
    group: () => this.group(),
    hatch: () => this.hatch(),
  };
  for (const [button, act] of Object.entries(actions)) document.getElementById(button)?.addEventListener("click", act);
  const keys = {
    "+": actions.nearer, "=": actions.nearer, w: actions.nearer, "-": actions.farther, s: actions.farther,
    0: actions.fit, Home: actions.fit, g: actions.group, h: actions.hatch,
    ArrowLeft: () => this.pan(-0.2), a: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), d: () => this.pan(0.2),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    if (event.key === "g" && this.views.length < 2) return;
    event.preventDefault();
    keys[event.key]();
  });

  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.ask());
  const paper = window.matchMedia("print");
  paper.addEventListener("change", () => this.print(paper.matches));
  if (paper.matches) this.print(true);
  window.addEventListener("beforeprint", () => this.print(true));
  window.addEventListener("afterprint", () => this.print(false));
};

async function start() {
  const buffer = await inflated(document.getElementById("arrays").textContent);
  const views = page.views.map((view) => new View(view, buffer, page));
  legend(views, false);
  const chart = new Chart(views);
  // For tests and for inspection from the console.
  window.timeline = {
    chart,
    passes: views.map((view) => view.passes),
    get seen() {
      return chart.seen.map((each) => each.reduce((sum, one) => sum + one, 0));
    },
    get window() {
      return [chart.from, chart.until];
    },
    get last() {
      return chart.last;
    },
    show: (from, until) => {
      chart.show(from, until);
      return chart.draw();
    },
    scroll: (top) => {
      chart.box.scrollTop = top;
      return chart.draw();
    },
  };
}

const page = JSON.parse(document.getElementById("contents").textContent);
start().catch((error) => {
  document.getElementById("failed").hidden = false;
  document.getElementById("failed").textContent = `This browser cannot show the timeline: ${error.message}`;
  throw error;
});
