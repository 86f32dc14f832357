// The frame of the attention view: title, what to show, the scale beneath, the keys that work everywhere.

const KEYS = [
  ["← ↑ ↓ →", "move from cell to cell"], ["0 … 9", "choose a head"], ["m", "mean of the heads"],
  ["[  ]", "head before, head after"], ["v", "matrix, lines, sentence"], ["+  −  Esc", "zoom in, out, back"],
  ["Enter", "chosen head or button"],
];

function Frame(app, parts, heads, readout) {
  const { data, state } = app;
  const subtitle = el("div", { class: "mhac-subtitle" });
  const modes = MODES.filter((mode) => mode !== "Sentence" || data.panels.some((panel) => panel.qt && panel.kt));
  const modeChoice = choice(T("Show as"), modes.map((mode) => T(mode)), Math.max(0, modes.indexOf(state.mode)),
    (i) => setMode(modes[i]));
  const header = el("header", {},
    el("div", { class: "mhac-titles" }, el("h3", { text: data.title }), subtitle),
    el("div", { class: "mhac-controls" }, ...selectors(app), modeChoice));
  const stage = el("div", { class: "mhac-main" }, ...modes.map((mode) => parts[mode].node));
  const legend = Legend(app, () => parts.Matrix.reset());
  const words = el("p", { class: "mhac-words" });
  const main = el("section", { class: "mhac-center" }, words, stage, legend.node);
  const body = el("div", { class: "mhac-body" }, heads.node, main, readout.node);
  const root = el("div", { class: "mhac-root", role: "group", "aria-label": data.title, "data-size": "large" },
    header, body, footer(data));
  app.size = () => root.getAttribute("data-size");
  root.addEventListener("keydown", keys);

  const setMode = (mode) => app.store.set({ mode, pointed: null });

  function update() {
    const { panel } = app;
    const many = panel.h > 1 ? T("{n} heads", { n: panel.h }) + " · " : "";
    setText(subtitle, many + (panel.queries > 1 ? T("{n} queries", { n: panel.queries }) : T("1 query")) + " × " +
      (panel.keys > 1 ? T("{n} keys", { n: panel.keys }) : T("1 key")));
    if (!modes.includes(state.mode)) state.mode = "Matrix";
    for (const mode of modes) parts[mode].node.hidden = mode !== state.mode;
    root.setAttribute("data-mode", state.mode);
    root.toggleAttribute("data-single", panel.stats.length < 2);
    const [entropy, confidence, said] = panel.stats[app.headNow()];
    const alone = panel.stats.length < 2 && !data.heads;
    words.replaceChildren(el("b", { text: alone ? "" : app.headName(app.headNow()) }),
      (alone && said ? said[0].toUpperCase() + said.slice(1) : " " + said) + " ",
      el("span", { class: "mhac-note", text: T("entropy {bits} of {most} bits · largest weight {weight} on average",
        { bits: entropy.toFixed(2), most: Math.log2(panel.keys).toFixed(2), weight: confidence.toFixed(2) }) }));
    legend.draw();
  }

  function keys(event) {
    const typing = event.composedPath()[0].tagName === "SELECT";
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = app.panel.stats.length - 1;
    const key = event.key;
    if (/^[0-9]$/.test(key) && Number(key) < app.panel.h) heads.pick(Number(key));
    else if (key === "m" && last > 0) heads.pick(last);
    else if (key === "[" || key === "]") heads.pick(clamp(app.headNow() + (key === "]" ? 1 : -1), 0, last));
    else if (key === "v") {
      const next = modes[(modes.indexOf(state.mode) + 1) % modes.length];
      modeChoice.set(modes.indexOf(next));
      setMode(next);
      requestAnimationFrame(() => {
        const { node } = parts[next];
        (node.matches("[tabindex]") ? node : node.querySelector("[tabindex]")).focus({ preventScroll: true });
      });
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  return { root, update };
}

// Which layer, which example: only where there are several.
function selectors(app) {
  const { data } = app;
  const select = (label, names, values, which) => {
    if (values.length < 2) return null;
    const box = el("select", { "aria-label": label }, ...values.map((value, i) =>
      el("option", { value, text: names[i] })));
    box.addEventListener("change", () => app.store.set({ [which]: Number(box.value) }));
    return box;
  };
  const examples = [...new Set(data.panels.map((panel) => panel.example))];
  const layers = [...new Set(data.panels.map((panel) => panel.layer))];
  return [
    select(T("Layer"), layers.map((i) => data.layers[i]), layers, "layer"),
    select(T("Example"), examples.map((i) => T("example {n}", { n: i + 1 })), examples, "example"),
  ];
}

// The colour scale with its numbers, the choice of scale, and the slider of the lines.
function Legend(app, reset) {
  const { state } = app;
  const bar = el("canvas", { role: "img" });
  const low = el("span", { text: "0" });
  const high = el("span");
  const middle = el("span", { class: "mhac-scale-middle" });
  const scale = choice(T("Colour scale"), [T("linear"), "√"], state.root ? 1 : 0, (i) => app.store.set({ root: i === 1 }));
  scale.title = T("√ brings out small weights");
  const count = el("output");
  const slider = el("input", { type: "range", min: 1, max: 1, step: 1, "aria-label": T("Lines per query") });
  slider.addEventListener("input", () => app.store.set({ topk: Number(slider.value) }));
  slider.addEventListener("keydown", (event) => event.stopPropagation());
  const lines = el("label", { class: "mhac-topk" }, el("span", { text: T("strongest keys per query") }), slider, count);
  const hint = el("span", { class: "mhac-note mhac-hint", text: T("Drag over a part to enlarge it.") });
  const back = el("button", { type: "button", class: "mhac-button mhac-hint", text: T("Show the whole matrix"),
    onclick: reset });
  const node = el("div", { class: "mhac-legend" }, lines, hint, back,
    el("div", { class: "mhac-scale" }, el("span", { class: "mhac-note", text: T("weight") }), low,
      el("div", { class: "mhac-scale-bar" }, bar, middle), high, scale));

  function draw() {
    const most = Math.min(app.panel.k, 32);
    slider.max = most;
    slider.value = Math.min(state.topk, most);
    setText(count, slider.value);
    lines.hidden = state.mode !== "Lines" || most < 2;
    const context = sized(bar, 132, 10);
    for (let x = 0; x < 132; x++) {
      context.fillStyle = app.ramp.css[Math.round((x / 131) * (STEPS - 1))];
      context.fillRect(x, 0, 1, 10);
    }
    const [zoom, panel] = [app.zoom(), app.panel];
    const zoomed = zoom.q1 - zoom.q0 < panel.q || zoom.k1 - zoom.k0 < panel.k;
    back.hidden = state.mode !== "Matrix" || !zoomed;
    hint.hidden = state.mode !== "Matrix" || zoomed || panel.q * panel.k <= 400;
    const ofRow = state.mode === "Sentence";
    setText(high, ofRow ? T("strongest of the row") : number(app.code.top, true));
    setText(middle, ofRow ? "" : number(app.code.top * (state.root ? 0.25 : 0.5), true));
    bar.setAttribute("aria-label", T("colours from weight 0 to {top}", { top: number(app.code.top, true) }));
  }
  return { node, draw };
}

function footer(data) {
  const help = el("details", {}, el("summary", { text: T("Keyboard") }), el("dl", {},
    ...KEYS.flatMap(([key, what]) => [el("dt", { text: key }), el("dd", { text: T(what) })])));
  const notes = data.notes.map((note) => el("p", { text: note }));
  return el("footer", {}, el("div", {}, ...notes,
    el("p", { text: whenKeysWork(T("arrows move, 0 to 9 choose a head, v changes the view.")) }),
    el("p", { text: T("Weights say where a head looks, not why a model decides.") })), help);
}
