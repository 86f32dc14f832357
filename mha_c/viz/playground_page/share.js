// Sharing: the address, the same as Python, and a picture.

// python() gives the text or null, part() the node of the picture.
function Share(page, python, part) {
  const said = el("p", { class: "mhac-note", role: "status" });
  const box = el("textarea", { class: "mhac-code", readonly: true, rows: 14, spellcheck: "false",
    "aria-label": T("Text to copy") });
  const shelf = el("div", { hidden: true }, box);
  const button = (text, action) => el("button", { type: "button", class: "mhac-button", text, onclick: action });
  const lines = button(T("Copy as Python"), () => copy(python()));
  const node = el("div", { class: "mhac-share" }, el("div", { class: "mhac-controls" },
    button(T("Copy link"), () => copy(location.href)), lines, button(T("Save picture"), save), said), shelf);

  // The text is shown as well: a page from the disk may not be allowed to reach the clipboard.
  async function copy(text) {
    box.value = text;
    box.rows = Math.min(24, text.split("\n").length + 1);
    shelf.hidden = false;
    box.focus({ preventScroll: true });
    box.select();
    let done = false;
    try {
      await navigator.clipboard.writeText(text);
      done = true;
    } catch (refused) {
      done = document.execCommand("copy");
    }
    setText(said, done ? T("Copied.") : T("Chosen: copy it with the keyboard."));
  }

  function save() {
    pictureOf(part(), page.pen).toBlob((blob) => {
      const link = el("a", { href: URL.createObjectURL(blob), download: "attention.png" });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
      setText(said, T("Saved as attention.png."));
    });
  }

  return { node, draw: () => {
    lines.hidden = !python();
    shelf.hidden = true; // what stands there is of another state
  } };
}

// ---- a picture of what a part of the page shows ------------------------------------------------------------------

const NOT_IN_PICTURES = ".mhac-fields, .mhac-field, .mhac-numbers, .mhac-tables, .mhac-controls, .mhac-legend button, .mhac-dots," +
  "button:not(.mhac-card), .mhac-choices, .mhac-unseen, .mhac-tip, footer, svg";

// Everything that is seen, in the order it is painted: [{box, paint(context, x, y)}, …].
function paintedIn(part) {
  const painted = [];
  const walk = (node) => {
    if (node.nodeType === Node.TEXT_NODE) painted.push(...wordsOf(node));
    if (node.nodeType !== Node.ELEMENT_NODE || node.matches(NOT_IN_PICTURES) || node.hidden) return;
    const box = node.getBoundingClientRect();
    const style = getComputedStyle(node);
    if (box.width && box.height && !/^rgba\(.*, 0\)$/.test(style.backgroundColor)) {
      painted.push({ box, paint(context, x, y) {
        context.globalAlpha = Number(style.opacity);
        context.fillStyle = style.backgroundColor;
        roundRect(context, x, y, box.width, box.height, parseFloat(style.borderRadius) || 0);
        context.fill();
        context.globalAlpha = 1;
      } });
    }
    if (node.tagName === "CANVAS" && box.width) {
      painted.push({ box, paint: (context, x, y) => context.drawImage(node, x, y, box.width, box.height) });
    }
    node.childNodes.forEach(walk);
  };
  part.childNodes.forEach(walk);
  return painted;
}

// Each word of a text at its place on the page, whatever line that is.
function wordsOf(node) {
  const style = getComputedStyle(node.parentElement);
  const range = document.createRange();
  return [...node.data.matchAll(/\S+/g)].map((word) => {
    range.setStart(node, word.index);
    range.setEnd(node, word.index + word[0].length);
    const box = range.getBoundingClientRect();
    return { box, paint(context, x, y) {
      context.font = style.fontStyle + " " + style.fontWeight + " " + style.fontSize + " " + style.fontFamily;
      context.letterSpacing = style.letterSpacing === "normal" ? "0px" : style.letterSpacing;
      context.fillStyle = style.color;
      context.textAlign = "left";
      context.textBaseline = "middle";
      context.fillText(word[0], x, y + box.height / 2);
    } };
  }).filter(({ box }) => box.width && style.visibility === "visible");
}

function pictureOf(part, pen) {
  const painted = paintedIn(part);
  const edge = (side, pick) => painted.reduce((at, { box }) => pick(at, box[side]), painted[0].box[side]);
  const margin = 16;
  const [left, top] = [edge("left", Math.min) - margin, edge("top", Math.min) - margin];
  const canvas = document.createElement("canvas");
  const [width, height] = [edge("right", Math.max) - left + margin, edge("bottom", Math.max) - top + margin];
  const context = sized(canvas, width, height);
  context.fillStyle = pen.color("paper");
  context.fillRect(0, 0, width, height);
  for (const { box, paint } of painted) paint(context, box.left - left, box.top - top);
  return canvas;
}
