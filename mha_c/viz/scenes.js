// What each step of a player shows: which matrices stand where, and the arithmetic of the chosen cell.
//
// A scene is {title, formula, caption, group, make()}; make() gives {node, fit(width), draw(look), result, explain}.

// ---- arrangements ------------------------------------------------------------------------------------------------

const WITH_NUMBERS = 29; // the least width of a cell that shows its number

// The size of a cell that lets this many columns and rows fit, and still shows numbers where that is possible.
function cellSize(room, columns, rows, tall) {
  let w = clamp(room / columns, 5, 54);
  let h = clamp(tall / rows, 5, 36);
  if (w < WITH_NUMBERS || h < 18) w = h = Math.min(w, h, 24);
  return { w: Math.floor(w), h: Math.floor(h) };
}

// A product drawn as it is computed by hand: the left factor beside the result, the right factor above it, so that
// the row and the column that make a cell meet in it.
function product(left, top, result) {
  const node = el("div", { class: "mhac-product" }, el("span"), top.node, left.node, result.node);
  function fit(width, tall) {
    const [a, b, c] = [left.margins(), top.margins(), result.margins()];
    const side = Math.max(b.left, c.left);
    const room = width - a.left - side - Math.max(b.right, c.right) - 34;
    const cell = cellSize(room, left.width + result.width, top.height + result.height, tall - b.top - c.top);
    const head = Math.max(a.top, c.top);
    const below = cellSize(width - 100, Math.max(left.width, top.width, result.width), 3 * left.height, 900);
    const stacks = cell.w < WITH_NUMBERS && below.w >= WITH_NUMBERS; // one below the other, where numbers fit only so
    node.classList.toggle("mhac-stacked", stacks);
    if (stacks) {
      for (const grid of [left, top, result]) grid.setPlace(below, grid.margins());
      return;
    }
    left.setPlace(cell, { ...a, top: head });
    top.setPlace(cell, { ...b, left: side });
    result.setPlace(cell, { ...c, left: side, top: head });
  }
  return { node, fit, grids: [left, top, result], result,
    draw(look) {
      const { cell, shown } = look;
      left.draw({ row: cell.i });
      top.draw({ column: cell.j });
      result.draw({ cell, shown });
    } };
}

// Matrices side by side with signs between them; their rows line up.  Where they do not fit, they wrap.
function line(grids, signs, result) {
  const node = el("div", { class: "mhac-line" }, ...grids.flatMap((grid, i) =>
    (i ? [el("span", { class: "mhac-sign", text: signs[i - 1] || "" }), grid.node] : [grid.node])));
  function fit(width, tall) {
    const margins = grids.map((grid) => grid.margins());
    const head = Math.max(...margins.map((m) => m.top));
    const matrices = grids.filter((grid) => grid.spec.kind !== "plain"); // plain columns are numbers at any size
    const extra = margins.reduce((sum, m) => sum + m.left + m.right, 0) + 44 * (2 * grids.length - matrices.length);
    const columns = matrices.reduce((sum, grid) => sum + grid.width, 0);
    const widest = Math.max(...grids.map((grid) => grid.width));
    const rows = Math.max(...grids.map((grid) => grid.height));
    let cell = cellSize(width - extra, columns, rows, Math.min(400, tall - head - 40));
    const below = cellSize(width - 100, widest, rows, 300);
    const wraps = cell.w < 11 || (cell.w < WITH_NUMBERS && below.w >= WITH_NUMBERS); // one below the other
    if (wraps) cell = below;
    grids.forEach((grid, i) => {
      const w = grid.spec.kind === "plain" ? Math.max(cell.w, 44) : cell.w;
      grid.setPlace({ w, h: cell.h }, wraps ? margins[i] : { ...margins[i], top: head });
    });
  }
  return { node, fit, grids, result,
    draw(look) {
      for (const grid of grids) grid.draw(grid === result ? { cell: look.cell, shown: look.shown } : marks(grid, look));
    } };
  function marks(grid, { cell }) {
    if (!result || grid.height !== result.height) return {};
    return grid.width === result.width ? { cell } : { row: cell.i };
  }
}

const signedText = (x) => (x < 0 ? "(" + digits(x, 40) + ")" : digits(x, 40));

// "1.00 · 0.50 + (−2.00) · 0.25 + …": at most `most` terms are written out.
function sumOf(terms, most) {
  const shown = terms.slice(0, most).join(" + ");
  return terms.length > most ? shown + " + …" : shown;
}

// A weight by its formula: scores are written as differences from the largest, which changes nothing and keeps exp small.
function softmaxText(scores, at, most) {
  const largest = Math.max(...scores);
  const term = (x) => (x === largest ? "exp(0)" : "exp(" + digits(x - largest, 40) + ")");
  return term(scores[at]) + " / [" + sumOf(scores.map(term), most) + "]";
}

const dot = (a, b) => sumOf(a.map((x, n) => signedText(x) + " · " + signedText(b[n])), 6);

function names(tokens, count) {
  return Array.from({ length: count }, (_, i) => (tokens && i < tokens.length ? visible(tokens[i]) : String(i)));
}

// ---- the online softmax ----------------------------------------------------------------------------------------

function tileScenes(app, data) {
  const rows = names(data.qt, data.queries);
  const columns = names(data.kt, data.keys);
  const scenes = [];
  data.tiles.forEach((tile, t) => {
    for (const step of data.steps.slice(0, 3)) {
      scenes.push({ ...step, group: t, title: T("{step}, keys {first} to {last}",
        { step: T(step.title), first: tile.first, last: tile.last - 1 }),
        make: () => tileScene(app, data, t, step.id, rows, columns) });
    }
  });
  scenes.push({ ...data.steps[3], group: data.tiles.length, make: () =>
    tileScene(app, data, data.tiles.length - 1, "divide", rows, columns) });
  return scenes;
}

const column = (list) => list.map((x) => [x]);

// What is held in memory at this moment, query by query: the tile, the maximum, the factor, the sum, the output.
function heldNow(data, t, phase) {
  const tile = data.tiles[t];
  const before = t ? data.tiles[t - 1].output : tile.output.map((row) => row.map(() => 0));
  const scale = (list) => list.map((x, i) => x * tile.rescale[i]);
  return {
    scores: { scores: tile.scores, max: tile.scores, sum: tile.weights, divide: null }[phase],
    m: phase === "scores" ? tile.old_max : tile.new_max,
    factor: phase === "max" ? tile.rescale : tile.rescale.map(() => null),
    sum: { scores: tile.old_sum, max: scale(tile.old_sum), sum: tile.new_sum, divide: tile.new_sum }[phase],
    output: { scores: before, max: before.map((row, i) => row.map((x) => x * tile.rescale[i])), sum: tile.output,
      divide: data.output }[phase],
  };
}

function tileScene(app, data, t, phase, rows, columns) {
  const tile = data.tiles[t];
  const now = heldNow(data, t, phase);
  const inside = (j) => j >= tile.first && j < tile.last;
  const masked = (i, j) => inside(j) && phase !== "sum" && (data.hides ? data.hides(i, j) : j >= data.lengths[i]);
  const map = rows.map((_, i) => columns.map((_, j) => (now.scores && inside(j) ? now.scores[i][j - tile.first] : null)));
  const side = (name, list) => Grid(app, { name, data: column(list), kind: "plain", rows: null, columns: null });
  const result = Grid(app, { name: phase === "sum" ? "p" : "S", data: map, rows, columns,
    kind: phase === "sum" ? "weight" : "signed", masked });
  const grids = [result, side("m", now.m), side("α", now.factor), side("ℓ", now.sum),
    Grid(app, { name: phase === "divide" ? "o / ℓ" : "o", data: now.output, kind: "signed", rows: null, columns: null })];
  const scene = line(grids, [], result);
  const held = now.scores ? rows.length * (tile.last - tile.first) : 0;
  return { ...scene, memory: { held, whole: rows.length * columns.length },
    draw(look) {
      const cell = inside(look.cell.j) ? look.cell : { i: look.cell.i, j: tile.first };
      result.draw(phase === "divide" ? { row: cell.i } : { cell, shown: look.shown });
      for (const grid of grids.slice(1)) grid.draw({ row: cell.i });
    },
    explain: (c) => rows[c.i] + ":  " + tileText(data, t, phase, c.i) };
}

function tileText(data, t, phase, i) {
  const tile = data.tiles[t];
  const show = (x) => (x === null || x === -Infinity ? "−∞" : digits(x, 40));
  const unseen = data.hides ? tile.scores[i].every((_, j) => data.hides(i, tile.first + j))
    : data.lengths[i] <= tile.first && data.lengths[i] > 0;
  if (unseen && phase !== "divide") {
    return T("no key of this tile may be seen: α = 1 and p = 0, nothing changes; a kernel skips such a tile");
  }
  if (phase === "scores") return T("scores of this tile") + " " + tile.scores[i].slice(0, 8).map(show).join(",  ");
  const old = tile.old_max[i];
  if (phase === "max") {
    return "m = max(" + show(old) + ", " + show(Math.max(...tile.scores[i])) + ") = " + show(tile.new_max[i]) +
      "     α = exp(" + show(old) + " − " + signedText(tile.new_max[i]) + ") = " + show(tile.rescale[i]) +
      "     ℓ = " + show(tile.rescale[i]) + " · " + show(tile.old_sum[i]) + " = " +
      show(tile.old_sum[i] * tile.rescale[i]);
  }
  if (phase === "sum") {
    return "ℓ = " + show(tile.old_sum[i] * tile.rescale[i]) + " + " + sumOf(tile.weights[i].map((x) => show(x)), 6) +
      " = " + show(tile.new_sum[i]);
  }
  if (!tile.new_sum[i]) return T("no key may be seen: there is nothing to divide");
  return T("first feature") + ": " + show(tile.output[i][0]) + " / " + show(tile.new_sum[i]) + " = " + show(data.output[i][0]);
}
