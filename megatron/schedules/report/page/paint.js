// Paints rows: single passes if there is room, else the busy share of the rank; memory; the axis.

const FONT = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif";
const DENSE = 2.5; // with fewer pixels per pass, columns are painted instead

/** Colours of the page, light or dark. */
function scheme(style = getComputedStyle(document.documentElement)) {
  const named = (name) => style.getPropertyValue(`--${name}`).trim();
  return { page: named("page"), lane: named("lane"), text: named("text"), faint: named("faint"), memory: named("memory"), mark: named("mark") };
}

/** Converts `#rrggbb` to a pixel of a canvas, a 32-bit integer. */
function pixel(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

// Strokes in a square of eight pixels, so that kinds differ on grey paper too.
const HATCHES = [
  [], [[0, 8, 8, 0]], [[0, 0, 8, 8]], [[0, 8, 8, 0], [0, 0, 8, 8]], [[4, 0, 4, 8]],
  [[0, 4, 8, 4]], [[0, 4, 8, 4], [4, 0, 4, 8]], [[2, 2, 4, 4]], [[4, 2, 2, 4], [6, 6, 8, 8]],
];

/** Fill of `colour`, with the hatching of `kind`. */
function hatched(context, kind, colour, ink) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const on = tile.getContext("2d");
  on.fillStyle = colour;
  on.fillRect(0, 0, 8, 8);
  on.strokeStyle = ink;
  on.globalAlpha = 0.75;
  for (const [x, y, toX, toY] of HATCHES[kind % HATCHES.length]) {
    on.beginPath();
    on.moveTo(x, y);
    on.lineTo(toX, toY);
    on.stroke();
  }
  return context.createPattern(tile, "repeat");
}

/** Paints on one canvas and counts the painted items; `scale` converts times to positions. */
class Painter {
  constructor(context, scale, colours, hatches) {
    Object.assign(this, { context, scale, colours, hatches });
    this.drawn = this.merged = 0;
    this.patterns = new Map();
  }

  fill(view, look) {
    const [colour, ink] = view.colours(look);
    if (!this.hatches) return colour;
    const key = `${view.kindOf(look)}${colour}`;
    if (!this.patterns.has(key)) this.patterns.set(key, hatched(this.context, view.kindOf(look), colour, ink));
    return this.patterns.get(key);
  }

  /** Paints the visible part of one lane. `seen` gets a 1 for each pass painted separately. */
  lane(view, row, top, height, letters, seen) {
    const { context, scale } = this;
    context.fillStyle = this.colours.lane;
    const [left, right] = [Math.max(scale.left, scale.x(0)), Math.min(scale.right, scale.x(view.makespan))];
    if (right > left) context.fillRect(left, top, right - left, height);
    const [first, last] = view.between(row, scale.from, scale.until);
    if (last <= first) return;
    if ((last - first) * DENSE > scale.right - scale.left) {
      this.merged += last - first;
      this.columns(view, first, last, top, height);
      return;
    }
    this.drawn += last - first;
    if (seen) seen.fill(1, first, last);
    for (let i = first; i < last; i++) {
      const from = Math.max(scale.left, scale.x(view.start[i]));
      const wide = Math.min(scale.right, scale.x(view.end[i])) - from;
      context.fillStyle = this.fill(view, view.look[i]);
      context.fillRect(from, top, Math.max(0.6, wide > 5 ? wide - 0.8 : wide), height);
    }
    if (letters && height >= 11) this.labels(view, first, last, top, height);
  }

  /** Kind and microbatch, or the one that fits with the longest microbatch number. */
  labels(view, first, last, top, height) {
    const { context, scale } = this;
    const size = Math.min(11, height - 2);
    context.font = `${size}px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let i = first; i < last; i++) {
      const from = Math.max(scale.left, scale.x(view.start[i]));
      const wide = Math.min(scale.right, scale.x(view.end[i])) - from - 2;
      if (wide < size * 0.7) continue;
      const [letter, number] = [page.kinds[view.kind[i]].letter, String(view.microbatch[i])];
      // A digit is at most 0.64 of the font size wide; letters are as wide as W.
      const digits = 0.64 * view.digits;
      const fits = [[letter + number, 1 + digits], [number, digits], [letter, 1]].find(([, each]) => each * size <= wide);
      const label = fits?.[0];
      if (label === undefined) continue;
      const ink = view.colours(view.look[i])[1];
      const x = from + wide / 2 + 0.6;
      const y = top + height / 2 + 0.5;
      if (this.hatches) {
        context.lineWidth = 3;
        context.lineJoin = "round";
        context.strokeStyle = view.colours(view.look[i])[0];
        context.strokeText(label, x, y);
      }
      context.fillStyle = ink;
      context.fillText(label, x, y);
    }
  }

  /**
   * Paints a column for each pixel. Its colours show the share of time of each kind of each chunk; idle time stays
   * empty. Pixels are set directly: a browser without a GPU would need 0.1 s for as many small rectangles.
   */
  columns(view, first, last, top, height) {
    const { context, scale } = this;
    const sharp = window.devicePixelRatio || 1;
    const until = Math.min(scale.right, scale.x(view.makespan));
    const [looks, wide, high] = [view.looks.length, Math.round((until - scale.left) * sharp), Math.round(height * sharp)];
    if (wide < 1) return;
    const shares = new Float32Array(looks * wide);
    const each = (scale.x(scale.from + 1) - scale.left) * sharp;
    for (let i = first; i < last; i++) {
      const from = Math.max(0, (view.start[i] - scale.from) * each);
      const to = Math.min(wide, (view.end[i] - scale.from) * each);
      const at = view.look[i] * wide;
      for (let x = Math.floor(from); x < to; x++) shares[at + x] += Math.min(to, x + 1) - Math.max(from, x);
    }
    const image = context.createImageData(wide, high);
    const pixels = new Uint32Array(image.data.buffer).fill(pixel(this.colours.lane));
    const fills = view.looks.map((_, look) => pixel(view.colours(look)[0]));
    for (let x = 0; x < wide; x++) {
      let level = high;
      let bottom = high;
      for (let look = 0; look < looks; look++) {
        level -= shares[look * wide + x] * high;
        const ceiling = Math.max(0, Math.round(level));
        for (let y = ceiling; y < bottom; y++) pixels[y * wide + x] = fills[look];
        bottom = ceiling;
      }
    }
    context.putImageData(image, Math.round(scale.left * sharp), Math.round(top * sharp));
  }

  /** Paints the memory of a rank; `most` has the full height. */
  memory(view, rank, top, height, most) {
    const { context, scale } = this;
    const [low, high] = [view.levels[rank], view.levels[rank + 1]];
    const bottom = top + height;
    const level = (held) => bottom - (most > 0 ? held / most : 0) * (height - 1);
    const last = after(view.time, low, high, scale.until);
    const left = Math.max(scale.left, scale.x(0));
    const right = Math.min(scale.right, scale.x(view.makespan));
    if (right <= left) return;
    let held = view.heldAt(rank, Math.max(0, scale.from));
    const line = new Path2D();
    line.moveTo(left, level(held));
    const each = scale.x(scale.from + 1) - scale.left;
    for (let i = after(view.time, low, high, Math.max(0, scale.from)); i < last; i++) {
      const x = scale.left + (view.time[i] - scale.from) * each;
      const next = scale.from + (x + 1 - scale.left) / each;
      if (i + 1 < last && view.time[i + 1] < next) {
        // If steps are narrower than a pixel, paint the highest of them.
        let highest = held;
        for (; i + 1 < last && view.time[i + 1] < next; i++) highest = Math.max(highest, view.held[i]);
        line.lineTo(x, level(Math.max(highest, view.held[i])));
      } else {
        line.lineTo(x, level(held));
        line.lineTo(x, level(view.held[i]));
      }
      held = view.held[i];
    }
    line.lineTo(right, level(held));
    const area = new Path2D(line);
    area.lineTo(right, bottom);
    area.lineTo(left, bottom);
    context.fillStyle = context.strokeStyle = this.colours.memory;
    context.globalAlpha = 0.28;
    context.fill(area);
    context.globalAlpha = 1;
    context.lineWidth = 1;
    context.stroke(line);
  }

  /** Paints the end of the rank's warm-up and the start of its cool-down. */
  turns(view, rank, top, height) {
    const { context, scale } = this;
    context.strokeStyle = this.colours.mark;
    context.lineWidth = 1.5;
    context.setLineDash([3, 2]);
    for (const time of view.turns[rank]) {
      const x = scale.x(time);
      if (x <= scale.left || x >= scale.right) continue;
      context.beginPath();
      context.moveTo(x, top - 2);
      context.lineTo(x, top + height + 2);
      context.stroke();
    }
    context.setLineDash([]);
  }

  text(content, x, y, align = "left", colour = this.colours.faint, font = "12px") {
    const { context } = this;
    context.font = `${font} ${FONT}`;
    context.textAlign = align;
    context.textBaseline = "middle";
    context.fillStyle = colour;
    context.fillText(content, x, y);
  }

  /** Paints round times, with lines down to `bottom`. */
  axis(top, bottom) {
    const { context, scale } = this;
    const step = roundStep((scale.until - scale.from) / Math.max(2, (scale.right - scale.left) / 110));
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    for (let at = Math.ceil(scale.from / step) * step; at <= scale.until + step * 1e-6; at += step) {
      const x = scale.x(at);
      context.fillStyle = this.colours.faint;
      context.fillRect(x, bottom - 5, 1, 5);
      const label = `${Math.abs(at) < step / 2 ? "0" : at.toFixed(digits)}${page.unit ? ` ${page.unit}` : ""}`;
      const half = label.length * 3.2;
      this.text(label, Math.min(Math.max(x, scale.left + half - 6), scale.right - half), top + 9, "center", this.colours.faint, "11px");
    }
    context.fillRect(scale.left, bottom - 1, scale.right - scale.left, 1);
  }
}

/** Returns 1, 2 or 5 times a power of ten, at least `least`. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= least * (1 - 1e-9));
}
