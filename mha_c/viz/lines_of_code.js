// The players of attention and of whole layers: each step is a line of the book's code, its result as a matrix, and where
// each number of it comes from.  A step says `how`: a rule that finds the numbers that made a cell, and writes their arithmetic.

// (data, matrices of the step by place, the result, cell) -> [look of each matrix before the result, text]
const HOW = {
  none: () => [[], ""],
  product: (d, [left, top], out, c) => [[{ row: c.i }, { column: c.j }], dot(left[c.i], top.map((row) => row[c.j]))],
  split: (d, [x], out, c) => {
    const [h, t] = [Math.floor(c.i / x.length), c.i % x.length];
    return [[{ cell: { i: t, j: h * out[0].length + c.j } }], T("column {j} is feature {f} of head {h}",
      { h, f: c.j, j: h * out[0].length + c.j })];
  },
  join: (d, [x], out, c) => {
    const size = x[0].length;
    const h = Math.floor(c.j / size);
    return [[{ cell: { i: h * out.length + c.i, j: c.j % size } }], T("feature {f} of head {h} is column {j}",
      { h, f: c.j % size, j: c.j })];
  },
  scores: (d, [q, k], out, c) => {
    const key = Math.floor(c.i / d.queries) * d.keys + c.j;
    return [[{ row: c.i }, { row: key }], "(" + dot(q[c.i], k[key]) + ") / √" + d.features];
  },
  scaled: (d, [s], out, c) => [[{ cell: c }], digits(s[c.i][c.j], 40) + " / √" + d.features],
  mask: (d, [s], out, c) => [[{ cell: c }], T(hidden(d, c) ? "key {j} is beyond the length {n}" : "key {j} is before the length {n}",
    { j: c.j, n: d.lengths[c.i % d.queries] }) + ";  s"],
  softmax: (d, [s], out, c) => {
    if (hidden(d, c)) return [[{ cell: c }], "exp(−10⁶)"];
    const seen = s[c.i].map((_, j) => j).filter((j) => !hidden(d, { i: c.i, j }));
    return [[{ row: c.i }], softmaxText(seen.map((j) => s[c.i][j]), seen.indexOf(c.j), 5)];
  },
  mixture: (d, [a, v], out, c) => {
    const first = Math.floor(c.i / d.queries) * d.keys;
    const values = a[c.i].map((_, j) => v[first + j][c.j]);
    return [[{ row: c.i }, { column: c.j }], dot(a[c.i], values)];
  },
  broadcast: (d, [q, k], out, c) => {
    const [i, j] = [Math.floor(c.i / d.keys), c.i % d.keys];
    return [[{ cell: { i, j: c.j } }, { cell: { i: j, j: c.j } }], digits(q[i][c.j], 40) + " + " + signedText(k[j][c.j])];
  },
  tanh: (d, [x], out, c) => [[{ cell: c }], "tanh(" + digits(x[c.i][c.j], 40) + ")"],
  w_v: (d, [x, w], out, c) => {
    const pair = c.i * d.keys + c.j;
    return [[{ row: pair }, {}], dot(x[pair], w[0])];
  },
};

const hidden = (d, c) => c.j >= d.lengths[c.i % d.queries] && d.lengths[c.i % d.queries] > 0;

function layerScenes(app, data) {
  return data.steps.map((step) => ({ ...step, group: 0, make: () => layerScene(app, data, step) }));
}

function layerScene(app, data, step) {
  const labels = (side) => (side ? data.labels[side].map(visible) : null);
  const grids = step.grids.map(({ name, matrix, rows, columns, kind, masked }) => Grid(app, { name, kind: kind || "signed",
    data: data.matrices[matrix], rows: labels(rows), columns: labels(columns),
    masked: masked ? (i, j) => hidden(data, { i, j }) : null }));
  const result = step.how === "none" ? null : grids[grids.length - 1];
  const scene = step.how === "product" ? product(grids[0], grids[1], result) : line(grids, step.signs || [], result);
  const matrices = step.grids.map(({ matrix }) => data.matrices[matrix]);
  const made = (cell) => HOW[step.how](data, matrices, matrices[matrices.length - 1], cell);
  return { ...scene,
    draw(look) {
      const [looks] = made(look.cell);
      grids.forEach((grid, i) => grid.draw(grid === result ? { cell: look.cell, shown: look.shown } : looks[i] || {}));
    },
    explain(cell) {
      if (!result) return T("Rows are tokens, columns are features.");
      const out = matrices[matrices.length - 1];
      const bias = data.biases[step.bias] ? " + " + signedText(data.biases[step.bias][cell.j]) : "";
      const place = step.against ? " → " + labels(step.against)[cell.j] : ", " + cell.j;
      return labels(step.named)[cell.i] + place + ":  " + made(cell)[1] + bias + " = " +
        digits(out[cell.i][cell.j], 40);
    } };
}
