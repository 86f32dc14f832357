// Attend: what goes in, the weights large, the formula of the chosen cell with its numbers, all matrices below.

const BOARD_MOST = 24; // rows and columns of a product that is drawn as it is computed by hand
const TABLE_MOST = 16;

function Attend(page) {
  const { state } = page;
  const form = el("div", { class: "mhac-form" });
  const numbers = el("div", { class: "mhac-editors" });
  const trouble = el("p", { class: "mhac-trouble", role: "alert", hidden: true });
  const stage = el("div", { class: "mhac-seen" });
  const explained = el("section", { class: "mhac-explained", "aria-label": T("The chosen cell") });
  const boards = el("div", { class: "mhac-boards" });
  const tables = el("details", { class: "mhac-tables" });
  const results = el("div", {}, stage, explained, boards, tables);
  const node = el("div", {}, form, el("details", { class: "mhac-numbers",
    open: page.host.clientWidth >= 620 },
    el("summary", { text: T("Queries, keys and values: change a number") }), numbers), trouble, results);
  let view = null;
  let model = null;

  function change(values, redo) {
    Object.assign(state, values);
    page.remember();
    update();
    if (redo) {
      refill(form, fillForm);
      fillNumbers();
    }
  }

  function preset(from) {
    change({ ...SOURCES[from].set, from, head: 0, row: 0, column: 0, feature: 0 }, true);
  }

  function fillForm() {
    const s = state;
    const kinds = [["dot", T("dot product")], ["additive", T("additive")], ["distance", T("by distance")]];
    const corners = [["", T("none")], ["top_left", T("top left")], ["bottom_right", T("bottom right")]];
    const sources = Object.entries(SOURCES).map(([id, source]) => [id, T(source.name)]);
    const fresh = { q: "", k: "", v: "", w: "" };
    const numberOf = (label, name, low, high, step, redo) =>
      numberBox(label, s[name], { low, high, step }, (x) => change({ [name]: x, ...(redo ? fresh : {}) }, false) ||
        (redo && fillNumbers()));
    const { lengths } = SOURCES[s.from];
    const seed = numberOf(T("its seed"), "seed", 0, 4294967295, 1);
    seed.hidden = s.drop === 0;
    const free = s.from === "sentence" || s.from === "drawn";
    form.replaceChildren(el("div", { class: "mhac-fields" },
      select(T("Start from"), sources, s.from, preset),
      s.from === "sentence" ? textBox(T("Sentence"), s.text, (text) => {
        change({ ...fresh, text });
        fillNumbers();
      }, 34) : null,
      s.from === "drawn" ? numberOf(T("queries"), "n", 1, 64, 1, true) : null,
      s.from === "drawn" ? numberOf(T("keys"), "m", 1, 64, 1, true) : null,
      free ? numberOf(T("features"), "d", 1, 16, 1, true) : null,
      numberOf(T("numbers drawn with seed"), "draw", 0, 4294967295, 1, true),
      lengths.length ? select(T("item of the batch"), lengths.map((length, i) =>
        [String(i), i + " (" + T("length {n}", { n: length }) + ")"]), String(s.item), (i) =>
        change({ item: Number(i), len: String(lengths[i]) }, true)) : null),
    el("div", { class: "mhac-fields" },
      select(T("scores"), kinds, s.kind, (kind) => change({ kind, w: "" }, true)),
      s.kind === "distance" ? select(T("kernel"), FIELDS_KERNELS.map((name) => [name, T(name)]), s.kernel,
        (kernel) => change({ kernel })) : null,
      s.kind === "distance" ? numberOf(T("width"), "width", 0.01, 1000, 0.1) : numberOf(T("heads"), "heads", 1, 16, 1),
      textBox(T("lengths"), s.len, (len) => change({ len }), 8, T("all")),
      select(T("causal"), corners, s.causal, (causal) => change({ causal })),
      textBox(T("window left"), s.left, (left) => change({ left }), 4, "∞"),
      textBox(T("right"), s.right, (right) => change({ right }), 4, "∞"),
      s.kind === "distance" ? null : textBox(T("scale"), s.scale, (scale) => change({ scale }), 6,
        s.kind === "dot" ? "1/√d" : "1"),
      s.kind === "distance" ? null : textBox(T("softcap"), s.softcap, (softcap) => change({ softcap }), 5, T("none")),
      numberBox(T("dropout"), s.drop, { low: 0, high: 1, step: 0.1 }, (drop) => {
        seed.hidden = drop === 0;
        change({ drop });
      }),
      seed));
  }

  function fillNumbers() {
    if (!model) return;
    const editorOf = (name, title, rows, side) => editor(name, title, rows, rowNames(side, rows.length), (now) =>
      change({ [name.toLowerCase()]: writeRows(now) }));
    numbers.replaceChildren(editorOf("Q", T("queries"), model.q, "q"), editorOf("K", T("keys"), model.k, "k"),
      editorOf("V", T("values"), model.v, "k"),
      ...(model.w ? [editor("w", T("additive weights"), [model.w], ["w"], (now) => change({ w: writeRows(now) }))] : []));
  }

  function rowNames(side, count) {
    const words = model.tokens && model.tokens[side];
    return Array.from({ length: count }, (_, i) => (words && words.length === count ? visible(words[i]) : String(i)));
  }

  function update() {
    try {
      model = modelOf(state, page.core);
      trouble.hidden = true;
      results.hidden = false;
    } catch (error) {
      setText(trouble, error.message);
      trouble.hidden = false;
      results.hidden = true; // an old picture beside new numbers would lie
      return;
    }
    page.model = model;
    showView().then(() => {
      drawBoards();
      explain();
      fillTables();
      page.drawn();
      if (!page.greeted) view.first.focus({ preventScroll: true });
      page.greeted = true;
    });
  }

  // ---- the weights ----

  async function showView() {
    const panel = panelOf(model);
    const worded = Boolean(panel.qt); // without words there is no sentence to show
    if (!view || view.worded !== worded) {
      const data = { title: T("Attention weights"), layers: [""], heads: null, notes: [], panels: [panel] };
      view = { worded, ...(await makeView(data)) };
      view.app.state.head = Math.min(state.head, panel.stats.length - 1);
      view.app.kept = { q: clamp(state.row, 0, panel.q - 1), k: clamp(state.column, 0, panel.k - 1) };
      stage.replaceChildren(view.root);
      view.follow(page.host);
      listen(view.app);
    } else {
      view.app.data.panels = [panel];
      await view.app.open(0, 0);
    }
    const { kept } = view.app;
    view.app.kept = { q: Math.min(kept.q, panel.q - 1), k: Math.min(kept.k, panel.k - 1) };
    view.app.redraw();
  }

  // What is chosen in the view is explained below it, and stands in the address.
  function listen(app) {
    const { marked, redraw } = app;
    let shown = "";
    const after = once(() => {
      const { q, k } = app.active();
      const now = [q, k, app.state.head].join();
      if (now === shown) return;
      shown = now;
      Object.assign(state, { row: app.kept.q, column: app.kept.k, head: app.state.head });
      page.remember();
      drawBoards();
      explain();
      if (app.pointed === null) fillTables();
    });
    app.marked = () => {
      marked();
      after();
    };
    app.redraw = () => {
      redraw();
      after();
    };
  }

  const headNow = () => Math.min(view.app.state.head, model.call.heads - 1);

  // ---- the formula of the chosen cell ----

  function explain() {
    const { q: i, k: j } = view.app.active();
    const feature = Math.min(state.feature, model.call.value_dim - 1);
    const features = range(0, model.call.value_dim - 1).map((c) => [String(c), String(c)]);
    const lines = explanation(model, headNow(), i, j, feature, rowNames("q", model.call.queries)[i],
      rowNames("k", model.call.keys)[j]);
    const rows = lines.map(([title, what]) => el("div", { class: "mhac-line-of" }, el("h4", { text: title }),
      el("p", { class: "mhac-arith" }, ...formula(what))));
    const chooser = model.call.value_dim > 1 ? select(T("feature of the output"), features, String(feature), (c) => {
      change({ feature: Number(c) });
    }) : null;
    refill(explained, () => explained.replaceChildren(...rows, ...(chooser ? [chooser] : [])));
  }

  // ---- all matrices ----

  function drawBoards() {
    const h = headNow();
    const { q: i, k: j } = view.app.active();
    const { queries, keys } = model.call;
    if (queries > BOARD_MOST || keys > BOARD_MOST) {
      boards.replaceChildren();
      return;
    }
    const pen = penOf(page);
    const rows = rowNames("q", queries);
    const columns = rowNames("k", keys);
    const own = (m, side) => m.map((row) => (side && model.call.head_dim ? headOf(row, h, model.head_dim) : row));
    const [q, k] = [own(model.q, true), own(model.k, true)];
    const grid = (name, data, more) => Grid(pen, { name, data, kind: "signed", rows: null, columns: null, ...more });
    const hides = (a, b) => !model.sees(a, b);
    const scores = grid(scoreName(model), scoresOf(model, h).map((row) => row.map((x) => (Number.isFinite(x) ? x : null))),
      { ...(model.state.kind === "dot" ? {} : { rows, columns }), masked: hides });
    const asProduct = model.state.kind === "dot";
    const queryGrid = grid("Q", q, { rows });
    const keyGrid = asProduct ? grid("K^T", transposed(k), { columns }) : grid("K", k, { rows: columns });
    const first = asProduct ? product(queryGrid, keyGrid, scores) : line([queryGrid, keyGrid, scores], ["", "→"], scores);
    const dropped = dropOf(model, h);
    const weights = grid("A", dropped || weightsOf(model, h), { kind: "weight", rows });
    const second = product(weights, grid("V", valuesOf(model, h), { rows: columns }), grid("O", outputOf(model, h)));
    const width = boards.clientWidth || 320;
    const boxes = [first, second].map((scene) => el("div", { class: "mhac-board" }, el("div", {}, scene.node)));
    boards.replaceChildren(...boxes);
    for (const scene of [first, second]) scene.fit((width > 900 ? width / 2 - 20 : width) - 44);
    first.draw({ cell: { i, j } });
    if (!asProduct) keyGrid.draw({ row: j });
    second.draw({ cell: { i, j: Math.min(state.feature, model.call.value_dim - 1) } });
    weights.draw({ cell: { i, j } });
    scores.canvas.addEventListener("click", (event) => {
      const at = scores.at(event);
      if (at) view.app.pin(at.i, at.j);
    });
  }

  function fillTables() {
    const { queries, keys, value_dim } = model.call;
    const h = headNow();
    const [rows, columns] = [rowNames("q", queries), rowNames("k", keys)];
    const seen = scoresOf(model, h).map((row, i) => row.map((x, j) => (model.sees(i, j) ? x : -Infinity)));
    if (queries > TABLE_MOST || keys > TABLE_MOST) {
      const { q } = view.app.active();
      const weights = weightsOf(model, h)[q];
      tables.replaceChildren(el("summary", { text: T("The chosen query as a table") }), table(rows[q],
        columns.map((_, j) => [seen[q][j], weights[j]]), columns, [T("score"), T("weight")], 4));
      return;
    }
    tables.replaceChildren(el("summary", { text: T("The same as tables") }),
      table(T("scores"), seen, rows, columns, 4), table(T("weights"), weightsOf(model, h), rows, columns, 4),
      table(T("output"), outputOf(model, h), rows, range(0, value_dim - 1).map(String), 4));
  }

  return {
    node,
    start() {
      update();
      fillForm();
      fillNumbers();
    },
    resized() {
      if (model && view && !results.hidden) drawBoards();
    },
    focus() {},
  };
}

const FIELDS_KERNELS = ["gaussian", "boxcar", "epanechnikov", "constant"];

const scoreName = (model) => (model.call.softcap ? T("capped scores") : model.state.kind === "dot" ? "S" : T("scores"));

// The weights as they meet the values, where dropout has taken some away.
function dropOf(model, h) {
  if (!model.factors) return null;
  const { queries, keys } = model.call;
  return weightsOf(model, h).map((row, i) => row.map((w, j) => w * model.factors[(h * queries + i) * keys + j]));
}

// [[title, arithmetic], …] of a cell: from the score to the weight to the output.
function explanation(model, h, i, j, feature, query, key) {
  const { call, state } = model;
  const inHead = call.heads > 1 ? ", " + T("Head {h}", { h }) : "";
  const at = query + " → " + key + inHead;
  const parts = scoreParts(model, h, i, j);
  const row = weightsOf(model, h)[i];
  const weight = row[j];
  const lines = [[T("Score, {pair}", { pair: at }), scoreText(model, parts, i, j)]];
  const seen = row.map((_, n) => n).filter((n) => model.sees(i, n));
  if (!seen.length) {
    lines.push([T("Weight"), T("no key may be seen: all weights are 1 / {n}", { n: row.length }) + " = " + exact(weight)]);
  } else if (!model.sees(i, j)) lines.push([T("Weight"), T("this key may not be seen: 0")]);
  else {
    const terms = seen.map((n) => "exp(" + digits(scoreParts(model, h, i, n).score, 40) + ")");
    lines.push([T("Weight"), "exp(" + digits(parts.score, 40) + ") / [" + sumOf(terms, 6) + "] = " + exact(weight)]);
  }
  const dropped = dropOf(model, h);
  if (dropped) {
    lines.push([T("Dropout"), dropped[i][j] === 0 && weight > 0 ? T("dropped: 0")
      : exact(weight) + " / (1 − " + state.drop + ") = " + exact(dropped[i][j])]);
  }
  const values = valuesOf(model, h).map((value) => value[feature]);
  const used = (dropped || weightsOf(model, h))[i];
  const terms = values.map((x, n) => digits(used[n], 40) + " · " + signedText(x)).filter((_, n) => used[n] !== 0);
  lines.push([T("Output of {query}, feature {n}", { query, n: feature }) + inHead,
    (terms.length ? sumOf(terms, 6) : "0") + " = " + exact(outputOf(model, h)[i][feature])]);
  return lines;
}

const exact = (x) => (Math.abs(x) >= 1000 ? x.toFixed(1) : x.toFixed(4)).replace("-", "−");

function scoreText(model, parts, i, j) {
  const { call, state } = model;
  let said;
  if (state.kind === "distance") {
    said = "u = " + exact(model.distances[i][j]) + " / " + state.width + ";  " +
      { gaussian: "−u² / 2", boxcar: T("0 where u < 1, else −∞"), epanechnikov: "log max(0, 1 − u)", constant: "0" }[state.kernel];
  } else if (state.kind === "additive") {
    said = sumOf(parts.a.map((x, n) => signedText(model.w[n]) + " · tanh(" + digits(x, 40) + " + " +
      signedText(parts.b[n]) + ")"), 4);
    if (call.scale !== 1) said = "(" + said + ") · " + exact(call.scale);
  } else {
    const root = state.scale.trim() === "" ? " / √" + model.head_dim : " · " + exact(call.scale);
    said = "(" + dot(parts.a, parts.b) + ")" + root;
  }
  said += " = " + (Number.isFinite(parts.scaled) ? exact(parts.scaled) : "−∞");
  if (call.softcap) said += ";  " + call.softcap + " · tanh(" + exact(parts.scaled) + " / " + call.softcap + ") = " + exact(parts.score);
  return said;
}
