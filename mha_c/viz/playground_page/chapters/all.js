// All controls: what the lecture leaves out.  What goes in, the weights large, the formula of the chosen cell with its
// numbers, all matrices; the same attention block by block, and its gradients, are parts of their own.

const ALL = {
  id: "all", title: "All controls",
  fields: {
    part: one("attend", "tiles", "gradients"), from: one(...Object.keys(SOURCES)),
    text: textOf("the cat sat on the mat because it was tired", MOST_TEXT), n: wholeOf(6, 1, 64), m: wholeOf(6, 1, 64),
      d: wholeOf(4, 1, 16),
    draw: wholeOf(1, 0, 4294967295), kind: one("dot", "additive", "distance"), kernel: one(...Object.keys(KERNELS)),
    width: realOf(1, 0.01, 1000), heads: wholeOf(1, 1, 16), len: textOf("", MOST_TEXT),
      causal: one("", "top_left", "bottom_right"),
    left: textOf("", 9), right: textOf("", 9), scale: textOf("", 20), softcap: textOf("", 20), drop: realOf(0, 0, 1),
    seed: wholeOf(0, 0, 4294967295), item: wholeOf(0, 0, 1), q: rowsField, k: rowsField, v: rowsField, w: rowsField,
    head: wholeOf(0, 0, 16), row: wholeOf(0, 0, 4096), column: wholeOf(0, 0, 4096), feature: wholeOf(0, 0, 4096),
      step: wholeOf(0, 0, 512),
    block: wholeOf(2, 1, 64),
  },
  build: AllControls,
  numbers(s, core) {
    const model = modelOf(s, core);
    const heads = range(0, model.call.heads - 1);
    return { scores: heads.map((h) => scoresOf(model, h)), weights: heads.map((h) => weightsOf(model, h)),
      output: heads.map((h) => outputOf(model, h)) };
  },
};

function AllControls(page) {
  const { store } = page;
  const parts = { attend: Attend, tiles: Tiles, gradients: Gradients };
  const names = Object.keys(parts);
  const titles = { attend: T("Attend"), tiles: T("Softmax in blocks"), gradients: T("Gradients through a mask") };
  const body = el("div", {});
  const chooser = choice(T("Part"), names.map((name) => titles[name]), names.indexOf(store.state.part),
    (i) => store.set({ part: names[i] }));
  const share = Share(page, () => (shown && shown.model() ? pythonOf(shown.model()) : null), () => shown.node);
  const node = el("section", {}, el("div", { class: "mhac-says mhac-controls" }, el("h1", { text: T("All controls") }),
    chooser), body, share.node);
  const ends = endings();
  let shown = null;

  function show() {
    if (shown) shown.end();
    shown = parts[store.state.part](page, share.draw);
    chooser.set(names.indexOf(store.state.part));
    body.replaceChildren(shown.node);
    if (node.isConnected) shown.start();
    share.draw();
  }
  show();
  ends.add(store.subscribe((changed) => changed.includes("part") && show()));
  ends.add(() => shown.end());
  return { node, start: () => shown.start(), draw: () => shown.draw(), end: ends.end, focus: () => shown.focus() };
}

const UNEDITED = { q: "", k: "", v: "", w: "" };
const cornersOf = () => [["", T("none")], ["top_left", T("top left")], ["bottom_right", T("bottom right")]];
const BOARD_MOST = 24; // rows and columns of a product that is drawn as it is computed by hand
const TABLE_MOST = 16;
const CHOICES = ["head", "row", "column", "feature", "pointed", "focus", "zoom", "mode", "topk", "root", "step", "part",
  "lang", "p", "block"];
const NEW_FORM = ["from", "kind", "item"]; // with these there are other fields
const NEW_NUMBERS = ["from", "kind", "item", "text", "n", "m", "d", "draw", "heads"]; // and other tables to edit

const namesOf = (model, side, count) => names(model.tokens && model.tokens[side] && model.tokens[side].length === count
  ? model.tokens[side] : null, count);

function Attend(page, drawn) {
  const { store, pen } = page;
  const { state } = store;
  const form = el("div", { class: "mhac-form" });
  const numbers = el("div", { class: "mhac-editors" });
  const trouble = el("p", { class: "mhac-trouble", role: "alert", hidden: true });
  const stage = el("div", { class: "mhac-seen" });
  const explained = el("section", { class: "mhac-explained", "aria-label": T("The chosen cell") });
  const boards = el("div", { class: "mhac-boards" });
  const tables = el("details", { class: "mhac-tables" });
  const results = el("div", {}, stage, explained, boards, tables);
  const random = el("p", { class: "mhac-note" });
  const node = el("div", {}, el("details", { class: "mhac-numbers" },
    el("summary", { text: T("Queries, keys and values: change a number") }), numbers), form, random, trouble, results);
  const ends = endings();
  let [view, model, scenes, asked, wanted] = [null, null, [], 0, false];

  const change = (values) => store.set(values);

  function fillForm() {
    form.replaceChildren(el("div", { class: "mhac-fields" }, ...sourceFields()),
      el("div", { class: "mhac-fields" }, ...optionFields()));
    setText(random, state.from === "sentence"
      ? T("The words have random vectors, the same word the same: what looks at what means nothing. Chapters 2 and 4 have learned ones.") : "");
  }

  // Where the numbers come from.  What was edited is gone when they are drawn again, and Back brings it back.
  function sourceFields() {
    const s = state;
    const sources = Object.entries(SOURCES).map(([id, source]) => [id, T(source.name)]);
    const { lengths } = SOURCES[s.from];
    const items = lengths.map((length, i) => [String(i), i + " (" + T("length {n}", { n: length }) + ")"]);
    const count = (label, name) => numberBox(label, s[name], { ...ALL.fields[name], step: 1 },
      (x) => change({ ...UNEDITED, [name]: x }));
    const random = s.from === "drawn";
    return [
      select(T("Start from"), sources, s.from, (from) => change({ ...SOURCES[from].set, from, head: 0, row: 0, column: 0,
        feature: 0 })),
      s.from === "sentence" && textBox(T("Sentence"), s.text, (text) => change({ ...UNEDITED, text }), 34),
      random && count(T("queries"), "n"),
      random && count(T("keys"), "m"),
      (random || s.from === "sentence") && count(T("features"), "d"),
      count(T("numbers drawn with seed"), "draw"),
      items.length > 0 && select(T("item of the batch"), items, String(s.item),
        (i) => change({ item: Number(i), len: String(lengths[i]) })),
    ].filter(Boolean);
  }

  function optionFields() {
    const s = state;
    const kinds = [["dot", T("dot product")], ["additive", T("additive")], ["distance", T("by distance")]];
    const kernels = Object.keys(KERNELS).map((name) => [name, T(name)]);
    const text = (label, name, size, hint) => textBox(label, s[name], (given) => change({ [name]: given }), size, hint);
    const near = s.kind === "distance";
    const seed = numberBox(T("its seed"), s.seed, { ...ALL.fields.seed, step: 1 }, (x) => change({ seed: x }));
    seed.hidden = s.drop === 0;
    return [
      select(T("scores"), kinds, s.kind, (kind) => change({ kind, w: "" })),
      near && select(T("kernel"), kernels, s.kernel, (kernel) => change({ kernel })),
      near && numberBox(T("width"), s.width, { ...ALL.fields.width, step: 0.1 }, (width) => change({ width })),
      !near && numberBox(T("heads"), s.heads, { ...ALL.fields.heads, step: 1 }, (heads) => change({ heads })),
      text(T("lengths"), "len", 8, T("all")),
      select(T("causal"), cornersOf(), s.causal, (causal) => change({ causal })),
      text(T("window left"), "left", 4, "∞"),
      text(T("right"), "right", 4, "∞"),
      !near && text(T("scale"), "scale", 6, s.kind === "dot" ? "1/√d" : "1"),
      !near && text(T("softcap"), "softcap", 5, T("none")),
      numberBox(T("dropout"), s.drop, { ...ALL.fields.drop, step: 0.1 }, (drop) => {
        seed.hidden = drop === 0;
        change({ drop });
      }),
      seed,
    ].filter(Boolean);
  }

  function fillNumbers() {
    if (!model) return;
    const editorOf = (name, title, rows, side) => editor(name, title, rows, namesOf(model, side, rows.length), (now) =>
      change({ [name.toLowerCase()]: writeRows(now) }));
    numbers.replaceChildren(editorOf("Q", T("queries"), model.q, "q"), editorOf("K", T("keys"), model.k, "k"),
      editorOf("V", T("values"), model.v, "k"),
      ...(model.w ? [editor("w", T("additive weights"), [model.w], ["w"], (now) => change({ w: writeRows(now) }))] : []));
  }

  function update() {
    const before = model;
    try {
      model = modelOf(state, page.core);
      trouble.hidden = true;
      results.hidden = false;
    } catch (error) {
      setText(trouble, wordsOfError(error));
      trouble.hidden = false;
      results.hidden = true; // an old picture beside new numbers would lie
      model = null;
      drawn();
      return;
    }
    if (!before) fillNumbers();
    showView().then((there) => there && redraw());
  }

  function redraw() {
    drawBoards();
    explain();
    fillTables();
    drawn();
  }

  // ---- the weights ----

  async function showView() {
    const ticket = ++asked;
    const panel = panelOf(model);
    const worded = Boolean(panel.qt); // without words there is no sentence to show
    if (view && view.worded === worded) await view.show(panel);
    else {
      if (view) view.end();
      const data = { title: T("Attention weights"), layers: [""], heads: null, notes: [], panels: [panel], level: 2 };
      const made = await makeView(data, store);
      if (ticket !== asked) {
        made.end();
        return false;
      }
      view = { worded, ...made };
      stage.replaceChildren(view.root);
      view.follow(page.host);
      if (wanted) focus();
    }
    return ticket === asked && node.isConnected;
  }

  // Keys work as soon as there is something to move in.
  function focus() {
    wanted = !view;
    if (view) view.first.focus({ preventScroll: true });
  }

  const headNow = () => Math.min(state.head, model.call.heads > 1 ? model.call.heads : 0); // the one after the last is the mean
  function active() {
    const { queries, keys } = model.call;
    const { q, k } = state.pointed || { q: state.row, k: state.column };
    return { q: clamp(q, 0, queries - 1), k: clamp(k, 0, keys - 1) };
  }

  // What is chosen in the view is explained below it.
  const follow = once(() => {
    if (!model || !node.isConnected) return;
    markBoards();
    explain();
    if (!state.pointed) fillTables();
  });
  let headShown = state.head;
  ends.add(store.subscribe((changed) => {
    if (changed.some((name) => !CHOICES.includes(name))) {
      update();
      if (changed.some((name) => NEW_FORM.includes(name))) refill(form, fillForm);
      if (changed.some((name) => NEW_NUMBERS.includes(name))) fillNumbers();
    } else if (model && changed.includes("head") && headShown !== state.head) {
      headShown = state.head;
      redraw();
    } else follow();
  }));
  ends.add(() => view && view.end());
  ends.add(() => (asked += 1));

  // ---- the formula of the chosen cell ----

  function explain() {
    const { q: i, k: j } = active();
    const feature = Math.min(state.feature, model.call.value_dim - 1);
    const features = range(0, model.call.value_dim - 1).map((c) => [String(c), String(c)]);
    const lines = explanation(model, headNow(), i, j, feature, namesOf(model, "q", model.call.queries)[i],
      namesOf(model, "k", model.call.keys)[j]);
    const rows = lines.map(([title, what]) => el("div", { class: "mhac-line-of" }, el("h2", { text: title }),
      el("p", { class: "mhac-arith" }, ...formula(what))));
    const chooser = model.call.value_dim > 1 ? select(T("feature of the output"), features, String(feature), (c) => {
      change({ feature: Number(c) });
    }) : null;
    refill(explained, () => explained.replaceChildren(...rows, ...(chooser ? [chooser] : [])));
  }

  // ---- all matrices ----

  function drawBoards() {
    const h = headNow();
    const { queries, keys } = model.call;
    scenes = [];
    boards.replaceChildren();
    if (queries > BOARD_MOST || keys > BOARD_MOST || h >= model.call.heads) return;
    const rows = namesOf(model, "q", queries);
    const columns = namesOf(model, "k", keys);
    const own = (m) => m.map((row) => (model.call.head_dim ? headOf(row, h, model.head_dim) : row));
    const [q, k] = [own(model.q), own(model.k)];
    const grid = (name, data, more) => Grid(pen, { name, data, kind: "signed", rows: null, columns: null, ...more });
    const masked = (a, b) => !model.sees(a, b);
    const asProduct = model.state.kind === "dot";
    const scores = grid(scoreName(model), scoresOf(model, h).map((row) => row.map((x) => (Number.isFinite(x) ? x : null))),
      { ...(asProduct ? {} : { rows, columns }), masked });
    const queryGrid = grid("Q", q, { rows });
    const keyGrid = asProduct ? grid("K^T", transposed(k), { columns }) : grid("K", k, { rows: columns });
    const first = asProduct ? product(queryGrid, keyGrid, scores) : line([queryGrid, keyGrid,
      ...(model.w ? [grid("w_v", [model.w])] : []), scores], model.w ? ["+", "tanh ·", "→"] : ["−", "→"], scores);
    const dropped = dropOf(model, h);
    const top = Math.max(...model.found.weights);
    const weights = grid("A", dropped || weightsOf(model, h), { kind: "weight", rows, top, masked });
    const second = product(weights, grid("V", valuesOf(model, h), { rows: columns }), grid("O", outputOf(model, h)));
    const width = boards.clientWidth || 320;
    scenes = [first, second];
    boards.replaceChildren(...scenes.map((scene) => el("div", { class: "mhac-board" }, el("div", {}, scene.node))));
    for (const scene of scenes) scene.fit((width > 900 ? width / 2 - 20 : width) - 44, TALLEST);
    scenes.parts = { weights, keyGrid: asProduct ? null : keyGrid };
    scores.canvas.addEventListener("click", (event) => {
      const at = scores.at(event);
      if (at) store.set({ row: at.i, column: at.j });
    });
    markBoards();
  }

  function markBoards() {
    if (!scenes.length) return;
    const { q: i, k: j } = active();
    scenes[0].draw({ cell: { i, j } });
    if (scenes.parts.keyGrid) scenes.parts.keyGrid.draw({ row: j });
    scenes[1].draw({ cell: { i, j: Math.min(state.feature, model.call.value_dim - 1) } });
    scenes.parts.weights.draw({ cell: { i, j } });
  }

  function fillTables() {
    const { queries, keys, value_dim } = model.call;
    const h = Math.min(headNow(), model.call.heads - 1);
    const [rows, columns] = [namesOf(model, "q", queries), namesOf(model, "k", keys)];
    const seen = scoresOf(model, h).map((row, i) => row.map((x, j) => (model.sees(i, j) ? x : -Infinity)));
    const weights = weightsOf(model, h);
    if (queries > TABLE_MOST || keys > TABLE_MOST) {
      const { q } = active();
      tables.replaceChildren(el("summary", { text: T("The chosen query as a table") }), table(rows[q],
        columns.map((_, j) => [seen[q][j], weights[q][j]]), columns, [T("score"), T("weight")], 4));
      return;
    }
    tables.replaceChildren(el("summary", { text: T("The same as tables") }),
      table(T("scores"), seen, rows, columns, 4), table(T("weights"), weights, rows, columns, 4),
      table(T("output"), outputOf(model, h), rows, range(0, value_dim - 1).map(String), 4));
  }

  return {
    node, model: () => model, end: ends.end,
    start() {
      fillForm();
      update();
    },
    draw: () => model && !results.hidden && drawBoards(),
    focus,
  };
}
