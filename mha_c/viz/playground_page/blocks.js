// The online softmax over key blocks, and what a mask does to gradients.

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
  const scores = scoresOf(model, h);
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
      scores: matrix(queries, last - first, (i, j) => (model.sees(i, first + j) ? scores[i][first + j] : -Infinity)),
      weights: matrix(queries, last - first, (i, j) => block.weights[i * (last - first) + j] * share[i]),
      old_sum: old.map((each) => each.sum), new_sum: known.map((each) => each.sum),
      output: known.map((each) => each.output) });
  }
  return { tiles, output: known.map(({ sum, output }) => output.map((x) => (sum > 0 ? x / sum : 0))) };
}

function Tiles(page, drawn) {
  const { store } = page;
  const { state } = store;
  const box = el("div", {});
  const check = el("p", { class: "mhac-fact", role: "status" });
  const trouble = el("p", { class: "mhac-trouble", role: "alert", hidden: true });
  const size = slider(T("keys in a block"), state.block, range(1, 16), (block) => store.set({ block }));
  const node = el("div", {}, el("p",
    { class: "mhac-caption", text: T("The core never holds a row of weights: it meets the keys in blocks and keeps a maximum, a sum and an output. Each block below is a call of the core.") }),
    el("div", { class: "mhac-fields" }, size), check, trouble, box);
  const ends = endings();
  let [player, model] = [null, null];

  function show() {
    if (player) player.end();
    player = model = null;
    try {
      model = modelOf({ ...state, drop: 0 }, page.core);
      play();
    } catch (error) {
      setText(trouble, wordsOfError(error));
      box.replaceChildren();
    }
    trouble.hidden = Boolean(player);
    check.hidden = !player;
    drawn();
  }

  function play() {
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
    const apart = Math.max(0, ...joined.output.flatMap((row, i) => (seen[i] ? row.map((x, c) => Math.abs(x - whole[i][c]))
      : [])));
    setText(check, T("Joined from {n} blocks, the output differs from the core's one call by at most {apart}.",
      { n: joined.tiles.length, apart: apart.toExponential(1) }));
    player = makePlayer({ player: "tiles", title: T("The online softmax, block by block"), steps: page.data.tileSteps,
      qt: words("q", queries), kt: words("k", keys), queries, keys, hides: (i, j) => !model.sees(i, j), lengths: [],
      tiles: joined.tiles, output: joined.output }, store);
    box.replaceChildren(player.root);
    player.follow(page.host);
  }
  ends.add(store.subscribe((changed) => changed.includes("block") && show()));
  ends.add(() => player && player.end());
  return { node, model: () => model, start: show, draw() {}, end: ends.end,
    focus: () => player && player.root.focus({ preventScroll: true }) };
}

// ---- gradients ---------------------------------------------------------------------------------------------------

function Gradients(page, drawn) {
  const { store, pen } = page;
  const { state } = store;
  const fields = el("div", { class: "mhac-fields" });
  const grids = el("div", { class: "mhac-board" });
  const sums = el("div", {});
  const said = el("p", { class: "mhac-caption", role: "status" });
  const node = el("div", {}, el("p",
    { class: "mhac-caption", text: T("One number of the output is chosen. The core's backward pass says how much each input moves it: 0 for every key that the mask hides, and for the value of a key without weight.") }),
    fields, said, grids, sums);
  const ends = endings();
  let model = null;

  // What is typed may be wrong for a moment.
  function update() {
    try {
      model = modelOf(state, page.core);
      if (Math.max(model.call.queries, model.call.keys) > TILES_MOST) {
        throw new Error(T("{rows} × {columns} scores are too many to show here: choose fewer under “Attend”",
          { rows: model.call.queries, columns: model.call.keys }));
      }
      fill();
      draw();
    } catch (error) {
      model = null;
      fill();
      setText(said, wordsOfError(error));
      grids.replaceChildren();
      sums.replaceChildren();
    }
    drawn();
  }

  // What is wrong can be mended here, so that lengths and corner are there without a model, too.
  function fill() {
    if (fields.childNodes.length === (model ? 4 : 2) || (!model && fields.childNodes.length)) return;
    const masks = [textBox(T("lengths"), state.len, (len) => store.set({ len }), 8, T("all")),
      select(T("causal"), cornersOf(), state.causal, (causal) => store.set({ causal }))];
    if (!model) {
      fields.replaceChildren(...masks);
      return;
    }
    const { queries, value_dim } = model.call;
    refill(fields, () => fields.replaceChildren(
      select(T("output of"), namesOf(model, "q", queries).map((name, i) => [String(i), i + " " + name]),
        String(Math.min(state.row, queries - 1)),
        (i) => store.set({ row: Number(i) })),
      select(T("feature"), range(0, value_dim - 1).map((c) => [String(c), String(c)]),
        String(Math.min(state.feature, value_dim - 1)), (c) => store.set({ feature: Number(c) })), ...masks));
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
    const none = !range(0, call.keys - 1).some((j) => model.sees(i, j)); // then the output is the mean of all values
    const hidden = (j) => !none && !model.sees(i, j);
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
    scene.fit((grids.clientWidth || 320) - 44, TALLEST);
    scene.draw({ cell: { i, j: c } });
    const size = (row) => Math.hypot(...row);
    const lengths = columns.map((_, j) => [call.head_dim ? size(part(found.grad_k, call.keys, head_dim)[j]) : 0,
      size(part(found.grad_v, call.keys, call.value_dim)[j])]);
    setText(said, T("{query}, feature {n}: {seen} of {keys} keys can move it.", { query: rows[i], n: c,
      seen: lengths.filter((pair) => pair[0] || pair[1]).length, keys: call.keys }));
    sums.replaceChildren(table(T("How much each key moves it (length of its gradient)"), lengths, columns,
      [T("its key"), T("its value")], 3, Math.max(...lengths.flat())));
  }
  ends.add(store.subscribe((changed) => changed.some((name) => ["row", "feature", "len", "causal"].includes(name))
    && update()));
  return { node, model: () => model, start: update, draw: () => model && draw(), end: ends.end, focus: () => grids.focus() };
}
