// Attend: what goes in, the weights large, the formula of the chosen cell with its numbers, all matrices below.

const UNEDITED = { q: "", k: "", v: "", w: "" };
const cornersOf = () => [["", T("none")], ["top_left", T("top left")], ["bottom_right", T("bottom right")]];
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

  // anew: "numbers" where other tables are to be edited, "form" where other fields are to be shown as well
  function change(values, anew) {
    Object.assign(state, values);
    page.remember();
    update();
    if (anew === "form") refill(form, fillForm);
    if (anew) fillNumbers();
  }

  function fillForm() {
    form.replaceChildren(el("div", { class: "mhac-fields" }, ...sourceFields()),
      el("div", { class: "mhac-fields" }, ...optionFields()));
  }

  // Where the numbers come from.  What was edited is gone when they are drawn anew.
  function sourceFields() {
    const s = state;
    const names = Object.entries(SOURCES).map(([id, source]) => [id, T(source.name)]);
    const { lengths } = SOURCES[s.from];
    const items = lengths.map((length, i) => [String(i), i + " (" + T("length {n}", { n: length }) + ")"]);
    const count = (label, name, high) =>
      numberBox(label, s[name], { low: 1, high, step: 1 }, (x) => change({ ...UNEDITED, [name]: x }, "numbers"));
    const drawn = s.from === "drawn";
    return [
      select(T("Start from"), names, s.from, (from) =>
        change({ ...SOURCES[from].set, from, head: 0, row: 0, column: 0, feature: 0 }, "form")),
      s.from === "sentence" && textBox(T("Sentence"), s.text, (text) => change({ ...UNEDITED, text }, "numbers"), 34),
      drawn && count(T("queries"), "n", 64),
      drawn && count(T("keys"), "m", 64),
      (drawn || s.from === "sentence") && count(T("features"), "d", 16),
      numberBox(T("numbers drawn with seed"), s.draw, { low: 0, high: 4294967295, step: 1 }, (draw) =>
        change({ ...UNEDITED, draw }, "numbers")),
      items.length > 0 && select(T("item of the batch"), items, String(s.item), (i) =>
        change({ item: Number(i), len: String(lengths[i]) }, "form")),
    ].filter(Boolean);
  }

  function optionFields() {
    const s = state;
    const kinds = [["dot", T("dot product")], ["additive", T("additive")], ["distance", T("by distance")]];
    const kernels = Object.keys(KERNELS).map((name) => [name, T(name)]);
    const text = (label, name, size, hint) => textBox(label, s[name], (given) => change({ [name]: given }), size, hint);
    const near = s.kind === "distance";
    const seed = numberBox(T("its seed"), s.seed, { low: 0, high: 4294967295, step: 1 }, (x) => change({ seed: x }));
    seed.hidden = s.drop === 0;
    return [
      select(T("scores"), kinds, s.kind, (kind) => change({ kind, w: "" }, "form")),
      near && select(T("kernel"), kernels, s.kernel, (kernel) => change({ kernel })),
      near && numberBox(T("width"), s.width, { low: 0.01, high: 1000, step: 0.1 }, (width) => change({ width })),
      !near && numberBox(T("heads"), s.heads, { low: 1, high: 16, step: 1 }, (heads) => change({ heads })),
      text(T("lengths"), "len", 8, T("all")),
      select(T("causal"), cornersOf(), s.causal, (causal) => change({ causal })),
      text(T("window left"), "left", 4, "∞"),
      text(T("right"), "right", 4, "∞"),
      !near && text(T("scale"), "scale", 6, s.kind === "dot" ? "1/√d" : "1"),
      !near && text(T("softcap"), "softcap", 5, T("none")),
      numberBox(T("dropout"), s.drop, { low: 0, high: 1, step: 0.1 }, (drop) => {
        seed.hidden = drop === 0;
        change({ drop });
      }),
      seed,
    ].filter(Boolean);
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
      page.model = null;
      page.drawn();
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
