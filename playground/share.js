// Sharing: the address, the same as Python, and a picture.

function Share(page) {
  const said = el("p", { class: "mhac-note", role: "status" });
  const box = el("textarea", { class: "mhac-code", readonly: true, rows: 14, spellcheck: "false", "aria-label": T("Text to copy") });
  const shelf = el("div", { hidden: true }, box);
  const button = (text, action) => el("button", { type: "button", class: "mhac-button", text, onclick: action });
  const python = button(T("Copy as Python"), () => copy(pythonOf(page.model)));
  const node = el("div", { class: "mhac-share" }, el("div", { class: "mhac-controls" },
    button(T("Copy link"), () => copy(location.href)), python, button(T("Save picture"), save), said), shelf);

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
    pictureOf(page.shown.node, penOf(page)).toBlob((blob) => {
      const link = el("a", { href: URL.createObjectURL(blob), download: "attention.png" });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
      setText(said, T("Saved as attention.png."));
    });
  }

  return { node, draw: () => {
    python.hidden = page.state.tab === "speed" || !page.model;
  } };
}

// What is drawn in a part of the page, at its place, with the words above and between.
function pictureOf(part, pen) {
  const all = [...part.querySelectorAll("canvas, h3, h4, figcaption, .mhac-arith, .mhac-pair, .mhac-value, .mhac-sum, .mhac-formula")]
    .filter((node) => node.offsetParent && node.getBoundingClientRect().width);
  const boxes = all.map((node) => node.getBoundingClientRect());
  const edge = (side, pick) => pick(...boxes.map((box) => box[side]));
  const [left, top] = [edge("left", Math.min), edge("top", Math.min)];
  const canvas = document.createElement("canvas");
  const margin = 16;
  const context = sized(canvas, edge("right", Math.max) - left + 2 * margin, edge("bottom", Math.max) - top + 2 * margin);
  context.fillStyle = pen.color("paper");
  context.fillRect(0, 0, canvas.width, canvas.height);
  all.forEach((node, n) => {
    const [x, y] = [boxes[n].left - left + margin, boxes[n].top - top + margin];
    if (node.tagName === "CANVAS") context.drawImage(node, x, y, boxes[n].width, boxes[n].height);
    else writeWords(context, node, x, y, boxes[n].width);
  });
  return canvas;
}

function writeWords(context, node, x, y, width) {
  const style = getComputedStyle(node);
  const height = parseFloat(style.lineHeight) || 1.4 * parseFloat(style.fontSize);
  context.font = style.fontStyle + " " + style.fontWeight + " " + style.fontSize + " " + style.fontFamily;
  context.fillStyle = style.color;
  context.textAlign = "left";
  context.textBaseline = "middle";
  let line = "";
  let row = 0;
  for (const word of node.textContent.split(" ")) {
    const longer = line ? line + " " + word : word;
    if (line && context.measureText(longer).width > width + 1) {
      context.fillText(line, x, y + (row++ + 0.5) * height);
      line = word;
    } else line = longer;
  }
  context.fillText(line, x, y + (row + 0.5) * height);
}
