// Why: the online softmax over key blocks, the root of d, and what a mask does to gradients.

function Why(page) {
  const { state } = page;
  const topics = { tiles: Tiles, scale: Scale, gradients: Gradients };
  const names = Object.keys(topics);
  const titles = { tiles: T("Softmax in blocks"), scale: T("Why 1/√d"), gradients: T("Gradients through a mask") };
  const body = el("div", {});
  const chooser = choice(T("Question"), names.map((name) => titles[name]), names.indexOf(state.topic), (i) => {
    state.topic = names[i];
    page.remember();
    show();
  });
  const node = el("div", {}, el("div", { class: "mhac-fields" }, chooser), body);
  let topic = null;

  function show() {
    try {
      topic = topics[state.topic](page);
      body.replaceChildren(topic.node);
      topic.start();
    } catch (error) {
      topic = null;
      page.model = null;
      body.replaceChildren(el("p", { class: "mhac-trouble", role: "alert", text: error.message }));
    }
    page.drawn();
  }

  return { node, start: show, resized: () => topic && topic.resized(), focus: () => topic && topic.focus && topic.focus() };
}

// A pen for grids: what they need of an app.
function penOf(page) {
  return { theme: page.theme, ramp: ramp(page.theme), color: (name) => COLORS[page.theme][name] };
}

function namesOf(model, side, count) {
  const words = model.tokens && model.tokens[side];
  return Array.from({ length: count }, (_, i) => (words && words.length === count ? visible(words[i]) : String(i)));
}

// ---- the online softmax ------------------------------------------------------------------------------------------

const TILES_MOST = 32; // queries or keys that the player has room for

// One head of the call over the keys first to last: the core's own maximum, sum, weights and output of that block.
function blockOf(model, h, first, last, core) {
  const { call, head_dim } = model;
  const width = last - first;
  const bias = new Float32Array(call.queries * width);
  for (let i = 0; i < call.queries; i++) {
    for (let j = 0; j < width; j++) {
      const here = call.bias ? call.bias[i * call.keys + first + j] : 0;
      bias[i * width + j] = model.sees(i, first + j) ? here : -Infinity;
    }
  }
  const part = (m, size) => Float32Array.from(m.flatMap((row) => headOf(row, h, size)));
  const size = call.head_dim ? head_dim : model.q[0].length;
  return core.attention({ queries: call.queries, keys: width, heads: 1, head_dim: call.head_dim, value_dim: call.value_dim,
    q: part(model.q, size), k: part(model.k.slice(first, last), size), v: part(model.v.slice(first, last), call.value_dim),
    additive_weights: call.additive_weights, scale: call.scale, softcap: call.softcap, bias, window_left: -1,
    window_right: -1 });
}

// The blocks joined: the largest score so far, the sum and the output relative to it.
function joinedBlocks(model, h, size, core) {
  const { queries, keys, value_dim } = model.call;
  let known = Array.from({ length: queries }, () => ({ max: -Infinity, sum: 0, output: Array(value_dim).fill(0) }));
  const tiles = [];
  for (let first = 0; first < keys; first += size) {
    const last = Math.min(first + size, keys);
    const block = blockOf(model, h, first, last, core);
    const old = known;
    const seen = old.map((_, i) => block.row_sum[i] > 0);
    const max = old.map(({ max }, i) => (seen[i] ? Math.max(max, block.row_max[i]) : max));
    const rescale = old.map((each, i) => (max[i] === -Infinity ? 1 : Math.exp(each.max - max[i])));
    const share = old.map((_, i) => (seen[i] ? Math.exp(block.row_max[i] - max[i]) * block.row_sum[i] : 0));
    known = old.map((each, i) => ({ max: max[i], sum: each.sum * rescale[i] + share[i],
      output: each.output.map((x, c) => x * rescale[i] + share[i] * block.out[i * value_dim + c]) }));
    const shown = (list) => list.map((x) => (x === -Infinity ? null : x));
    tiles.push({ first, last, rescale, old_max: shown(old.map((each) => each.max)), new_max: shown(max),
      scores: matrix(queries, last - first, (i, j) => (model.sees(i, first + j) ? scoreParts(model, h, i, first + j).score
        : -Infinity)),
      weights: matrix(queries, last - first, (i, j) => block.weights[i * (last - first) + j] * share[i]),
      old_sum: old.map((each) => each.sum), new_sum: known.map((each) => each.sum),
      output: known.map((each) => each.output) });
  }
  return { tiles, output: known.map(({ sum, output }) => output.map((x) => (sum > 0 ? x / sum : 0))) };
}

function Tiles(page) {
  const { state } = page;
  const box = el("div", {});
  const check = el("p", { class: "mhac-fact", role: "status" });
  const node = el("div", {}, el("p", { class: "mhac-caption", text: T("The core never holds a row of weights: it meets the keys in blocks and keeps a maximum, a sum and an output. Each block below is a call of the core.") }),
    el("div", { class: "mhac-fields" }, slider(T("keys in a block"), state.block, range(1, 16), (block) => {
      state.block = block;
      page.remember();
      show();
    })), check, box);
  let player = null;

  function show() {
    const model = modelOf({ ...state, drop: 0 }, page.core);
    page.model = model;
    const { queries, keys } = model.call;
    if (Math.max(queries, keys) > TILES_MOST) {
      throw new Error(T("{rows} × {columns} scores are too many to play: choose fewer under “Attend”",
        { rows: queries, columns: keys }));
    }
    const h = Math.min(state.head, model.call.heads - 1);
    const joined = joinedBlocks(model, h, Math.min(state.block, keys), page.core);
    const tokens = model.tokens || {};
    const words = (side, n) => (tokens[side] && tokens[side].length === n ? tokens[side] : null);
    const whole = outputOf(model, h);
    const seen = whole.map((_, i) => range(0, keys - 1).some((j) => model.sees(i, j)));
    const apart = Math.max(0, ...joined.output.flatMap((row, i) => (seen[i] ? row.map((x, c) => Math.abs(x - whole[i][c])) : [])));
    setText(check, T("Joined from {n} blocks, the output differs from the core's one call by at most {apart}.",
      { n: joined.tiles.length, apart: apart.toExponential(1) }));
    buildPlayer(page.host, { player: "tiles", title: T("The online softmax, block by block"), steps: page.data.tileSteps,
      qt: words("q", queries), kt: words("k", keys), queries, keys, hides: (i, j) => !model.sees(i, j), lengths: [],
      tiles: joined.tiles, output: joined.output }).then((made) => {
      player = made;
      box.replaceChildren(made.root);
      made.ready();
    });
  }
  return { node, start: show, resized() {}, focus: () => player && player.first.focus({ preventScroll: true }) };
}

// ---- why the root of d -------------------------------------------------------------------------------------------

const DEPTHS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
const FACTORS = [0, 0.125, 0.25, 0.5, 1, 2, 4];
const [SCALE_QUERIES, SCALE_KEYS] = [8, 16];

// Weights of normal queries and keys with d features: rows of them, for a factor of q k^T.
function normalWeights(page, d, scale) {
  const draw = RandomState(page.state.draw);
  const numbers = (n) => Float32Array.from({ length: n * d }, () => draw.normal());
  const found = page.core.attention({ queries: SCALE_QUERIES, keys: SCALE_KEYS, heads: 1, head_dim: d, value_dim: 1,
    q: numbers(SCALE_QUERIES), k: numbers(SCALE_KEYS), v: new Float32Array(SCALE_KEYS), scale, window_left: -1,
    window_right: -1 });
  return rowsOf(found.weights, SCALE_QUERIES, SCALE_KEYS);
}

const entropyIn = (rows) => mean(rows.map(entropyOf));

function Scale(page) {
  const { state } = page;
  const most = Math.log2(SCALE_KEYS);
  const grids = el("div", { class: "mhac-boards" });
  const chart = el("div", {});
  const node = el("div", {}, el("p", { class: "mhac-caption", text: T("A dot product of d normal numbers spreads like √d. Undivided, softmax sees one key alone; divided by √d, it listens to as many keys at any d.") }),
    el("div", { class: "mhac-fields" },
      slider(T("features d"), state.wd, DEPTHS, (wd) => change({ wd })),
      slider(T("your scale, times 1/√d"), state.ws, FACTORS, (ws) => change({ ws }))), grids, chart);

  function change(values) {
    Object.assign(state, values);
    page.remember();
    draw();
  }

  function draw() {
    const pen = penOf(page);
    const d = state.wd;
    const cases = [["q · k", 1], ["q · k / √" + d, 1 / Math.sqrt(d)],
      ["q · k · " + state.ws + " / √" + d, state.ws / Math.sqrt(d)]];
    grids.replaceChildren(...cases.map(([name, scale]) => {
      const rows = normalWeights(page, d, scale);
      const grid = Grid(pen, { name, data: rows, kind: "weight", rows: null, columns: null });
      const box = el("div", { class: "mhac-board mhac-third" }, el("div", {}, grid.node, el("p", { class: "mhac-note",
        text: T("entropy {bits} of {most} bits · largest weight {weight} on average", { bits: entropyIn(rows).toFixed(2),
          most: most.toFixed(2), weight: mean(rows.map((row) => Math.max(...row))).toFixed(2) }) })));
      grid.setPlace({ w: 15, h: 15 }, { left: 0, top: 0, right: 0 });
      grid.draw({});
      return box;
    }));
    const rows = DEPTHS.map((depth) => [1, 1 / Math.sqrt(depth), state.ws / Math.sqrt(depth)].map((scale) =>
      entropyIn(normalWeights(page, depth, scale))));
    chart.replaceChildren(barTable(T("Entropy of a row in bits, by the number of features"), DEPTHS.map((x) => "d = " + x),
      cases.map(([name], i) => (i === 0 ? "q · k" : i === 1 ? "q · k / √d" : "q · k · " + state.ws + " / √d")), rows, most,
      (x) => x.toFixed(2)));
  }
  return { node, start: draw, resized: draw };
}

// A table whose cells are bars as well as numbers.
function barTable(title, rowNames, columnNames, rows, most, say) {
  return el("table", { class: "mhac-bar-table", "data-result": title }, el("caption", { text: title }),
    el("thead", {}, el("tr", {}, el("td"), ...columnNames.map((text) => el("th", { scope: "col", text })))),
    el("tbody", {}, ...rows.map((row, i) => el("tr", {}, el("th", { scope: "row", text: rowNames[i] }), ...row.map((x) => {
      const bar = el("span");
      bar.style.width = clamp((100 * x) / (most || 1), 0, 100) + "%";
      return el("td", {}, el("span", { class: "mhac-bar" }, bar), el("span", { class: "mhac-bar-w", text: say(x) }));
    })))));
}

// ---- gradients ---------------------------------------------------------------------------------------------------

function Gradients(page) {
  const { state } = page;
  const fields = el("div", { class: "mhac-fields" });
  const grids = el("div", { class: "mhac-board" });
  const sums = el("div", {});
  const said = el("p", { class: "mhac-caption", role: "status" });
  const node = el("div", {}, el("p", { class: "mhac-caption", text: T("One number of the output is chosen. The core's backward pass says how much each input moves it: 0 for every key that the mask hides, and for the value of a key without weight.") }),
    fields, said, grids, sums);
  let model = null;

  function change(values) {
    Object.assign(state, values);
    page.remember();
    start();
  }

  function start() {
    model = modelOf(state, page.core);
    page.model = model;
    const { queries, value_dim } = model.call;
    if (Math.max(queries, model.call.keys) > TILES_MOST) {
      throw new Error(T("{rows} × {columns} scores are too many to show here: choose fewer under “Attend”",
        { rows: queries, columns: model.call.keys }));
    }
    const rows = namesOf(model, "q", queries);
    if (!fields.childNodes.length) {
      fields.replaceChildren(
        select(T("output of"), rows.map((name, i) => [String(i), i + " " + name]), String(Math.min(state.row, queries - 1)),
          (i) => change({ row: Number(i) })),
        select(T("feature"), range(0, value_dim - 1).map((c) => [String(c), String(c)]),
          String(Math.min(state.feature, value_dim - 1)), (c) => change({ feature: Number(c) })),
        textBox(T("lengths"), state.len, (len) => guarded(() => change({ len })), 8, T("all")),
        select(T("causal"), cornersOf(), state.causal, (causal) => change({ causal })));
    }
    draw();
  }

  // What is typed may be wrong for a moment.
  function guarded(run) {
    try {
      run();
    } catch (error) {
      setText(said, error.message);
      grids.replaceChildren();
      sums.replaceChildren();
    }
  }

  function draw() {
    const { call, head_dim } = model;
    const [h, i, c] = [Math.min(state.head, call.heads - 1), Math.min(state.row, call.queries - 1),
      Math.min(state.feature, call.value_dim - 1)];
    const gradOut = new Float32Array(call.queries * call.heads * call.value_dim);
    gradOut[i * call.heads * call.value_dim + h * call.value_dim + c] = 1;
    const found = page.core.attention(call, gradOut);
    const part = (data, n, size) => rowsOf(data, n, data.length / n).map((row) => headOf(row, h, size));
    const [rows, columns] = [namesOf(model, "q", call.queries), namesOf(model, "k", call.keys)];
    const hidden = (j) => !model.sees(i, j);
    const pen = penOf(page);
    const made = [];
    if (call.head_dim) {
      made.push(Grid(pen, { name: "∂o/∂Q", data: part(found.grad_q, call.queries, head_dim), kind: "signed", rows,
        columns: null, masked: (at) => at !== i }));
      made.push(Grid(pen, { name: "∂o/∂K", data: part(found.grad_k, call.keys, head_dim), kind: "signed", rows: columns,
        columns: null, masked: hidden }));
    }
    made.push(Grid(pen, { name: "∂o/∂V", data: part(found.grad_v, call.keys, call.value_dim), kind: "signed", rows: columns,
      columns: null, masked: hidden }));
    const scene = line(made, [], null);
    grids.replaceChildren(el("div", {}, scene.node));
    scene.fit((grids.clientWidth || 320) - 44);
    scene.draw({ cell: { i, j: c } });
    const size = (row) => Math.hypot(...row);
    const lengths = columns.map((_, j) => [call.head_dim ? size(part(found.grad_k, call.keys, head_dim)[j]) : 0,
      size(part(found.grad_v, call.keys, call.value_dim)[j])]);
    setText(said, T("{query}, feature {n}: {seen} of {keys} keys can move it.", { query: rows[i], n: c,
      seen: lengths.filter((pair) => pair[0] || pair[1]).length, keys: call.keys }));
    sums.replaceChildren(barTable(T("How much each key moves it (length of its gradient)"), columns, [T("its key"), T("its value")],
      lengths, Math.max(...lengths.flat()), (x) => (x ? x.toFixed(3) : "0")));
  }
  return { node, start, resized: () => model && draw() };
}
