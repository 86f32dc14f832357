// The attention view: the heads side by side, one of them large (as matrix, lines or sentence), and a column that
// says in numbers what is pointed at.
//
// `app` is what the parts share: the panel shown (one layer of one example), its decoded weights, the state, and the
// few calls through which a part reports what the reader points at.

const MODES = ["Matrix", "Lines", "Sentence"];
const BARS = 6; // keys listed in the column

async function buildView(host, data) {
  const view = await makeView(data);
  return { root: view.root, first: view.first, ready: () => view.follow(host) };
}

// The view as a part of a page: `follow` starts it once it is in the document.
async function makeView(data) {
  const app = await makeApp(data);
  const parts = { Matrix: Matrix(app), Lines: Lines(app), Sentence: Sentence(app) };
  const heads = Heads(app);
  const readout = Readout(app);
  const frame = Frame(app, parts, heads, readout);

  app.redraw = once(() => {
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
  app.marked = mark;
  return {
    app, root: frame.root, first: parts.Matrix.node,
    follow(host) {
      followTheme(host, (theme) => {
        frame.root.setAttribute("data-theme", theme);
        app.theme = theme;
        app.ramp = ramp(theme);
        app.redraw();
      });
      let width = 0;
      new ResizeObserver((entries) => {
        const now = Math.round(entries[0].contentRect.width);
        if (now === width) return; // a new height is our own doing
        width = now;
        frame.root.setAttribute("data-size", now >= 940 ? "large" : now >= 620 ? "medium" : "small");
        app.redraw();
      }).observe(frame.root);
    },
  };
}

async function makeApp(data) {
  const cache = new Map();
  const app = {
    data, theme: "light", ramp: ramp("light"),
    state: { layer: data.panels[0].layer, example: data.panels[0].example, head: 0, mode: "Matrix", topk: 4,
      root: false },
    pointed: null, // what the pointer is over
    kept: { q: 0, k: 0 }, // what was clicked, or reached by keys: shown while nothing is pointed at
    label(side, i) {
      const tokens = side === "q" ? app.panel.qt : app.panel.kt;
      return tokens && i < tokens.length ? visible(tokens[i]) : String(i);
    },
    color: (name) => COLORS[app.theme][name],
    number: (w) => number(w, app.panel.bits === 16),
    tall: () => (app.size() === "small" ? 460 : 560),
    size: () => "large",
    active: () => app.pointed || app.kept,
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
    head: () => app.weightsOf(app.state.head),
    weight: (h, q, k) => app.weightsOf(h)[q * app.panel.k + k],
    row(h, q) {
      return app.weightsOf(h).subarray(q * app.panel.k, (q + 1) * app.panel.k);
    },
    bestKey(q) {
      const row = app.row(app.state.head, q);
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
      const key = app.state.head + "/" + most;
      if (!app.code.best.has(key)) app.code.best.set(key, strongest(app.head(), app.panel.q, app.panel.k, most));
      return app.code.best.get(key);
    },
    hover(q, k) {
      const same = q === null ? !app.pointed : app.pointed && app.pointed.q === q && app.pointed.k === k;
      if (same) return;
      app.pointed = q === null ? null : { q, k };
      app.marked();
    },
    pin(q, k, byKey) {
      app.kept = { q, k };
      if (byKey) app.pointed = null;
      app.say();
      app.marked();
    },
    say() {},
    async open(layer, example) {
      const panel = data.panels.find((p) => p.layer === layer && p.example === example) || data.panels[0];
      if (!cache.has(panel)) {
        if (cache.size > 3) cache.delete(cache.keys().next().value);
        cache.set(panel, Object.assign(await decode(panel), { best: new Map() }));
      }
      app.code = cache.get(panel);
      const resized = !app.panel || app.panel.q !== panel.q || app.panel.k !== panel.k;
      app.panel = panel;
      Object.assign(app.state, { layer: panel.layer, example: panel.example });
      app.state.head = Math.min(app.state.head, panel.stats.length - 1);
      if (!resized) return;
      app.zoom = whole(panel);
      app.pointed = null;
      // begin at the strongest weight, but not at a query that has one key only to look at
      const head = app.head();
      const open = (w) => (w < 0.9995 ? w : -1);
      const best = head.reduce((at, w, i) => (open(w) > open(head[at]) ? i : at), 0);
      app.kept = { q: Math.floor(best / panel.k), k: best % panel.k };
    },
  };
  await app.open(app.state.layer, app.state.example);
  app.state.root = app.panel.k > 64; // many keys: most weights are small
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
    app.state.head = h;
    app.redraw();
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
      const chosen = h === app.state.head;
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
      const text = app.pointed ? app.weight(h, q, k).toFixed(3) : T("{bits} bit", { bits: app.panel.stats[h][0].toFixed(1) });
      setText(card.value, text);
      card.value.classList.toggle("mhac-hot", Boolean(app.pointed));
    });
  }

  node.addEventListener("keydown", (event) => {
    const columns = Number(node.getAttribute("data-columns"));
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const next = clamp(app.state.head + step, 0, cards.length - 1);
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
    const h = app.state.head;
    const row = app.row(h, q);
    const w = row[k];
    setText(query, app.label("q", q));
    setText(key, app.label("k", k));
    setText(queryAt, app.panel.qt ? String(q * app.panel.qStep) : "");
    setText(keyAt, app.panel.kt ? String(k * app.panel.kStep) : "");
    setText(value, app.number(w));
    const larger = row.reduce((n, other) => n + (other > w ? 1 : 0), 0);
    setText(rank, w > 0 ? T("rank {rank} of {many} {places}", { rank: larger + 1, many: row.length, places: places() })
      : T("no weight at all"));
    setText(rowTitle, T("“{token}” looks at", { token: app.label("q", q) }));
    drawBars(row, k);
    drawAcross(q, k);
  }

  const places = () => (app.panel.kStep > 1 ? T("cells") : T("keys"));

  function drawBars(row, k) {
    const best = strongest(row, 1, row.length, Math.min(BARS, row.length));
    const sum = row.reduce((a, b) => a + b, 0) || 1;
    let entropy = 0;
    for (const w of row) if (w > 0) entropy -= (w / sum) * Math.log2(w / sum);
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
      pillar.classList.toggle("mhac-now", h === app.state.head);
    });
    across.setAttribute("aria-label", weights.map((w, h) => app.headName(h) + " " + app.number(w)).join(", "));
  }

  // What a screen reader hears after a key or a click; pointing alone would chatter.
  app.say = () => {
    const { q, k } = app.kept;
    const w = app.number(app.weight(app.state.head, q, k));
    const names = { head: app.headName(app.state.head), query: app.label("q", q), key: app.label("k", k), weight: w };
    setText(live, T("{head}, {query} to {key}: {weight}", names));
  };
  return { node, draw };
}
