// One chapter of the lecture: title and sentences, one picture, at most three controls, the chosen number's formula,
// and a folded table.  A chapter is
//   {id, title, says (saysOf(data) where it depends), fields, across, along, controls(page), numbers(state, core, data), picture(numbers, box),
//    formula(numbers, small), note(numbers, data, small), table(numbers), said(numbers), python(numbers)}
// `numbers` is pure: what the state asks for, computed by the core.  All else draws it or says it.  A node of the picture
// with pick(event) answers the pointer with a change of the state; arrow keys move `across` and `along` through the stops.

const SMALL = 620; // a picture of so few pixels is a phone's: what it leaves out, formula and note leave out, too
const PICTURE = { least: 250, most: 440, phone: 500 }; // pixels of height

function Chapter(page, chapter) {
  const { store, core, pen } = page;
  const controls = chapter.controls(page).map((each) => Control(store, each));
  const stage = el("div", { class: "mhac-picture", tabindex: 0, role: "group", "aria-label": T(chapter.title) + ": " +
    T("picture; arrow keys and space change it") });
  const trouble = el("p", { class: "mhac-trouble", role: "alert", hidden: true });
  const lines = el("div", { class: "mhac-explained" });
  const note = el("p", { class: "mhac-note" });
  const table = el("details", { class: "mhac-tables" }, el("summary", { text: T("The same as tables") }), el("div"));
  const live = el("div", { class: "mhac-unseen", "aria-live": "polite" });
  const share = Share(page, () => (numbers && chapter.python ? chapter.python(numbers, core) : null), () => stage);
  // The control that arrows do not move: the space bar does.
  const third = controls.find((each) => each.name !== chapter.across && each.name !== chapter.along);
  const labelOfField = (name) => T(controls.find((each) => each.name === name).label);
  const hint = "← → " + labelOfField(chapter.across) + " · ↑ ↓ " + labelOfField(chapter.along) + " · " + T("space") + " "
    + T(third.name ? labelOfField(third.name) : third.label) + T(".");
  const reset = el("button", { type: "button", class: "mhac-button", text: T("Reset"),
    onclick: () => store.set(startOf(chapter.fields)) });
  const apart = (text) => (/[。！？]$/.test(text) ? text : text + " "); // a full stop in Chinese has its space in it
  const node = el("section", { class: "mhac-chapter" },
    el("div", { class: "mhac-says" }, el("h1", { text: T(chapter.title) }),
      ...(chapter.saysOf ? chapter.saysOf(page.data) : chapter.says).map((text) => el("p", { text: apart(T(text)) }))),
    stage, trouble,
    el("div", { class: "mhac-fields" }, ...controls.map((each) => each.node), reset), lines,
    el("div", { class: "mhac-folds" }, table, note, share.node), live);
  let numbers = null;
  let held = -1; // the node of the picture that the pointer has
  const parts = endings();

  function update() {
    try {
      numbers = chapter.numbers(store.state, core, page.data);
      trouble.hidden = true;
    } catch (error) {
      numbers = null;
      setText(trouble, error.message);
      trouble.hidden = false;
    }
    controls.forEach((each) => each.show(store.state));
    const small = stage.clientWidth - 12 < SMALL;
    lines.replaceChildren(...(numbers ? chapter.formula(numbers, small) : []).map(([title, what]) =>
      el("p", { class: "mhac-line-of" }, el("b", { text: title }), " ",
        el("span", { class: "mhac-arith" }, ...formula(what)))));
    setText(note, [hint, chapter.signed && T("Red is above zero, blue below."),
      numbers && chapter.note && chapter.note(numbers, page.data, small)].filter(Boolean).map(apart).join("").replace(/([。！？]) /g, "$1").trimEnd());
    share.draw();
    fold();
    draw();
  }

  function fold() {
    if (table.open && numbers) table.lastChild.replaceChildren(...chapter.table(numbers));
  }

  // Picture and formula stand on the first screen, and what comes behind them lies below where there is no room; on a phone
  // the picture has the height it needs.
  function boxNow() {
    const width = stage.clientWidth - 12;
    const small = width < SMALL;
    const [picture, behind] = [stage, lines].map((each) => each.getBoundingClientRect());
    const rest = picture.top + window.scrollY + behind.bottom - picture.bottom + 8;
    const most = store.state.p ? 2000 : PICTURE.most;
    return { width, small, pen, height: small ? PICTURE.phone : clamp(window.innerHeight - rest, PICTURE.least, most) };
  }

  function draw() {
    if (!numbers || !stage.clientWidth) {
      stage.replaceChildren();
      return;
    }
    let box = boxNow();
    stage.style.height = box.small ? "" : box.height + "px";
    // A picture counts on letters of the usual width; where a language or the projector has wider ones, it is drawn smaller.
    for (let tries = 0; tries < 9; tries++) {
      stage.replaceChildren(chapter.picture(numbers, box));
      const [wide, high] = [stage.scrollWidth / stage.clientWidth, box.small ? 1 : stage.scrollHeight / stage.clientHeight];
      if (stage.scrollWidth <= stage.clientWidth && high <= 1) break;
      box = { ...box, width: Math.floor(box.width / Math.min(1.3, wide > 1 ? wide * 1.04 : 1)),
        height: Math.floor(box.height / Math.min(1.3, high > 1 ? high * 1.02 : 1)) };
    }
  }

  const pickable = () => [...stage.querySelectorAll("*")].filter((each) => each.pick);
  function pick(event) {
    const there = pickable()[held];
    const patch = there && numbers && there.pick(event);
    if (patch) store.set(patch);
  }
  stage.addEventListener("pointerdown", (event) => {
    held = pickable().findIndex((each) => each.contains(event.target));
    if (held < 0 || event.button) return;
    stage.setPointerCapture(event.pointerId);
    pick(event);
  });
  stage.addEventListener("pointermove", (event) => held >= 0 && pick(event));
  stage.addEventListener("pointerup", () => (held = -1));
  stage.addEventListener("pointercancel", () => (held = -1));
  table.addEventListener("toggle", fold);

  function step(name, by) {
    const { stops: all, of, most } = controls.find((each) => each.name === name);
    const stops = most ? all.slice(0, most(store.state)) : all;
    const now = of(store.state);
    const near = stops.reduce((best, x, i) => (Math.abs(x - now) < Math.abs(stops[best] - now) ? i : best), 0);
    const at = (stops.includes(now) ? stops.indexOf(now) : near) + by;
    store.set({ [name]: stops[name === third.name ? (at + stops.length) % stops.length : clamp(at, 0, stops.length - 1)] });
  }
  function keys(event) {
    const move = { ArrowLeft: [chapter.across, -1], ArrowRight: [chapter.across, 1], ArrowUp: [chapter.along, -1],
      ArrowDown: [chapter.along, 1], " ": [third.name, event.shiftKey ? -1 : 1] }[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return false;
    event.preventDefault();
    if (move[0]) step(...move);
    else third.node.click();
    return true;
  }
  stage.addEventListener("keydown", keys);

  const later = once(() => {
    if (!node.isConnected) return;
    update();
    setText(live, numbers ? chapter.said(numbers) : "");
  });
  parts.add(store.subscribe(later));
  if (chapter.effect) parts.add(chapter.effect(page));
  return { node, start: update, draw, keys, end: parts.end, focus: () => stage.focus({ preventScroll: true }) };
}

// A control from its description: {kind, name, label, stops, say, of, most} or {kind: "button", label, press(state)}; `of` is
// what a state means, where that is not the field itself, `most` how many of the stops a state has.
function Control(store, spec) {
  const { kind, name, label, stops, say, of = (state) => state[spec.name] } = spec;
  const text = (x) => (say ? say(x) : String(x));
  const change = (x) => store.set({ [name]: x });
  if (kind === "button") {
    const node = el("button", { type: "button", class: "mhac-button", text: T(label),
      onclick: () => store.set(spec.press(store.state)) });
    return { label, node, show: (state) => setText(node, T(spec.pressed && spec.isPressed(state) ? spec.pressed : label)) };
  }
  if (kind === "slider") {
    const node = slider(T(label), store.state[name], stops, change, text);
    return { name, label, stops, of, most: spec.most, node, show: (state) => node.show(state[name], spec.most && spec.most(state)) };
  }
  if (kind === "select") {
    const node = select(T(label), stops.map((x, i) => [String(i), text(x)]), String(stops.indexOf(store.state[name])),
      (i) => change(stops[i]));
    return { name, label, stops, of, node, show: (state) => node.show(String(stops.indexOf(state[name]))) };
  }
  const group = choice(T(label), stops.map(text), Math.max(0, stops.indexOf(of(store.state))), (i) => change(stops[i]));
  return { name, label, stops, of, node: el("div", { class: "mhac-field" }, el("span", { text: T(label) }), group),
    show: (state) => group.set(stops.indexOf(of(state))) };
}

// ---- what pictures are made of -------------------------------------------------------------------------------------

// What is across and what is down, beside the name of a matrix of scores or weights.
const queriesByKeys = (rows, columns) => "↓ " + T("{n} queries", { n: rows }) + ", → " + T("{n} keys", { n: columns });

// A grid with its place: `more` is a grid's spec, with cell sizes w and h, and margins where its neighbours ask for them.
function placed(pen, name, data, { w, h, margins, look, pick, ...more }) {
  const grid = Grid(pen, { name, data, kind: "signed", rows: null, columns: null, ...more });
  grid.setPlace({ w, h }, { ...grid.margins(), ...margins });
  grid.draw(look || {});
  if (pick) {
    grid.canvas.pick = (event) => {
      const at = grid.at(event);
      return at && pick(at);
    };
  }
  return grid.node;
}

// A node in a grid of columns and rows, at the foot of its place, so that matrices stand on one line.
const standing = (node, column, row) => Object.assign(node, { style: "grid-column:" + column + ";grid-row:" + row
  + ";align-self:end" });

const rowOf = (...nodes) => el("div", { class: "mhac-row" }, ...nodes);
const stack = (...nodes) => el("div", { class: "mhac-stack" }, ...nodes);
