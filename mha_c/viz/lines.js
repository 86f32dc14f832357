// Two columns of tokens joined by lines: from each query to the keys it reads most, the stronger the more.
// The lines are drawn on a canvas as tall as what is visible and redrawn while scrolling, so that their number costs
// no elements; which keys are the strongest of a query is found once per head.

// For each query the keys of its `most` largest weights, largest first; -1 where a weight is zero.
function strongest(head, queries, keys, most) {
  const best = new Int32Array(queries * most).fill(-1);
  for (let q = 0; q < queries; q++) {
    const row = q * keys;
    let found = 0;
    for (let k = 0; k < keys; k++) {
      const w = head[row + k];
      if (!(w > 0) || (found === most && w <= head[row + best[q * most + most - 1]])) continue;
      let at = found < most ? found++ : most - 1;
      while (at > 0 && head[row + best[q * most + at - 1]] < w) {
        best[q * most + at] = best[q * most + at - 1];
        at--;
      }
      best[q * most + at] = k;
    }
  }
  return best;
}

function Lines(app) {
  const queries = el("div", { class: "mhac-column mhac-left" });
  const keys = el("div", { class: "mhac-column" });
  const canvas = el("canvas", { role: "img" });
  const middle = el("div", { class: "mhac-middle" }, canvas);
  const heading = el("div", { class: "mhac-heading" }, el("span", { text: T("queries") }), el("span"),
    el("span", { text: T("keys") }));
  const scroller = el("div", {
    class: "mhac-lines", tabindex: 0, role: "application", "aria-roledescription": T("lines from queries to keys"),
    "aria-label": T("Lines from queries to keys. Up and down choose a query, Escape shows all."),
  }, el("div", { class: "mhac-lanes" }, queries, middle, keys));
  const node = el("div", { class: "mhac-lines-box" }, heading, scroller);
  let filled = null; // the panel whose tokens stand in the columns
  let over = null; // {side, i}: the token that the pointer is over
  let focus = null; // whose lines are shown: that token, or the one that a click or a key has kept (the state's focus)

  const rowHeight = () => {
    const n = Math.max(app.panel.q, app.panel.k);
    return clamp(Math.floor(app.tall() / n), 19, 40);
  };

  function fill() {
    if (filled === app.panel) return;
    filled = app.panel;
    over = null;
    const cells = (side, n) => Array.from({ length: n }, (_, i) =>
      el("div", { class: "mhac-lane", "data-side": side, "data-i": i }, el("bdi", { text: app.label(side, i) })));
    queries.replaceChildren(...cells("q", app.panel.q));
    keys.replaceChildren(...cells("k", app.panel.k));
    scroller.scrollTop = 0;
  }

  function draw() {
    fill();
    const kept = app.state.focus;
    focus = over || (kept && kept.i < (kept.side === "q" ? app.panel.q : app.panel.k) ? kept : null);
    const row = rowHeight();
    const tall = Math.max(app.panel.q, app.panel.k) * row;
    const height = Math.min(tall, app.tall());
    node.style.setProperty("--mhac-row", row + "px");
    scroller.style.height = height + 2 + "px";
    const width = middle.clientWidth;
    if (!width) return;
    const context = sized(canvas, width, height);
    drawLines(context, width, height, row);
    shade();
  }

  function drawLines(context, width, height, row) {
    const { state, panel, code } = app;
    const head = app.head();
    const most = Math.min(state.topk, panel.k);
    const best = app.strongest(most);
    const offset = scroller.scrollTop;
    let count = 0;
    const line = (q, k, strong) => {
      const y0 = (q + 0.5) * row - offset;
      const y1 = (k + 0.5) * row - offset;
      if (Math.max(y0, y1) < -row || Math.min(y0, y1) > height + row) return;
      const w = head[q * panel.k + k];
      const rel = state.root ? Math.sqrt(w / code.top) : w / code.top;
      context.globalAlpha = strong ? 0.35 + 0.65 * rel : focus ? 0.05 : 0.08 + 0.8 * rel;
      context.lineWidth = 0.8 + 3.2 * rel;
      context.beginPath();
      context.moveTo(0, y0);
      context.bezierCurveTo(width * 0.42, y0, width * 0.58, y1, width, y1);
      context.stroke();
      if (strong || !focus) count++;
    };
    context.strokeStyle = app.color("line");
    context.lineCap = "round";
    const isFocus = (q, k) => focus && (focus.side === "q" ? focus.i === q : focus.i === k);
    for (const pass of focus ? [false, true] : [false]) {
      for (let q = 0; q < panel.q; q++) {
        for (let i = 0; i < most; i++) {
          const k = best[q * most + i];
          if (k >= 0 && Boolean(isFocus(q, k)) === pass) line(q, k, pass);
        }
      }
    }
    const said = { n: count, token: focus ? app.label(focus.side, focus.i) : "", head: app.headName(app.headNow()) };
    canvas.setAttribute("aria-label", focus ? T("{n} lines of “{token}”, {head}", said) : T("{n} lines, {head}", said));
    canvas.setAttribute("data-lines", count);
  }

  // The tokens at the other end of the focused token's lines, tinted by their weight.
  function shade() {
    const level = levelsOf(app);
    const head = app.head();
    const tint = (cell, w) => {
      const l = w === null ? 0 : level(w);
      cell.style.background = l > 2 ? app.ramp.css[l] : "";
      cell.style.color = l > 2 ? app.ramp.ink(l) : "";
      cell.classList.remove("mhac-focus");
    };
    const other = focus && (focus.side === "q" ? "k" : "q");
    for (let q = 0; q < app.panel.q; q++) {
      tint(queries.children[q].firstChild, other === "q" ? head[q * app.panel.k + focus.i] : null);
    }
    for (let k = 0; k < app.panel.k; k++) {
      tint(keys.children[k].firstChild, other === "k" ? head[focus.i * app.panel.k + k] : null);
    }
    if (focus) (focus.side === "q" ? queries : keys).children[focus.i].firstChild.classList.add("mhac-focus");
  }

  function point(next) {
    over = next;
    later();
  }
  const later = once(draw);

  function partner(at) {
    return at.side === "q" ? [at.i, app.bestKey(at.i)] : [app.bestQuery(at.i), at.i];
  }

  function laneOf(event) {
    const lane = event.target.closest && event.target.closest(".mhac-lane");
    return lane ? { side: lane.dataset.side, i: Number(lane.dataset.i) } : null;
  }

  scroller.addEventListener("pointerover", (event) => {
    const at = laneOf(event);
    point(at);
    if (at) app.hover(...partner(at));
    else app.hover(null);
  });
  scroller.addEventListener("pointerleave", () => {
    point(null);
    app.hover(null);
  });
  scroller.addEventListener("click", (event) => {
    const at = laneOf(event);
    const kept = app.state.focus;
    const again = at && kept && at.side === kept.side && at.i === kept.i;
    app.store.set({ focus: again ? null : at });
    if (at) app.pin(...partner(at));
  });
  scroller.addEventListener("scroll", later, { passive: true });
  scroller.addEventListener("keydown", (event) => {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || !(step || event.key === "Escape")) return;
    event.preventDefault();
    event.stopPropagation();
    over = null;
    if (!step) {
      app.store.set({ focus: null });
      return;
    }
    const kept = app.state.focus;
    const i = kept && kept.side === "q" ? kept.i + step : app.active().q;
    const next = { side: "q", i: clamp(i, 0, app.panel.q - 1) };
    app.store.set({ focus: next });
    app.pin(...partner(next), true);
    queries.children[next.i].scrollIntoView({ block: "nearest" });
  });

  return { node, draw, mark() {} };
}
