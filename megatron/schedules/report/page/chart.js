// The chart: its layout, the visible part, and its response to wheel, drag, keys, buttons and pointer.

const LEFT = 96;
const AXIS = 26;
const HEADING = 26;
const GROUPS = ["by run", "by rank"];

class Chart {
  constructor(views) {
    this.views = views;
    this.grouping = this.hatches = this.printing = 0;
    this.from = 0;
    this.until = page.until;
    // Zoom limit: a pass of average length fills the chart.
    this.least = Math.min(...views.map((view) => (view.makespan * view.ranks) / Math.max(1, view.passes)), page.until / 8) / 2;
    this.seen = views.map((view) => new Uint8Array(view.passes));
    this.most = {};
    for (const view of views) this.most[view.unit] = Math.max(this.most[view.unit] ?? 0, view.most);
    this.box = document.getElementById("chart");
    this.canvas = document.getElementById("rows");
    this.over = document.getElementById("over");
    this.tip = document.getElementById("tip");
    this.last = { drawn: 0, merged: 0, rows: 0, ms: 0 };
    this.layOut();
    this.listen();
    this.draw();
  }

  /** Rows of all views, one for each rank, with their parts from top to bottom. */
  layOut() {
    const ranks = this.views.reduce((sum, view) => sum + view.ranks, 0);
    const room = this.printing ? 820 : Math.max(320, window.innerHeight - 270);
    const each = (room - HEADING * this.views.length) / ranks;
    const lane = Math.round(Math.min(24, Math.max(11, each * 0.55)));
    const memory = Math.round(Math.min(30, Math.max(7, each * 0.3)));
    const apart = each > 24 ? 6 : 3;
    this.rows = [];
    this.headings = [];
    let top = AXIS + 4;
    const add = (view, rank, label) => {
      const copies = Math.max(3, Math.round(lane * 0.25));
      const lanes = Array.from({ length: view.lanes }, (_, at) => ({
        top: top + (at ? lane + 1 + (at - 1) * (copies + 1) : 0),
        height: at ? copies : lane,
      }));
      const below = lanes.at(-1).top + lanes.at(-1).height + 1;
      this.rows.push({ view, rank, label, top, lanes, memory: { top: below, height: memory }, bottom: below + memory });
      top = below + memory + apart;
    };
    const heading = (text) => {
      this.headings.push({ text, top });
      top += HEADING;
    };
    if (this.grouping === 0) {
      for (const view of this.views) {
        heading(`${view.label}: ${view.said}`);
        for (let rank = 0; rank < view.ranks; rank++) add(view, rank, `rank ${rank}`);
        top += 6;
      }
    } else {
      for (let rank = 0; rank < Math.max(...this.views.map((view) => view.ranks)); rank++) {
        heading(`rank ${rank}`);
        for (const view of this.views) if (rank < view.ranks) add(view, rank, view.label);
      }
    }
    this.height = top + 4;
    const tallest = this.printing ? this.height : Math.max(300, window.innerHeight - 190);
    this.box.style.height = `${Math.min(this.height, tallest)}px`;
    document.getElementById("tall").style.height = `${this.height}px`;
  }

  get scale() {
    const [left, right] = [LEFT, this.wide - 12];
    const { from, until } = this;
    const each = (right - left) / (until - from);
    return { from, until, left, right, x: (time) => left + (time - from) * each, time: (x) => from + (x - left) / each };
  }

  /** Makes a canvas as large as the visible part of the chart, at screen resolution. Returns its cleared context. */
  fitted(canvas) {
    const sharp = window.devicePixelRatio || 1;
    const [wide, high] = [this.wide, this.high];
    if (canvas.width !== Math.round(wide * sharp) || canvas.height !== Math.round(high * sharp)) {
      canvas.width = Math.round(wide * sharp);
      canvas.height = Math.round(high * sharp);
      canvas.style.width = `${wide}px`;
      canvas.style.height = `${high}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(sharp, 0, 0, sharp, 0, 0);
    context.clearRect(0, 0, wide, high);
    return context;
  }

  draw() {
    const began = performance.now();
    this.waiting = false;
    this.wide = this.box.clientWidth;
    this.high = this.printing ? this.height : this.box.clientHeight;
    const scrolled = this.box.scrollTop;
    const context = this.fitted(this.canvas);
    const colours = scheme();
    context.fillStyle = colours.page;
    context.fillRect(0, 0, this.wide, this.high);
    const painter = new Painter(context, this.scale, colours, this.hatches || this.printing);
    let shown = 0;
    for (const row of this.rows) {
      if (row.bottom < scrolled + AXIS || row.top > scrolled + this.high) continue;
      shown++;
      const { view, rank } = row;
      row.lanes.forEach(({ top, height }, lane) => {
        painter.lane(view, view.rowOf(rank, lane), top - scrolled, height, lane === 0, this.seen[this.views.indexOf(view)]);
      });
      painter.turns(view, rank, row.top - scrolled, row.lanes[0].height);
      painter.memory(view, rank, row.memory.top - scrolled, row.memory.height, this.most[view.unit]);
      const [first] = row.lanes;
      painter.text(row.label, LEFT - 10, first.top - scrolled + first.height / 2 + 0.5, "right", colours.text);
      if (row.bottom - row.top >= 30) {
        const middle = row.memory.top - scrolled + row.memory.height / 2 + 1;
        painter.text(peaked(view, rank), LEFT - 10, middle, "right", colours.faint, "10.5px");
      }
    }
    for (const { text, top } of this.headings) {
      const y = top - scrolled + HEADING / 2 + 2;
      if (y > AXIS - HEADING && y < this.high + HEADING) {
        painter.text(text, this.grouping ? LEFT - 10 : 4, y, this.grouping ? "right" : "left", colours.text, "600 13px");
      }
    }
    context.fillStyle = colours.page;
    context.fillRect(0, 0, this.wide, AXIS);
    painter.axis(0, AXIS);
    this.last = { drawn: painter.drawn, merged: painter.merged, rows: shown, ms: performance.now() - began };
    this.fitted(this.over);
    if (this.pointer) this.point(...this.pointer);
    return this.last;
  }

  /** Draws once before the next frame, even if called several times. */
  ask() {
    if (!this.waiting) requestAnimationFrame(() => this.draw());
    this.waiting = true;
  }

  /** Shows a range of times, limited to the chart. */
  show(from, until) {
    const span = Math.min(page.until, Math.max(this.least, until - from));
    const middle = (from + until) / 2;
    this.from = Math.min(Math.max(0, middle - span / 2), page.until - span);
    this.until = this.from + span;
    this.ask();
  }

  /** Multiplies the visible range by `factor`; `time` keeps its position. */
  zoom(factor, time = (this.from + this.until) / 2) {
    const span = Math.min(page.until, Math.max(this.least, (this.until - this.from) * factor));
    const from = time - ((time - this.from) / (this.until - this.from)) * span;
    this.show(from, from + span);
  }

  /** Moves by a share of the visible range. */
  pan(share) {
    const by = share * (this.until - this.from);
    this.show(this.from + by, this.until + by);
  }

  fit() {
    this.show(0, page.until);
  }

  group() {
    this.grouping = 1 - this.grouping;
    document.getElementById("group").textContent = GROUPS[1 - this.grouping];
    this.layOut();
    this.ask();
  }

  hatch() {
    this.hatches = 1 - this.hatches;
    legend(this.views, this.hatches || this.printing);
    this.ask();
  }

  /** Draws the whole chart hatched for paper, or the visible part for the screen. */
  print(on) {
    if (Boolean(this.printing) === on) return;
    this.printing = on ? 1 : 0;
    this.layOut();
    legend(this.views, this.hatches || this.printing);
    this.draw();
  }

  /** Returns the row at a point of the chart, and the pass there or the idle time before the next one. */
  under(x, y) {
    const scale = this.scale;
    const down = y + this.box.scrollTop;
    if (x < scale.left || x > scale.right || y < AXIS) return null;
    const row = this.rows.find((each) => down >= each.top && down < each.bottom);
    if (!row) return null;
    const time = scale.time(x);
    const lane = row.lanes.findIndex((each) => down >= each.top && down < each.top + each.height + 1);
    const found = { ...row, time, lane, pass: -1, next: -1 };
    if (lane < 0) return found;
    const at = row.view.rowOf(row.rank, lane);
    found.pass = row.view.at(at, time);
    const next = after(row.view.start, row.view.rows[at], row.view.rows[at + 1], time);
    if (found.pass < 0 && lane === 0) found.next = next < row.view.rows[at + 1] ? next : -2;
    return found;
  }

  /** Describes the pass under the pointer. Marks it, the pass it waited for, and the same pass in the other views. */
  point(x, y) {
    const context = this.fitted(this.over);
    const found = this.under(x, y);
    const lines = found ? told(found, this) : null;
    this.tip.hidden = !lines;
    if (!lines) return;
    this.tip.replaceChildren(...lines.map(([tag, text]) => Object.assign(document.createElement(tag), { textContent: text })));
    const box = this.canvas.getBoundingClientRect();
    const [wide, high] = [this.tip.offsetWidth, this.tip.offsetHeight];
    const right = box.left + x + 16 + wide > window.innerWidth - 8;
    this.tip.style.left = `${Math.max(4, right ? box.left + x - 12 - wide : box.left + x + 16)}px`;
    this.tip.style.top = `${Math.max(4, Math.min(box.top + y + 14, window.innerHeight - high - 8))}px`;
    const colours = scheme();
    context.beginPath();
    context.rect(LEFT, AXIS, this.wide - LEFT, this.high);
    context.clip();
    context.strokeStyle = colours.text;
    context.globalAlpha = 0.35;
    context.fillStyle = colours.text;
    context.fillRect(x, AXIS, 1, this.high);
    context.globalAlpha = 1;
    const pass = found.pass >= 0 ? found.pass : found.next;
    if (pass < 0) return;
    this.frame(context, found.view, found.pass, 2);
    const awaited = found.view.awaited[pass];
    if (awaited >= 0) this.arrow(context, found.view, awaited, pass, colours.mark);
    if (found.pass >= 0) {
      for (const view of this.views) if (view !== found.view) this.frame(context, view, same(view, found.view, pass), 1);
    }
  }

  /** Position of a pass on the canvas. */
  cell(view, pass) {
    const [rank, lane] = view.place(pass);
    const row = this.rows.find((each) => each.view === view && each.rank === rank);
    const { top, height } = row.lanes[lane];
    return { from: this.scale.x(view.start[pass]), until: this.scale.x(view.end[pass]), top: top - this.box.scrollTop, height };
  }

  frame(context, view, pass, wide) {
    if (pass < 0) return;
    const { from, until, top, height } = this.cell(view, pass);
    context.lineWidth = wide;
    context.strokeRect(from - 1, top - 1, Math.max(2, until - from + 1), height + 2);
  }

  arrow(context, view, from, to, colour) {
    const [a, b] = [this.cell(view, from), this.cell(view, to)];
    const [x, y] = [a.until, a.top + a.height / 2];
    const [toX, toY] = [b.from, b.top + b.height / 2];
    this.frame(context, view, from, 1.5);
    context.strokeStyle = context.fillStyle = colour;
    context.lineWidth = 2;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(toX, toY);
    context.stroke();
    const turn = Math.atan2(toY - y, toX - x);
    context.beginPath();
    context.moveTo(toX, toY);
    context.lineTo(toX - 8 * Math.cos(turn - 0.4), toY - 8 * Math.sin(turn - 0.4));
    context.lineTo(toX - 8 * Math.cos(turn + 0.4), toY - 8 * Math.sin(turn + 0.4));
    context.fill();
  }
}

/** The pass of `view` with the stage, kind and microbatch of the pass of `other`; or -1. */
function same(view, other, pass) {
  const [rank, lane] = other.place(pass);
  if (rank >= view.ranks || lane >= view.lanes) return -1;
  const row = view.rowOf(rank, lane);
  for (let i = view.rows[row]; i < view.rows[row + 1]; i++) {
    const alike = view.kind[i] === other.kind[pass] && view.stage[i] === other.stage[pass];
    if (alike && view.microbatch[i] === other.microbatch[pass]) return i;
  }
  return -1;
}
