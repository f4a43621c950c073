// Text for the item under the pointer, and the legend.

/** A time with its unit, to about a thousandth of the visible range. */
function span(time) {
  const digits = Math.min(6, Math.max(0, 3 - Math.floor(Math.log10(Math.abs(time) || 1))));
  return `${Number(time.toFixed(digits))}${page.unit ? ` ${page.unit}` : ""}`;
}

/** An amount of memory with its unit: bytes if they were measured or the size of a microbatch is known. */
function amount(held, { unit, one }) {
  if (unit !== "bytes") {
    const text = `${Number(held.toFixed(2))} microbatch${held === 1 ? "" : "es"}`;
    return one ? `${text} (${amount(held * one, { unit: "bytes" })})` : text;
  }
  const power = held > 0 ? Math.min(4, Math.floor(Math.log2(held) / 10)) : 0;
  return `${Number((held / 1024 ** power).toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** Peak memory of a rank, in a short form. */
function peaked(view, rank) {
  const most = view.peak(rank);
  return view.unit === "bytes" ? amount(most, view) : `holds ${Number(most.toFixed(2))}`;
}

function name(view, pass) {
  return `${view.stage[pass]}${page.kinds[view.kind[pass]].letter}${view.microbatch[pass]}`;
}

/** The idle time of a rank before one of its passes: its start and its phase. */
function idleBefore(view, rank, pass) {
  const row = view.rowOf(rank, 0);
  const from = pass > view.rows[row] ? view.end[pass - 1] : 0;
  const [warm, cool] = view.turns[rank];
  const tiny = 1e-7 * page.until;
  const phase = view.start[pass] <= warm + tiny ? "warm-up" : from >= cool - tiny ? "cool-down" : "steady state";
  return { from, long: view.start[pass] - from, phase };
}

/** Describes the pass that a rank waited for before a pass. */
function waited(view, rank, pass) {
  const { long, phase } = idleBefore(view, rank, pass);
  if (long <= 1e-9 * page.until) return null;
  const awaited = view.awaited[pass];
  if (awaited < 0) return `began ${span(long)} late (${phase}) by itself: its host, or a late message`;
  const [whose] = view.place(awaited);
  const whom = whose === rank ? `its own copy ${name(view, awaited)}` : `${name(view, awaited)} of rank ${whose}`;
  return `waited ${span(long)} (${phase}) for ${whom}, which ended at ${span(view.end[awaited])}`;
}

/** Tags and texts for the item under the pointer. */
function told(found, chart) {
  const { view, rank, pass, next, time } = found;
  const held = `rank ${rank} holds ${amount(view.heldAt(rank, time), view)}, at most ${amount(view.peak(rank), view)}`;
  if (pass >= 0) {
    const kind = page.kinds[view.kind[pass]];
    const stage = view.stage[pass];
    const chunk = view.chunks > 1 ? `, chunk ${view.chunkOf[stage]}` : "";
    const lines = [
      ["b", `${name(view, pass)} ${kind.meaning}`],
      ["div", `${view.label}: stage ${stage} on rank ${rank}${chunk}, microbatch ${view.microbatch[pass]}`],
      ["div", `${span(view.start[pass])} to ${span(view.end[pass])}: ${span(view.end[pass] - view.start[pass])}`],
    ];
    const wait = found.lane === 0 ? waited(view, rank, pass) : null;
    if (wait) lines.push(["div", wait]);
    for (const other of chart.views) {
      const twin = other === view ? -1 : same(other, view, pass);
      if (twin >= 0) lines.push(["div", `${other.label}: at ${span(other.start[twin])}, ${span(other.end[twin] - other.start[twin])}`]);
    }
    return [...lines, ["small", held]];
  }
  if (time > view.makespan) return null;
  if (next >= 0) {
    const { from, phase } = idleBefore(view, rank, next);
    const lines = [["b", `idle, ${phase}`], ["div", `from ${span(from)} until ${name(view, next)} at ${span(view.start[next])}`]];
    return [...lines, ["div", waited(view, rank, next) ?? ""], ["small", held]];
  }
  if (next === -2) return [["b", "idle, cool-down"], ["div", "nothing left to do"], ["small", held]];
  return [["b", `${view.label}, at ${span(time)}`], ["div", held]];
}

/** Paints swatches in the legend in the style of the passes. */
function legend(views, hatches) {
  for (const swatch of document.querySelectorAll("canvas.swatch")) {
    const kind = page.kinds.findIndex((each) => each.letter === swatch.dataset.kind);
    const view = views.find((each) => each.looks.some((_, look) => each.kindOf(look) === kind));
    if (!view) continue;
    const colours = view.fills[kind];
    const sharp = window.devicePixelRatio || 1;
    swatch.width = 14 * colours.length * sharp;
    swatch.height = 14 * sharp;
    swatch.style.width = `${14 * colours.length}px`;
    const context = swatch.getContext("2d");
    context.scale(sharp, sharp);
    colours.forEach(([colour, ink], chunk) => {
      context.fillStyle = hatches ? hatched(context, kind, colour, ink) : colour;
      context.fillRect(14 * chunk, 0, 13.5, 14);
    });
  }
}
