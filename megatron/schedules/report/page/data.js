// Unpacks the data of the page into typed arrays.

const TYPES = { B: Uint8Array, I: Uint32Array, i: Int32Array, f: Float32Array };

/** Decodes a zlib stream in base64 to bytes. */
async function inflated(text) {
  const squeezed = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([squeezed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/**
 * Running sums of `steps`, in the unit of the axis, from 0 again at each index in `starts`. `lengths`, if any, are
 * added to the following sums.
 */
function accumulated(steps, starts, unit, lengths) {
  const found = new Float64Array(steps.length);
  for (let row = 0; row + 1 < starts.length; row++) {
    let now = 0;
    for (let i = starts[row]; i < starts[row + 1]; i++) {
      now += steps[i];
      found[i] = now * unit;
      now += lengths ? lengths[i] : 0;
    }
  }
  return found;
}

/** One timeline: its passes row by row (a row for each lane of each rank), and its steps of memory by rank. */
class View {
  constructor(written, buffer, page) {
    Object.assign(this, written);
    for (const [name, value] of Object.entries(written)) {
      if (Array.isArray(value) && value.length === 3 && TYPES[value[0]]) {
        this[name] = new TYPES[value[0]](buffer, value[1], value[2]);
      }
    }
    const unit = page.until / page.ticks;
    this.start = accumulated(this.gap, this.rows, unit, this.length);
    this.end = Float64Array.from(this.start, (start, i) => start + this.length[i] * unit);
    this.time = accumulated(this.since, this.levels, unit, null);
    this.peaks = Array.from({ length: this.ranks }, (_, rank) => this.peakOf(rank));
    this.most = Math.max(...this.peaks);
    this.passes = this.kind.length;
    this.digits = String(this.microbatch.reduce((most, each) => Math.max(most, each), 0)).length;
    this.findLooks();
  }

  /** Numbers the looks (a kind of a chunk) in use, in the order of kinds. */
  findLooks() {
    const each = Uint16Array.from(this.kind, (kind, i) => kind * this.chunks + this.chunkOf[this.stage[i]]);
    this.looks = [...new Set(each)].sort((a, b) => a - b);
    const numbers = new Map(this.looks.map((look, at) => [look, at]));
    this.look = Uint16Array.from(each, (look) => numbers.get(look));
  }

  kindOf(look) {
    return Math.floor(this.looks[look] / this.chunks);
  }

  colours(look) {
    return this.fills[this.kindOf(look)][this.looks[look] % this.chunks];
  }

  rowOf(rank, lane) {
    return rank * this.lanes + lane;
  }

  /** The rank and lane of a pass. */
  place(pass) {
    const row = after(this.rows, 0, this.rows.length, pass) - 1;
    return [Math.floor(row / this.lanes), row % this.lanes];
  }

  /** The passes of a row between two times: the first one, and the one after the last. */
  between(row, from, until) {
    const [low, high] = [this.rows[row], this.rows[row + 1]];
    return [after(this.end, low, high, from), Math.max(low, after(this.start, low, high, until))];
  }

  /** The pass of a row that runs at a time, or -1. */
  at(row, time) {
    const index = after(this.start, this.rows[row], this.rows[row + 1], time) - 1;
    return index >= this.rows[row] && time < this.end[index] ? index : -1;
  }

  /** Activation memory of a rank at a time. */
  heldAt(rank, time) {
    const index = after(this.time, this.levels[rank], this.levels[rank + 1], time) - 1;
    return index >= this.levels[rank] ? this.held[index] : 0;
  }

  /** Peak activation memory of a rank. */
  peak(rank) {
    return this.peaks[rank];
  }

  peakOf(rank) {
    return this.held.subarray(this.levels[rank], this.levels[rank + 1]).reduce((most, each) => Math.max(most, each), 0);
  }
}

/** The first index from `low` to `high` - 1 at which ascending `values` exceed `value`; else `high`. */
function after(values, low, high, value) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}
