// Heat maps: painting a head into any number of pixels, and the large matrix with its axes, cross and zoom.

// The colour of every weight: by the panel's largest weight, or by its square root where small weights matter.
function levelsOf(app) {
  const { top } = app.code;
  if (!(top > 0)) return () => 0;
  const last = STEPS - 1;
  return app.state.root
    ? (w) => Math.round(last * Math.sqrt(Math.min(1, w / top)))
    : (w) => Math.round(last * Math.min(1, w / top));
}

// Paints the part v = {q0, q1, k0, k1} of a head into width x height device pixels.  Where several weights share a
// pixel the largest is shown: a mean would wash out the thin lines that heads are known by.
function paint(app, head, v, width, height) {
  const rows = Math.min(v.q1 - v.q0, Math.max(1, Math.round(height)));
  const columns = Math.min(v.k1 - v.k0, Math.max(1, Math.round(width)));
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  const level = levelsOf(app);
  const most = new Float32Array(columns);
  const columnOf = new Uint32Array(v.k1 - v.k0);
  for (let k = 0; k < columnOf.length; k++) columnOf[k] = Math.floor((k * columns) / columnOf.length);
  for (let row = 0; row < rows; row++) {
    const first = v.q0 + Math.floor((row * (v.q1 - v.q0)) / rows);
    const end = Math.max(first + 1, v.q0 + Math.floor(((row + 1) * (v.q1 - v.q0)) / rows));
    most.fill(0);
    for (let q = first; q < end; q++) {
      const at = q * app.panel.k + v.k0;
      for (let k = 0; k < columnOf.length; k++) {
        const w = head[at + k];
        if (w > most[columnOf[k]]) most[columnOf[k]] = w;
      }
    }
    for (let column = 0; column < columns; column++) {
      pixels[row * columns + column] = app.ramp.pixels[level(most[column])];
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function whole(panel) {
  return { q0: 0, q1: panel.q, k0: 0, k1: panel.k };
}

const LABEL_FONT = "12.5px " + FONT;
const SLANT = Math.PI / 4;

// Every how many cells a label is written: all, or a round number.
function stepFor(cell, room) {
  const need = room / cell;
  return need <= 1 ? 1 : [2, 5, 10, 20, 25, 50, 100, 200, 500, 1000].find((step) => step >= need) || 2000;
}

// Where everything of the large matrix stands, for this width.
function geometry(app, context, width, height) {
  const v = app.zoom();
  const rows = v.q1 - v.q0;
  const columns = v.k1 - v.k0;
  context.font = "600 " + LABEL_FONT; // as wide as a label gets when it is marked
  const widest = (side, from, to, most = 0) => {
    for (let i = from; i < to; i++) most = Math.max(most, context.measureText(app.label(side, i)).width);
    return Math.ceil(most);
  };
  const room = Math.min(108, width * 0.26); // for a label, on either axis
  const number = context.measureText(String((v.q1 - 1) * app.panel.qStep)).width; // where there are too many tokens
  const left = Math.min(widest("q", v.q0, v.q1, number), room) + 12;
  const keyWidth = Math.min(widest("k", v.k0, v.k1), room);
  const ratio = window.devicePixelRatio || 1;
  const snap = (cell) => (cell * ratio >= 1 ? Math.floor(cell * ratio) / ratio : cell);
  const placed = (flat, top, right) => {
    let cw = Math.min(56, (width - left - right) / columns);
    let ch = Math.min(56, (height - top) / rows);
    if (rows === columns) cw = ch = Math.min(cw, ch);
    else {
      cw = Math.min(cw, 2.2 * ch);
      ch = Math.min(ch, 1.6 * cw);
    }
    return { flat, top, right, cw: snap(Math.max(cw, 0.25)), ch: snap(Math.max(ch, 0.25)) };
  };
  // Level where all tokens have room so, else slanted; level position numbers where not even that.
  let at = placed(true, 24, 4);
  const words = at.cw >= keyWidth + 6;
  if (!words && (app.panel.kt || keyWidth >= 30)) {
    const reach = Math.ceil(keyWidth * Math.sin(SLANT));
    const slanted = placed(false, reach + 16, reach); // 45 degrees: as far to the right as up
    if (slanted.cw >= 13) at = slanted;
  }
  const { flat, top, right, cw, ch } = at;
  return {
    v, rows, columns, left, top, cw, ch, flat, room,
    qStep: stepFor(ch, 13), kStep: words || !flat ? 1 : stepFor(cw, 30),
    width: Math.ceil(left + columns * cw + right), height: Math.ceil(top + rows * ch + 2),
  };
}

function Matrix(app) {
  const base = el("canvas", { class: "mhac-base", role: "img" });
  const over = el("canvas", { class: "mhac-over", "aria-hidden": "true" });
  const tip = el("div", { class: "mhac-tip", hidden: true, "aria-hidden": "true" });
  const stage = el("div", { class: "mhac-stage" }, base, over, tip);
  const node = el("div", {
    class: "mhac-matrix", tabindex: 0, role: "application", "aria-roledescription": T("attention matrix"),
    "aria-label": T("Attention matrix. Arrow keys move from cell to cell."),
  }, stage);
  let g = null;
  let drag = null;

  function draw() {
    const width = node.clientWidth;
    if (!width) return;
    g = geometry(app, base.getContext("2d"), width, app.tall());
    const context = sized(base, g.width, g.height);
    stage.style.width = g.width + "px";
    const h = app.headNow();
    base.setAttribute("aria-label", [app.headName(h), app.words(h)].filter(Boolean).join(": "));
    const head = app.head();
    if (Math.min(g.cw, g.ch) >= 12) drawCells(context, head);
    else drawImage(context, head);
    drawAxes(context);
    mark();
  }

  function drawImage(context, head) {
    const ratio = window.devicePixelRatio || 1;
    const w = g.columns * g.cw;
    const h = g.rows * g.ch;
    context.imageSmoothingEnabled = false;
    context.drawImage(paint(app, head, g.v, w * ratio, h * ratio), g.left, g.top, w, h);
  }

  function drawCells(context, head) {
    const level = levelsOf(app);
    const numbers = g.cw >= 32 && g.ch >= 20;
    context.font = "11.5px " + FONT;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let q = g.v.q0; q < g.v.q1; q++) {
      for (let k = g.v.k0; k < g.v.k1; k++) {
        const w = head[q * app.panel.k + k];
        const x = g.left + (k - g.v.k0) * g.cw;
        const y = g.top + (q - g.v.q0) * g.ch;
        context.fillStyle = app.ramp.css[level(w)];
        roundRect(context, x + 0.5, y + 0.5, g.cw - 1, g.ch - 1, 3);
        context.fill();
        if (app.panel.hides && app.panel.hides(q, k)) hatch(context, [x + 0.5, y + 0.5, g.cw - 1, g.ch - 1], app.color("soft"));
        if (!numbers || w < 0.005) continue;
        context.fillStyle = app.ramp.ink(level(w));
        const text = w === 1 ? "1" : w >= 0.995 ? "≈1" : w.toFixed(2).slice(1);
        context.fillText(text, x + g.cw / 2, y + g.ch / 2 + 0.5);
      }
    }
  }

  // Position numbers where the tokens are too many to be written: every tenth word would say nothing.
  function axisLabel(side, i) {
    const [every, tokens] = side === "q" ? [g.qStep, app.panel.qStep] : [g.kStep, app.panel.kStep];
    const text = app.label(side, i);
    return every > 1 && !(text.trim() && Number.isFinite(Number(text))) ? String(i * tokens) : text; // tokens may be places
  }

  function drawAxes(context) {
    context.font = LABEL_FONT;
    context.fillStyle = app.color("soft");
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (let q = g.v.q0; q < g.v.q1; q++) {
      if (q % g.qStep) continue;
      context.fillText(shorten(context, axisLabel("q", q), g.left - 12), g.left - 8, g.top + (q - g.v.q0 + 0.5) * g.ch);
    }
    for (let k = g.v.k0; k < g.v.k1; k++) {
      if (k % g.kStep === 0) keyLabel(context, axisLabel("k", k), k);
    }
  }

  // The middle of a column; a level label is kept inside the canvas.
  function keyPlace(context, text, k) {
    const x = g.left + (k - g.v.k0 + 0.5) * g.cw;
    const half = Math.min(g.room, context.measureText(text).width) / 2;
    return g.flat ? clamp(x, half, g.width - half) : x;
  }

  function keyLabel(context, text, k) {
    const x = keyPlace(context, text, k);
    context.save();
    context.translate(x, g.top - 7);
    if (g.flat) {
      context.textAlign = "center";
      context.textBaseline = "alphabetic";
    } else {
      context.rotate(-SLANT);
      context.textAlign = "left";
      context.textBaseline = "middle";
    }
    context.fillText(shorten(context, text, g.room), 0, 0);
    context.restore();
  }

  // The cross over the chosen row and column, and the two tokens on their axes.
  function mark() {
    if (!g) return;
    const context = sized(over, g.width, g.height);
    const { q, k } = app.active();
    const inside = q >= g.v.q0 && q < g.v.q1 && k >= g.v.k0 && k < g.v.k1;
    if (inside) {
      const x = g.left + (k - g.v.k0) * g.cw;
      const y = g.top + (q - g.v.q0) * g.ch;
      context.strokeStyle = app.color("cross");
      context.lineWidth = 1;
      band(context, g.left, y, g.columns * g.cw, g.ch);
      band(context, x, g.top, g.cw, g.rows * g.ch);
      ring(context, x, y);
      markAxes(context, q, k);
    }
    if (drag && drag.moved) drawDrag(context);
  }

  // A frame around a row or column, a single line where cells are a few pixels.
  function band(context, x, y, w, h) {
    if (Math.min(w, h) >= 5) context.strokeRect(x - 0.5, y - 0.5, w + 1, h + 1);
    else {
      context.fillStyle = app.color("cross");
      context.fillRect(w > h ? x : x + w / 2 - 0.5, w > h ? y + h / 2 - 0.5 : y, w > h ? w : 1, w > h ? 1 : h);
    }
  }

  function ring(context, x, y) {
    const grow = Math.max(0, (7 - Math.min(g.cw, g.ch)) / 2);
    const box = [x - grow, y - grow, g.cw + 2 * grow, g.ch + 2 * grow];
    context.strokeStyle = app.color("paper");
    context.lineWidth = 4;
    roundRect(context, ...box, 3);
    context.stroke();
    context.strokeStyle = app.color("ink");
    context.lineWidth = 2;
    roundRect(context, ...box, 3);
    context.stroke();
  }

  // The places with a label beside the marked one, which would cover a part of it: then it is covered as a whole.
  function near(at, step, first, end) {
    return [-1, 0, 1].map((n) => at - (at % step) + n * step).filter((i) => i !== at && i >= first && i < end);
  }

  function markAxes(context, q, k) {
    const y = g.top + (q - g.v.q0 + 0.5) * g.ch;
    context.font = "600 " + LABEL_FONT;
    const text = shorten(context, app.label("q", q), g.left - 12);
    const size = context.measureText(text).width;
    context.fillStyle = app.color("paper");
    context.fillRect(0, y - 10, g.left - 3, 20);
    for (const i of near(q, g.qStep, g.v.q0, g.v.q1)) {
      const there = g.top + (i - g.v.q0 + 0.5) * g.ch;
      if (Math.abs(there - y) < 16) context.fillRect(0, there - 8, g.left - 3, 16);
    }
    context.fillStyle = app.color("ink");
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText(text, g.left - 8, y);
    context.fillRect(g.left - 8 - size, y + 9, size, 1.5);
    const label = app.label("k", k);
    const x = keyPlace(context, label, k);
    const wide = Math.min(g.room + 2, context.measureText(label).width + 4);
    context.save();
    context.translate(x, g.top - 7);
    if (!g.flat) context.rotate(-SLANT);
    context.fillStyle = app.color("paper");
    context.fillRect(g.flat ? -wide / 2 - 2 : 0, g.flat ? -13 : -8, wide + 4, 16);
    context.restore();
    context.fillStyle = app.color("paper");
    for (const i of g.flat ? near(k, g.kStep, g.v.k0, g.v.k1) : []) {
      const other = axisLabel("k", i);
      const size = context.measureText(other).width + 4;
      const there = keyPlace(context, other, i);
      if (Math.abs(there - x) < (wide + 4 + size) / 2) context.fillRect(there - size / 2, g.top - 20, size, 16);
    }
    context.fillStyle = app.color("ink");
    keyLabel(context, label, k);
  }

  function drawDrag(context) {
    const x = [drag.from.x, drag.to.x].sort((a, b) => a - b);
    const y = [drag.from.y, drag.to.y].sort((a, b) => a - b);
    context.fillStyle = app.color("veil");
    context.fillRect(x[0], y[0], x[1] - x[0], y[1] - y[0]);
    context.strokeStyle = app.color("ink");
    context.lineWidth = 1;
    context.strokeRect(x[0] + 0.5, y[0] + 0.5, x[1] - x[0], y[1] - y[0]);
  }

  // ---- pointer: hover shows, click keeps, a drag over a large matrix zooms in ----

  function where(event) {
    const box = over.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const q = Math.floor((y - g.top) / g.ch) + g.v.q0;
    const k = Math.floor((x - g.left) / g.cw) + g.v.k0;
    return { x, y, q, k, inside: q >= g.v.q0 && q < g.v.q1 && k >= g.v.k0 && k < g.v.k1 };
  }

  function showTip(at) {
    const { q, k } = at;
    tip.replaceChildren(el("bdi", { text: app.label("q", q) }), " → ", el("bdi", { text: app.label("k", k) }),
      el("b", { text: app.number(app.weight(app.headNow(), q, k)) }));
    tip.hidden = false;
    const flip = at.x + 16 + tip.offsetWidth > node.clientWidth;
    tip.style.left = (flip ? Math.max(0, at.x - 12 - tip.offsetWidth) : at.x + 16) + "px";
    tip.style.top = Math.max(0, at.y - 34) + "px";
  }

  stage.addEventListener("pointermove", (event) => {
    if (!g || event.pointerType === "touch") return;
    const at = where(event);
    if (drag) {
      drag.to = { x: clamp(at.x, g.left, g.left + g.columns * g.cw), y: clamp(at.y, g.top, g.top + g.rows * g.ch) };
      drag.moved = drag.moved || Math.abs(drag.to.x - drag.from.x) + Math.abs(drag.to.y - drag.from.y) > 8;
    }
    if (at.inside) {
      showTip(at);
      app.hover(at.q, at.k);
    } else leave();
    if (drag && drag.moved) mark();
  });
  function leave() {
    tip.hidden = true;
    app.hover(null);
  }
  stage.addEventListener("pointerleave", leave);
  stage.addEventListener("pointerdown", (event) => {
    const at = g && where(event);
    if (!at || !at.inside || event.button) return;
    if (event.pointerType !== "touch" && g.rows * g.columns > 400) {
      drag = { from: at, to: at, moved: false };
      stage.setPointerCapture(event.pointerId);
    }
  });
  stage.addEventListener("pointerup", (event) => {
    if (!g) return;
    const at = where(event);
    const done = drag;
    drag = null;
    if (done && done.moved) {
      zoomTo(done.from, at);
    } else if (at.inside) app.pin(at.q, at.k);
  });
  stage.addEventListener("dblclick", () => reset());

  function zoomTo(a, b) {
    const range = (one, two, low, high) => {
      const from = clamp(Math.min(one, two), low, high - 1);
      const to = clamp(Math.max(one, two) + 1, from + 1, high);
      return to - from >= 3 ? [from, to] : [Math.max(low, from - 2), Math.min(high, to + 2)];
    };
    const [q0, q1] = range(a.q, b.q, g.v.q0, g.v.q1);
    const [k0, k1] = range(a.k, b.k, g.v.k0, g.v.k1);
    leave();
    const zoom = { q0, q1, k0, k1 };
    const best = strongestIn(zoom);
    app.store.set({ zoom, row: best.q, column: best.k });
  }

  function strongestIn(v) {
    const head = app.head();
    const best = { q: v.q0, k: v.k0 };
    for (let q = v.q0; q < v.q1; q++) {
      for (let k = v.k0; k < v.k1; k++) {
        if (head[q * app.panel.k + k] > head[best.q * app.panel.k + best.k]) Object.assign(best, { q, k });
      }
    }
    return best;
  }

  function reset() {
    app.store.set({ zoom: null });
  }

  // Half or twice as much, around the chosen cell.
  function zoomBy(factor) {
    const { q, k } = app.active();
    const range = (at, low, high, size) => {
      const length = clamp(Math.round((high - low) * factor), Math.min(4, size), size);
      const from = clamp(Math.round(at - length / 2), 0, size - length);
      return [from, from + length];
    };
    const v = app.zoom();
    const [q0, q1] = range(q, v.q0, v.q1, app.panel.q);
    const [k0, k1] = range(k, v.k0, v.k1, app.panel.k);
    app.store.set({ zoom: { q0, q1, k0, k1 } });
  }

  // Moves the visible part so that the cell is in it.
  function follow(q, k) {
    const v = app.zoom();
    const shift = (at, low, high) => (at < low ? at - low : at >= high ? at - high + 1 : 0);
    const dq = shift(q, v.q0, v.q1);
    const dk = shift(k, v.k0, v.k1);
    if (!dq && !dk) return;
    app.store.set({ zoom: { q0: v.q0 + dq, q1: v.q1 + dq, k0: v.k0 + dk, k1: v.k1 + dk } });
  }

  node.addEventListener("keydown", (event) => {
    const { q, k } = app.active();
    const page = Math.max(1, Math.round((app.zoom().q1 - app.zoom().q0) / 4));
    const moves = {
      ArrowUp: [q - 1, k], ArrowDown: [q + 1, k], ArrowLeft: [q, k - 1], ArrowRight: [q, k + 1],
      Home: [q, 0], End: [q, app.panel.k - 1], PageUp: [q - page, k], PageDown: [q + page, k],
    };
    const actions = { "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2), Escape: reset };
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== node) return;
    if (moves[event.key]) {
      const [nq, nk] = moves[event.key];
      const cell = [clamp(nq, 0, app.panel.q - 1), clamp(nk, 0, app.panel.k - 1)];
      tip.hidden = true;
      app.pin(...cell, true);
      follow(...cell);
    } else if (actions[event.key]) actions[event.key]();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  return { node, draw, mark, reset };
}
