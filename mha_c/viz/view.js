// The attention view: the heads side by side, one of them large (as matrix, lines or sentence), and a column that
// says in numbers what is pointed at.
//
// `app` is what the parts share: the panel shown (one layer of one example), its decoded weights, and questions about
// them.  What is chosen stands in the store alone: layer, example, head, mode, topk, root (the scale); row and column, which
// a click or a key has kept; pointed, {q, k} or null; focus, the token whose lines are shown; zoom, or null for all.

const MODES = ["Matrix", "Lines", "Sentence"];
const BARS = 6; // keys listed in the column
const CHOSEN = { head: 0, mode: "Matrix", topk: 4, root: null, row: null, column: null, pointed: null, focus: null, zoom: null };
const MARKS = ["row", "column", "pointed"]; // what is only marked: all else is drawn again

async function buildView(host, data) {
  if (data.words) spoken = data.words;
  const view = await makeView(data, Store({}));
  return { root: view.root, first: view.first, ready: () => view.follow(host) };
}

// The view as a part of a page, whose store it shares: `follow` starts it once it is in the document, `end` ends it.
async function makeView(data, store) {
  const app = await makeApp(data, store);
  const parts = { Matrix: Matrix(app), Lines: Lines(app), Sentence: Sentence(app) };
  const heads = Heads(app);
  const readout = Readout(app);
  const frame = Frame(app, parts, heads, readout);

  const redraw = once(() => {
    frame.update();
    heads.draw();
    parts[app.state.mode].draw();
    readout.draw();
  });
  const mark = once(() => {
    parts[app.state.mode].mark();
    heads.mark();
    readout.draw();
  });
  const ends = endings();
  ends.add(store.subscribe((changed) => {
    if (changed.includes("layer") || changed.includes("example")) app.open().then(redraw);
    else if (changed.every((name) => MARKS.includes(name))) mark();
    else redraw();
  }));
  return {
    root: frame.root, first: parts.Matrix.node, end: ends.end,
    // Another panel in the place of the first one, as a page has computed it.
    async show(panel) {
      data.panels = [panel];
      await app.open();
      redraw();
    },
    follow(host) {
      ends.add(followTheme(host, frame.root, app, redraw));
      ends.add(followWidth(frame.root, () => {
        const { paddingLeft, paddingRight } = getComputedStyle(frame.root);
        const now = frame.root.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
        frame.root.setAttribute("data-size", now >= 940 ? "large" : now >= 620 ? "medium" : "small");
        redraw();
      }));
    },
  };
}

async function makeApp(data, store) {
  const cache = new Map();
  const { state } = store;
  for (const [name, start] of Object.entries({ ...CHOSEN, ...data.chosen })) if (!(name in state)) state[name] = start;
  for (const name of ["layer", "example"]) if (!(name in state)) state[name] = data.panels[0][name];
  let asked = 0;
  const app = Object.assign(Pen("light"), {
    data, store, state,
    label(side, i) {
      const tokens = side === "q" ? app.panel.qt : app.panel.kt;
      return tokens && i < tokens.length ? visible(tokens[i]) : String(i);
    },
    number: (w) => number(w, app.panel.bits === 16),
    tall: () => (app.size() === "small" ? 460 : 560),
    size: () => "large",
    kept: () => ({ q: clamp(state.row, 0, app.panel.q - 1), k: clamp(state.column, 0, app.panel.k - 1) }),
    active: () => (state.pointed && state.pointed.q < app.panel.q && state.pointed.k < app.panel.k ? state.pointed : app.kept()),
    headNow: () => Math.min(state.head, app.panel.stats.length - 1),
    zoom: () => state.zoom || whole(app.panel),
    // heads are counted from 0; the one after the last is their mean
    isMean: (h) => h === app.panel.h,
    headName: (h) => (app.isMean(h) && h > 0 ? T("Mean") : data.heads ? data.heads[h] : T("Head {h}", { h })),
    words: (h) => app.panel.stats[h][2],
    weightsOf(h) {
      if (!app.isMean(h)) return app.code.heads[h];
      if (!app.code.mean) {
        const mean = (app.code.mean = new Float32Array(app.panel.q * app.panel.k));
        for (const head of app.code.heads) for (let i = 0; i < mean.length; i++) mean[i] += head[i] / app.panel.h;
      }
      return app.code.mean;
    },
    head: () => app.weightsOf(app.headNow()),
    weight: (h, q, k) => app.weightsOf(h)[q * app.panel.k + k],
    row(h, q) {
      return app.weightsOf(h).subarray(q * app.panel.k, (q + 1) * app.panel.k);
    },
    bestKey(q) {
      const row = app.row(app.headNow(), q);
      return row.indexOf(row.reduce((a, b) => Math.max(a, b), 0));
    },
    bestQuery(k) {
      let best = 0;
      const head = app.head();
      for (let q = 1; q < app.panel.q; q++) if (head[q * app.panel.k + k] > head[best * app.panel.k + k]) best = q;
      return best;
    },
    // kept per head and number, since hovering asks again and again
    strongest(most) {
      const key = app.headNow() + "/" + most;
      if (!app.code.best.has(key)) app.code.best.set(key, strongest(app.head(), app.panel.q, app.panel.k, most));
      return app.code.best.get(key);
    },
    hover(q, k) {
      const { pointed } = state;
      const same = q === null ? !pointed : pointed && pointed.q === q && pointed.k === k;
      if (!same) store.set({ pointed: q === null ? null : { q, k } });
    },
    pin(q, k, byKey) {
      store.set({ row: q, column: k, pointed: byKey ? null : state.pointed });
      app.say();
    },
    say() {},
    // Shows the panel of the state's layer and example.  One that is asked for later wins, however long this one takes.
    async open() {
      const panel = data.panels.find((p) => p.layer === state.layer && p.example === state.example) || data.panels[0];
      const ticket = ++asked;
      const code = cache.get(panel) || Object.assign(await decode(panel), { best: new Map() });
      if (ticket !== asked) return;
      cache.delete(panel);
      cache.set(panel, code);
      if (cache.size > 4) cache.delete(cache.keys().next().value);
      if (app.panel && app.panel !== panel && data.panels.length > 1) state.focus = null; // other tokens
      const resized = app.panel && (app.panel.q !== panel.q || app.panel.k !== panel.k);
      Object.assign(app, { code, panel });
      if (resized) Object.assign(state, { zoom: null, pointed: null });
      if (state.root === null) state.root = panel.k > 64; // many keys: most weights are small
      if (state.row !== null && state.column === null) state.column = app.bestKey(app.kept().q); // a row that was asked for
      if (state.row !== null && !(resized && data.panels.length > 1)) return;
      // begin at the strongest weight, but not at a query that has one key only to look at
      const head = app.head();
      const open = (w) => (w < 0.9995 ? w : -1);
      const best = head.reduce((at, w, i) => (open(w) > open(head[at]) ? i : at), 0);
      Object.assign(state, { row: Math.floor(best / panel.k), column: best % panel.k });
    },
  });
  await app.open();
  return app;
}

// ---- the heads side by side --------------------------------------------------------------------------------------

function Heads(app) {
  const node = el("div", { class: "mhac-heads", role: "radiogroup", "aria-label": T("Heads") });
  let cards = [];
  let made = 0;

  function make() {
    made = app.panel.stats.length;
    cards = Array.from({ length: made }, (_, h) => {
      const canvas = el("canvas", { "aria-hidden": "true" });
      const name = el("span", { class: "mhac-card-name" });
      const value = el("span", { class: "mhac-card-value" });
      const button = el("button", { type: "button", class: "mhac-card", role: "radio", onclick: () => pick(h) },
        el("span", { class: "mhac-thumb" }, canvas), el("span", { class: "mhac-card-text" }, name, value),
        el("span", { class: "mhac-meter", "aria-hidden": "true" }, el("span")));
      return { canvas, name, value, button };
    });
    node.replaceChildren(...cards.map((card) => card.button));
    const columns = made <= 5 ? 2 : made <= 13 ? 3 : 4;
    node.style.setProperty("--mhac-columns", columns);
    node.setAttribute("data-columns", columns);
  }

  function pick(h) {
    app.store.set({ head: h });
    app.say();
  }

  function draw() {
    node.hidden = app.panel.stats.length < 2;
    if (node.hidden) return;
    if (made !== app.panel.stats.length) make();
    const ratio = window.devicePixelRatio || 1;
    cards.forEach((card, h) => {
      const box = card.canvas.parentElement.clientWidth;
      if (!box) return;
      const shape = clamp(app.panel.q / app.panel.k, 0.4, 1.6);
      const context = sized(card.canvas, box, Math.round(box * shape));
      context.imageSmoothingEnabled = false;
      const height = Math.round(box * shape);
      context.drawImage(paint(app, app.weightsOf(h), whole(app.panel), box * ratio, height * ratio), 0, 0, box, height);
      const chosen = h === app.headNow();
      setText(card.name, app.isMean(h) ? T("Mean") : app.data.heads ? app.data.heads[h] : String(h));
      card.button.setAttribute("aria-checked", String(chosen));
      card.button.tabIndex = chosen ? 0 : -1;
      const [entropy, , words] = app.panel.stats[h];
      const label = [app.headName(h) + ":", words, T("entropy {bits} bits", { bits: entropy.toFixed(2) })].filter(Boolean).join(" ");
      card.button.setAttribute("aria-label", label);
      card.button.title = label;
      const most = Math.log2(app.panel.keys) || 1;
      card.button.lastChild.firstChild.style.width = clamp(100 * (entropy / most), 0, 100) + "%";
    });
    mark();
  }

  // While a cell is pointed at, every head says how much weight it has there; otherwise its entropy.
  function mark() {
    const { q, k } = app.active();
    cards.forEach((card, h) => {
      if (h >= app.panel.stats.length) return;
      const text = app.state.pointed ? app.weight(h, q, k).toFixed(3) : T("{bits} bit", { bits: app.panel.stats[h][0].toFixed(1) });
      setText(card.value, text);
      card.value.classList.toggle("mhac-hot", Boolean(app.state.pointed));
    });
  }

  node.addEventListener("keydown", (event) => {
    const columns = Number(node.getAttribute("data-columns"));
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const next = clamp(app.headNow() + step, 0, cards.length - 1);
    pick(next);
    cards[next].button.focus();
  });
  return { node, draw, mark, pick };
}

// ---- the column of numbers -----------------------------------------------------------------------------------

function Readout(app) {
  const query = el("bdi");
  const key = el("bdi");
  const queryAt = el("sub");
  const keyAt = el("sub");
  const value = el("div", { class: "mhac-value" });
  const rank = el("div", { class: "mhac-note" });
  const rowTitle = el("h4");
  const list = el("ol", { class: "mhac-bars" });
  const spread = el("div", { class: "mhac-note" });
  const across = el("div", { class: "mhac-across", role: "img" });
  const acrossBox = el("div", { class: "mhac-block" }, el("h4", { text: T("This pair in every head") }), across);
  const live = el("div", { class: "mhac-unseen", "aria-live": "polite" });
  const node = el("aside", { class: "mhac-readout", "aria-label": T("Weights at the chosen place") },
    el("div", { class: "mhac-block" },
      el("div", { class: "mhac-pair" }, query, queryAt, el("span", { class: "mhac-arrow", text: "→" }), key, keyAt),
      value, rank),
    el("div", { class: "mhac-block" }, rowTitle, list, spread), acrossBox, live);

  const bars = Array.from({ length: BARS }, () => {
    const parts = { name: el("bdi", { class: "mhac-bar-name" }), fill: el("span"), w: el("span", { class: "mhac-bar-w" }) };
    parts.item = el("li", {}, parts.name, el("span", { class: "mhac-bar" }, parts.fill), parts.w);
    list.append(parts.item);
    return parts;
  });

  function draw() {
    const { q, k } = app.active();
    const h = app.headNow();
    const row = app.row(h, q);
    const w = row[k];
    setText(query, app.label("q", q));
    setText(key, app.label("k", k));
    setText(queryAt, app.panel.qt ? String(q * app.panel.qStep) : "");
    setText(keyAt, app.panel.kt ? String(k * app.panel.kStep) : "");
    setText(value, app.number(w));
    const larger = row.reduce((n, other) => n + (other > w ? 1 : 0), 0);
    const seen = row.reduce((n, other) => n + (other > 0 ? 1 : 0), 0); // hidden keys have no rank
    setText(rank, w > 0 ? T("rank {rank} of {many} {places}", { rank: larger + 1, many: seen, places: places() })
      : T("no weight at all"));
    setText(rowTitle, T("“{token}” looks at", { token: app.label("q", q) }));
    drawBars(row, k);
    drawAcross(q, k);
  }

  const places = () => (app.panel.kStep > 1 ? T("cells") : T("keys"));

  function drawBars(row, k) {
    const best = strongest(row, 1, row.length, Math.min(BARS, row.length));
    const sum = row.reduce((a, b) => a + b, 0) || 1;
    const entropy = entropyOf(row.map((w) => w / sum));
    bars.forEach((bar, i) => {
      const at = i < best.length ? best[i] : -1;
      bar.item.hidden = at < 0;
      if (at < 0) return;
      setText(bar.name, app.label("k", at));
      setText(bar.w, percent(row[at]));
      bar.fill.style.width = 100 * (row[at] / (row[best[0]] || 1)) + "%";
      bar.item.classList.toggle("mhac-now", at === k);
    });
    setText(spread, T("entropy {bits} bits, as if over {many} {places}",
      { bits: entropy.toFixed(2), many: (2 ** entropy).toFixed(1), places: places() }));
  }

  function drawAcross(q, k) {
    const heads = app.panel.h;
    acrossBox.hidden = heads < 2 || heads > 32;
    if (acrossBox.hidden) return;
    if (across.children.length !== heads) {
      across.replaceChildren(...Array.from({ length: heads }, (_, h) =>
        el("span", { class: "mhac-pillar" }, el("span", { class: "mhac-stem" }, el("span")),
          el("span", { class: "mhac-pillar-name", text: String(h) }))));
    }
    across.classList.toggle("mhac-many", heads > 12);
    const weights = app.code.heads.map((head) => head[q * app.panel.k + k]);
    const top = Math.max(...weights) || 1;
    weights.forEach((w, h) => {
      const pillar = across.children[h];
      pillar.firstChild.firstChild.style.height = Math.max(1.5, 100 * (w / top)) + "%";
      pillar.title = app.headName(h) + ": " + app.number(w);
      pillar.classList.toggle("mhac-now", h === app.headNow());
    });
    across.setAttribute("aria-label", weights.map((w, h) => app.headName(h) + " " + app.number(w)).join(", "));
  }

  // What a screen reader hears after a key or a click; pointing alone would chatter.
  app.say = () => {
    const { q, k } = app.kept();
    const w = app.number(app.weight(app.headNow(), q, k));
    const names = { head: app.headName(app.headNow()), query: app.label("q", q), key: app.label("k", k), weight: w };
    setText(live, T("{head}, {query} to {key}: {weight}", names));
  };
  return { node, draw };
}
