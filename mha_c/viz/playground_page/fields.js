// Controls of a form: each has its label, shows a value of the state, and reports a new one.

function labelled(label, input, more) {
  return el("label", { class: "mhac-field" }, el("span", { text: label }), input, more || null);
}

// names: [[value, text], …]
function select(label, names, value, change) {
  const box = el("select", {}, ...names.map(([each, text]) => el("option", { value: each, text, selected: each === value })));
  box.addEventListener("change", () => change(box.value));
  return Object.assign(labelled(label, box), { show: (now) => (box.value = now) });
}

function textBox(label, value, change, size, hint) {
  const box = el("input", { type: "text", value, size, placeholder: hint, maxlength: MOST_TEXT, spellcheck: "false",
    autocomplete: "off" });
  box.addEventListener("input", () => change(box.value));
  return labelled(label, box);
}

// Fills a part of a form again; the field that the reader is in keeps the focus.
function refill(box, fill) {
  const { activeElement } = box.getRootNode();
  const field = activeElement && box.contains(activeElement) ? activeElement.closest(".mhac-field") : null;
  if (!field) {
    fill();
    return;
  }
  const fields = () => [...box.querySelectorAll(".mhac-field")];
  const [label, place] = [field.firstChild.textContent, fields().indexOf(field)];
  fill();
  const again = fields().find((each) => each.firstChild.textContent === label) || fields()[place]; // in another language
  if (again) again.querySelector("input, select").focus({ preventScroll: true });
}

// A number in a box, with a step of its own.
function numberBox(label, value, field, change) {
  const box = el("input", { type: "number", value, min: field.low, max: field.high, step: field.step || 1 });
  const wrong = wrongness(box);
  box.addEventListener("input", () => {
    const x = Number(box.value);
    const fits = box.value !== "" && x >= field.low && x <= field.high && (field.step < 1 || Number.isInteger(x));
    wrong.say(fits ? "" : T(field.step < 1 ? "a number from {low} to {high}" : "a whole number from {low} to {high}", field));
    if (fits) change(x);
  });
  return labelled(label, box, wrong.node);
}

// What is wrong with a field: said beside it, and to who cannot see it.
let wrongs = 0;
function wrongness(box) {
  const id = "mhac-wrong-" + (wrongs += 1);
  const node = el("span", { class: "mhac-wrong", role: "alert", id, hidden: true });
  return { node, say(text) {
    box.setAttribute("aria-invalid", String(Boolean(text)));
    if (text) box.setAttribute("aria-describedby", id);
    else box.removeAttribute("aria-describedby");
    setText(node, text);
    node.hidden = !text;
  } };
}

// A slider that says its value; `stops` are the values it can have.
function slider(label, value, stops, change, say) {
  const nearest = (now) => stops.reduce((best, x, i) => (Math.abs(x - now) < Math.abs(stops[best] - now) ? i : best), 0);
  const box = el("input", { type: "range", min: 0, max: stops.length - 1, step: 1, value: nearest(value) });
  const said = el("output");
  const show = () => {
    const text = say ? say(stops[box.value]) : String(stops[box.value]);
    setText(said, text);
    box.setAttribute("aria-valuetext", text);
  };
  box.addEventListener("input", () => {
    show();
    change(stops[box.value]);
  });
  show();
  return Object.assign(labelled(label, box, said), { show(now, most) {
    if (most) box.max = most - 1;
    if (stops[box.value] === now) return;
    box.value = nearest(now);
    show();
    if (stops[box.value] !== now) setText(said, say ? say(now) : String(now)); // an address may say what no stop is
  } });
}

const range = (low, high) => Array.from({ length: high - low + 1 }, (_, i) => low + i);

// A matrix of numbers to edit: a table, which screen readers read with the names of its rows and columns.
const EDIT_ROWS = 12;
const EDIT_COLUMNS = 8;

function editor(name, title, rows, labels, change) {
  const caption = el("caption", {}, el("b", { text: name }), " " + title);
  if (rows.length > EDIT_ROWS || rows[0].length > EDIT_COLUMNS) {
    return el("div", { class: "mhac-edit" }, el("p", { class: "mhac-note" }, el("b", { text: name }), " " + title + ": " +
      T("{rows} × {columns} numbers, too many to edit here", { rows: rows.length, columns: rows[0].length })));
  }
  const head = el("tr", {}, el("td"), ...rows[0].map((_, j) => el("th", { scope: "col", text: String(j) })));
  const body = rows.map((row, i) => el("tr", {}, el("th", { scope: "row", text: labels[i] }), ...row.map((x, j) => el("td", {},
    el("input", { type: "number", step: "any", value: number3(x), "data-cell": i + "," + j,
      "aria-label": name + ", " + labels[i] + ", " + j, oninput: (event) => edit(event.target, i, j) })))));
  const table = el("table", { "data-matrix": name }, caption, el("thead", {}, head), el("tbody", {}, ...body));
  const now = rows.map((row) => row.slice());
  const wrong = wrongness(table);

  function edit(box, i, j) {
    const fits = box.value !== "" && Number.isFinite(Math.fround(Number(box.value)));
    wrong.say(fits ? "" : T("{name}: a finite number is missing; the last one is still computed with",
      { name: box.getAttribute("aria-label") }));
    box.setAttribute("aria-invalid", String(!fits));
    if (!fits) return;
    now[i][j] = Number(box.value);
    change(now);
  }

  // Arrows up and down go from row to row; left and right stay with the digits.
  table.addEventListener("keydown", (event) => {
    const step = { ArrowUp: -1, ArrowDown: 1, Enter: 1 }[event.key];
    if (!step || !event.target.dataset.cell) return;
    const [i, j] = event.target.dataset.cell.split(",").map(Number);
    const next = table.querySelector('[data-cell="' + (i + step) + "," + j + '"]');
    event.preventDefault();
    if (next) {
      next.focus();
      next.select();
    }
  });
  return el("div", { class: "mhac-edit" }, table, wrong.node);
}

const number3 = (x) => String(Math.round(1000 * x) / 1000);

// A matrix of results, read only.  With `most`, the largest, each number has a bar beside it.
function table(name, rows, rowLabels, columnLabels, places, most) {
  const bar = (x) => el("span", { class: "mhac-bar" }, el("span", { style: "width:" + (100 * x) / (most || 1) + "%" }));
  return el("table", { "data-result": name }, el("caption", { text: name }),
    el("thead", {}, el("tr", {}, el("td"), ...columnLabels.map((text) => el("th", { scope: "col", text })))),
    el("tbody", {}, ...rows.map((row, i) => el("tr", {}, el("th", { scope: "row", text: rowLabels[i] }),
      ...row.map((x) => el("td", {}, most === undefined ? null : bar(x),
        Number.isFinite(x) ? x.toFixed(places) : x < 0 ? "−∞" : "∞"))))));
}
