// The sentence itself: point at a word, and the words it reads are tinted.  For queries and keys with tokens of
// their own there are two sentences.  The strongest word of a row has the full colour, whatever its weight.

function Sentence(app) {
  const node = el("div", {
    class: "mhac-sentence", tabindex: 0, role: "application", "aria-roledescription": T("sentence"),
    "aria-label": T("The sentence. Left and right choose a word; the words it looks at are tinted."),
  });
  let filled = null;
  let words = { q: [], k: [] };

  function fill() {
    if (filled === app.panel) return;
    filled = app.panel;
    const spans = (side, n) => Array.from({ length: n }, (_, i) =>
      el("bdi", { class: "mhac-word", "data-side": side, "data-i": i, text: app.label(side, i) }));
    const paragraph = (list) => el("p", { dir: "auto" }, ...list.flatMap((word) => [word, " "]));
    const title = (text) => el("h4", { text });
    if (app.panel.self && app.panel.q === app.panel.k) {
      const both = spans("q", app.panel.q);
      words = { q: both, k: both };
      node.replaceChildren(paragraph(both));
    } else {
      words = { q: spans("q", app.panel.q), k: spans("k", app.panel.k) };
      node.replaceChildren(title(T("queries")), paragraph(words.q), title(T("keys")), paragraph(words.k));
    }
  }

  function mark() {
    fill();
    const { q } = app.active();
    const head = app.head();
    const row = head.subarray(q * app.panel.k, (q + 1) * app.panel.k);
    const top = row.reduce((a, b) => Math.max(a, b), 0) || 1;
    words.q.forEach((word, i) => word.classList.toggle("mhac-focus", i === q));
    words.k.forEach((word, i) => {
      const rel = row[i] / top;
      const level = Math.round((STEPS - 1) * 0.86 * (app.state.root ? Math.sqrt(rel) : rel));
      word.style.background = level > 3 ? app.ramp.css[level] : "";
      word.style.color = level > 3 ? app.ramp.ink(level) : "";
      word.title = app.number(row[i]);
    });
  }

  const at = (event) => {
    const word = event.target.closest && event.target.closest(".mhac-word");
    return word && word.dataset.side === "q" ? Number(word.dataset.i) : null;
  };
  node.addEventListener("pointerover", (event) => {
    const q = at(event);
    if (q === null) app.hover(null);
    else app.hover(q, app.bestKey(q));
  });
  node.addEventListener("pointerleave", () => app.hover(null));
  node.addEventListener("click", (event) => {
    const q = at(event);
    if (q !== null) app.pin(q, app.bestKey(q));
  });
  node.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    const q = clamp(app.active().q + step, 0, app.panel.q - 1);
    app.pin(q, app.bestKey(q), true);
    words.q[q].scrollIntoView({ block: "nearest" });
  });

  return { node, draw: mark, mark };
}
