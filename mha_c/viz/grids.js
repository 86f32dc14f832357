// A small matrix with its name, labels and numbers, for the players.  Small enough to be a canvas of its own; where
// it stands in a product, it is given the same cells and margins as its neighbours, so that rows and columns line up.

const NUMBERS_UP_TO = 8; // rows and columns; beyond, colours only

// Signed numbers: one hue each side of the paper.
const SIDES = {
  light: { paper: [246, 243, 239], plus: [190, 62, 72], minus: [52, 104, 168] },
  dark: { paper: [36, 38, 45], plus: [226, 110, 88], minus: [88, 146, 214] },
};

function signed(theme, share) {
  const side = SIDES[theme];
  const end = share < 0 ? side.minus : side.plus;
  const t = Math.pow(Math.min(1, Math.abs(share)), 0.8) * 0.92;
  const rgb = side.paper.map((c, i) => Math.round(c + (end[i] - c) * t));
  return { fill: "rgb(" + rgb.join(",") + ")", ink: inkOn(rgb) };
}

// spec: name, data (list of rows, null for a cell that holds nothing), kind "signed", "weight" or "plain", rows and columns (labels or null),
// shape (what is said of it in place of rows × columns), masked(i, j), hidden (what is written in a masked cell, where it is wide enough; else the cell is hatched), unused(i) (a row whose numbers nobody uses, drawn grey), numbers (always written), top (what has the full colour; the largest of `data` where it is not given)
function Grid(app, spec) {
  const height = spec.data.length;
  const width = spec.data[0] ? spec.data[0].length : 0;
  const canvas = el("canvas", { role: "img" });
  const node = el("figure", { class: "mhac-grid", "data-name": spec.name },
    el("figcaption", {}, el("b", {}, ...formula(spec.name)),
      width > 1 ? el("span", { class: "mhac-note", text: spec.shape || height + " × " + width }) : null), canvas);
  const most = spec.top || Math.max(1e-9, ...spec.data.flat().map((x, at) =>
    (x === null || hidden(Math.floor(at / width), at % width) ? 0 : Math.abs(x))));
  const size = app.type;
  let place = null;

  function hidden(i, j) {
    return Boolean(spec.masked && spec.masked(i, j));
  }

  const labelWidth = (context, labels, room) =>
    Math.ceil(labels.reduce((a, text) => Math.max(a, Math.min(room, context.measureText(text).width)), 0));

  // The margins that the labels want, before cells are known.
  function margins() {
    const context = canvas.getContext("2d");
    context.font = "600 " + size + "px " + FONT;
    return {
      left: spec.rows ? labelWidth(context, spec.rows, 7 * size) + 9 : 0,
      top: spec.columns ? Math.ceil(labelWidth(context, spec.columns, 5.8 * size) * 0.72) + 12 : 0,
      right: spec.columns ? Math.min(3.7 * size, labelWidth(context, spec.columns, 5.8 * size) * 0.6) : 0,
    };
  }

  function setPlace(cell, margin) {
    place = { ...cell, ...margin };
  }

  function color(i, j) {
    const x = spec.data[i][j];
    if (spec.kind === "weight") {
      const level = Math.round((STEPS - 1) * clamp(x / most, 0, 1));
      return { fill: app.ramp.css[level], ink: app.ramp.ink(level) };
    }
    if (spec.kind === "plain") return { fill: app.color("paper"), ink: app.color("ink") };
    return signed(app.theme, x / most);
  }

  // look: row and column to mark, cell {i, j} to ring, shown(i, j): is the cell there yet
  function draw(look) {
    const { w, h, left, top, right } = place;
    const context = sized(canvas, left + width * w + Math.max(2, right), top + height * h + 2);
    const few = spec.numbers || (width <= NUMBERS_UP_TO && height <= NUMBERS_UP_TO);
    const numbers = w >= 29 && (few || spec.kind === "plain") && h >= 10;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const letters = fitting(context, numbers) + "px " + FONT;
    for (let i = 0; i < height; i++) {
      for (let j = 0; j < width; j++) drawCell(context, look, i, j, numbers, letters);
    }
    drawLabels(context, look);
    drawMarks(context, look);
    canvas.setAttribute("aria-label", spec.name + ", " + T("{rows} rows, {columns} columns", { rows: height, columns: width }));
  }

  // What stands in a cell, if anything.
  const said = (i, j, numbers) => (hidden(i, j) ? place.w >= 17 && spec.hidden
    : numbers && spec.data[i][j] !== null && digits(spec.data[i][j], place.w));

  // The size of a matrix's numbers: the widest has room in its cell.
  function fitting(context, numbers) {
    const { w, h } = place;
    const wanted = h < 14 ? 9.5 : (w >= 44 && h >= 24 ? 13 : 11.5) * (size / 12);
    context.font = wanted + "px " + FONT;
    const texts = spec.data.flatMap((row, i) => row.map((_, j) => said(i, j, numbers))).filter(Boolean);
    return Math.min(wanted, (wanted * (w - 3)) / labelWidth(context, texts, Infinity));
  }

  function drawCell(context, look, i, j, numbers, letters) {
    const { w, h, left, top } = place;
    const gap = w >= 12 ? 1 : w >= 6 ? 0.5 : 0;
    const box = [left + j * w + gap / 2, top + i * h + gap / 2, w - gap, h - gap];
    const there = (!look.shown || look.shown(i, j)) && spec.data[i][j] !== null;
    if (w >= 12) roundRect(context, ...box, Math.min(3, w / 8));
    else {
      context.beginPath();
      context.rect(...box);
    }
    if (!there) {
      context.strokeStyle = app.color("faint");
      context.lineWidth = 1;
      if (w >= 6) context.stroke();
      return;
    }
    const masked = hidden(i, j);
    const unused = Boolean(spec.unused && spec.unused(i));
    const { fill, ink } = masked || unused ? { fill: app.color(masked ? "wash" : "faint"), ink: app.color("soft") } : color(i, j);
    context.fillStyle = fill;
    context.fill();
    const text = said(i, j, numbers);
    if (masked && !text) hatch(context, box, app.color("soft"));
    if (!text) return;
    context.font = letters;
    context.fillStyle = ink;
    context.fillText(text, left + (j + 0.5) * w, top + (i + 0.5) * h + 0.5);
  }

  function drawLabels(context, look) {
    const { w, h, left, top } = place;
    const pen = (marked, letters) => {
      context.font = (marked ? "600 " : "") + letters + "px " + FONT;
      context.fillStyle = app.color(marked ? "ink" : "soft");
    };
    context.textBaseline = "middle";
    if (spec.rows && h >= 11) {
      context.textAlign = "right";
      spec.rows.forEach((text, i) => {
        pen(look.row === i, Math.min(size, h + 1)); // a row's name stays in its row
        context.fillText(shorten(context, text, 7 * size), left - 6, top + (i + 0.5) * h);
      });
    }
    if (!spec.columns || w < 11) return;
    context.textAlign = "left";
    spec.columns.forEach((text, j) => {
      pen(look.column === j, size);
      context.save();
      context.translate(left + (j + 0.5) * w, top - 6);
      context.rotate(-Math.PI / 4);
      context.fillText(shorten(context, text, 5.8 * size), 0, 0);
      context.restore();
    });
  }

  function drawMarks(context, look) {
    const { w, h, left, top } = place;
    context.strokeStyle = app.color("ink");
    context.lineWidth = 1.5;
    const frame = (x, y, a, b) => {
      roundRect(context, x, y, a, b, 3);
      context.stroke();
    };
    if (look.band) frame(left + look.band[0] * w, top + 0.5, (look.band[1] - look.band[0]) * w, height * h - 1);
    if (look.row !== undefined && look.row !== null) frame(left + 0.5, top + look.row * h, width * w - 1, h);
    if (look.column !== undefined && look.column !== null) frame(left + look.column * w, top + 0.5, w, height * h - 1);
    if (!look.cell) return;
    context.lineWidth = 2.5;
    frame(left + look.cell.j * w, top + look.cell.i * h, w, h);
  }

  function at(event) {
    const box = canvas.getBoundingClientRect();
    const j = Math.floor((event.clientX - box.left - place.left) / place.w);
    const i = Math.floor((event.clientY - box.top - place.top) / place.h);
    return i >= 0 && i < height && j >= 0 && j < width ? { i, j } : null;
  }

  return { node, canvas, spec, height, width, margins, setPlace, draw, at };
}

// Two decimals where they fit, fewer for large numbers.
function digits(x, w) {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x < 0 ? "−∞" : "∞";
  const text = Math.abs(x) >= 100 ? x.toFixed(0) : x.toFixed(Math.abs(x) >= 10 || w < 32 ? 1 : 2);
  return /[1-9]/.test(text) ? text.replace("-", "−") : text.replace("-", "");
}

// "s_ij = q_i · k_j^T": letters with their indices and exponents.
function formula(text) {
  return text.split(/([_^](?:old|ij|[A-Za-z0-9]))/).map((part) => {
    if (part[0] === "_") return el("sub", { text: part.slice(1) });
    if (part[0] === "^") return el("sup", { text: part.slice(1) });
    return part;
  });
}
