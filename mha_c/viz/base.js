// What every page shares: mounting, theme, colours, decoding, small helpers.
// The files of a page are joined into one function (see page.py), so what stands here is seen by the others.
// Two rules keep that simple: only // comments on lines of their own, and no string that spans lines.

// ---- elements ------------------------------------------------------------------------------------------------

// An element with attributes and children.  Text is always set as text: tokens are data, never markup.
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

// Runs `draw` once in the next frame, however often it is asked for.
function once(draw) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  };
}

// A canvas of this many CSS pixels, sharp on every screen; returns its context, cleared.
function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const w = Math.max(1, Math.round(width * ratio));
  const h = Math.max(1, Math.round(height * ratio));
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function roundRect(context, x, y, w, h, r) {
  r = Math.min(r, w / 2, h / 2);
  context.beginPath();
  context.moveTo(x + r, y);
  context.arcTo(x + w, y, x + w, y + h, r);
  context.arcTo(x + w, y + h, x, y + h, r);
  context.arcTo(x, y + h, x, y, r);
  context.arcTo(x, y, x + w, y, r);
  context.closePath();
}

// Lines over a cell that is hidden by a mask.
function hatch(context, [x, y, w, h], color) {
  context.save();
  context.beginPath();
  context.rect(x, y, w, h);
  context.clip();
  context.strokeStyle = color;
  context.globalAlpha = 0.6;
  context.lineWidth = 1;
  for (let at = -h; at < w; at += 6) {
    context.beginPath();
    context.moveTo(x + at, y + h);
    context.lineTo(x + at + h, y);
    context.stroke();
  }
  context.restore();
}

const FONT = "-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', 'Liberation Sans', Arial, sans-serif";

// Cut at the end where it is wider than this many pixels.
function shorten(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  const letters = [...text];
  while (letters.length > 1 && context.measureText(letters.join("") + "…").width > width) letters.pop();
  return letters.join("") + "…";
}

// A row of buttons of which one is chosen; arrow keys move inside it, as in every toolbar.
function choice(label, names, chosen, pick) {
  const buttons = names.map((name, i) =>
    el("button", {
      type: "button", class: "mhac-choice", role: "radio", text: name,
      "aria-checked": String(i === chosen), tabindex: i === chosen ? 0 : -1,
      onclick: () => set(i, true),
    }));
  function set(i, tell) {
    buttons.forEach((button, j) => {
      button.setAttribute("aria-checked", String(i === j));
      button.tabIndex = i === j ? 0 : -1;
    });
    if (tell) pick(i);
  }
  const group = el("div", { class: "mhac-choices", role: "radiogroup", "aria-label": label }, ...buttons);
  group.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const at = buttons.findIndex((button) => button.getAttribute("aria-checked") === "true");
    const next = (at + step + buttons.length) % buttons.length;
    set(next, true);
    buttons[next].focus();
  });
  group.set = (i) => set(i, false);
  return group;
}

// ---- language ------------------------------------------------------------------------------------------------

// Texts stand in the sources in English.  A page may bring a table of them in another language (the playground does).
let spoken = {};

function T(text, values) {
  return (spoken[text] || text).replace(/\{(\w+)\}/g, (whole, name) => (values && name in values ? values[name] : whole));
}

// ---- words and numbers -----------------------------------------------------------------------------------------

// Three digits that matter, "0" for nothing at all, "1" for all of it; 8-bit weights get a sign that they are rounded.
function number(x, exact) {
  if (x === 0) return "0";
  if (Math.abs(x - 1) < 5e-4) return !exact || (x !== 1 && Math.abs(x - 1) < 5e-6) ? "≈ 1" : x === 1 ? "1" : x.toFixed(5);
  const digits = Math.abs(x) >= 0.0995 ? 3 : clamp(2 - Math.floor(Math.log10(Math.abs(x))), 3, 6);
  const text = Math.abs(x) < 5e-7 ? "< 0.00001" : x.toFixed(digits);
  return exact ? text : "≈ " + text;
}

function percent(x) {
  if (x > 0 && x < 0.0005) return "< 0.1 %";
  if (x >= 0.995 && x < 1) return x < 0.9995 ? (100 * x).toFixed(1) + " %" : "> 99.9 %";
  return (x >= 0.0995 || x === 0 ? Math.round(100 * x) : (100 * x).toFixed(1)) + " %";
}

// Bits: 0 for one key alone, log2(keys) for all alike.
function entropyOf(row) {
  return row.reduce((sum, w) => (w > 0 ? sum - w * Math.log2(w) : sum), 0);
}

// Blanks would be invisible; everything else stays as it is.
function visible(token) {
  if (token === "") return "∅";
  return /^\s+$/.test(token)
    ? token.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\s/g, "␣") : token;
}

// ---- colours -------------------------------------------------------------------------------------------------

// Weight 0 is the paper, weight 1 the ink; lightness falls (or rises, on dark paper) evenly in between, so the scale
// also reads without colour vision.
const RAMPS = {
  light: ["#f6f3ef", "#f8ddcb", "#f4b495", "#e5806a", "#c94a55", "#932650", "#56133f", "#2b0a26"],
  dark: ["#1f2127", "#35243f", "#5b2a54", "#8f2f56", "#c44552", "#e8735a", "#f6ad7b", "#fde9cf"],
};
const STEPS = 256;

function ramp(theme) {
  const stops = RAMPS[theme].map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  const pixels = new Uint32Array(STEPS);
  const css = [];
  const inks = [];
  for (let i = 0; i < STEPS; i++) {
    const at = (i / (STEPS - 1)) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    const rgb = stops[low].map((c, j) => Math.round(c + (stops[low + 1][j] - c) * (at - low)));
    // canvas pixels are bytes r, g, b, a: in a 32-bit word on the usual little-endian machine, a b g r
    pixels[i] = (255 << 24) | (rgb[2] << 16) | (rgb[1] << 8) | rgb[0];
    css.push("rgb(" + rgb.join(",") + ")");
    inks.push(inkOn(rgb));
  }
  return { pixels, css, ink: (i) => inks[i] };
}

// Black or white, whichever is told better from this colour: the contrast is never below 4.58 to 1 (WCAG 2.2).
function inkOn(rgb) {
  const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

// The colours of both themes by name: canvases ask for them, and elements have them as --paper, --ink, ... (themed).
const COLORS = {
  light: { paper: "#ffffff", ink: "#1d1b1a", soft: "#6b6661", faint: "#e4dfd9", edge: "#8b847c", wash: "#f7f5f2", line: "#a83258",
    other: "#2f62a0", "on-line": "#ffffff", raised: "#ffffff", cross: "rgba(29,27,26,.45)", veil: "rgba(29,27,26,.12)" },
  dark: { paper: "#17181c", ink: "#f4f1ec", soft: "#a9a49e", faint: "#34363d", edge: "#7b7e88", wash: "#1f2025", line: "#f09a72",
    other: "#7fb0ea", "on-line": "#1d1413", raised: "#34363d", cross: "rgba(244,241,236,.5)", veil: "rgba(244,241,236,.14)" },
};

// What canvases draw with: the theme, its scale of weights, its colours by name, the size of letters.
function Pen(theme) {
  const pen = { type: 12, color: (name) => COLORS[pen.theme][name],
    take: (now) => Object.assign(pen, { theme: now, ramp: ramp(now) }) };
  return pen.take(theme);
}

// A part's elements and its pen take the theme of their surroundings.
function wear(root, pen, theme) {
  root.setAttribute("data-theme", theme);
  for (const [name, color] of Object.entries(COLORS[theme])) root.style.setProperty("--" + name, color);
  pen.take(theme);
}

// ---- theme ---------------------------------------------------------------------------------------------------

// Of a colour, from 0 to 1, in any way that browsers write them: rgb(0, 0, 0), color(srgb 0 0 0), lab(0 0 0), oklch(0 0 0).
function lightness(color) {
  const [a, b, c] = color.replace(/^color\(\S+/, "").match(/[\d.]+/g).map(Number);
  if (color.startsWith("ok")) return a;
  if (color.startsWith("l")) return a / 100;
  return (0.299 * a + 0.587 * b + 0.114 * c) / (color.startsWith("rgb") ? 255 : 1);
}

// Who knows best is asked first: VS Code, Jupyter, then the colour text has where we stand, then the system.
function detectTheme(host) {
  const body = document.body;
  const code = body.getAttribute("data-vscode-theme-kind");
  if (code) return /dark|high-contrast$/.test(code) ? "dark" : "light";
  const lab = body.getAttribute("data-jp-theme-light");
  if (lab) return lab === "false" ? "dark" : "light";
  const light = lightness(getComputedStyle(host.parentElement || body).color);
  if (light > 0.67) return "dark";
  if (light < 0.31) return "light";
  return window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

// Root and pen wear the theme of the surroundings, now and whenever these change, and `draw` follows, until what is returned
// is called.
function followTheme(host, root, pen, draw) {
  let now = null;
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const watcher = new MutationObserver(() => look());
  const later = () => setTimeout(look, 0);
  function end() {
    watcher.disconnect();
    system.removeEventListener("change", later);
  }
  function look() {
    if (now && !host.isConnected) {
      end();
      return;
    }
    const theme = detectTheme(host);
    if (theme === now) return;
    now = theme;
    host.setAttribute("data-theme", theme);
    wear(root, pen, theme);
    draw();
  }
  look();
  watcher.observe(document.body, { attributes: true });
  watcher.observe(document.documentElement, { attributes: true });
  system.addEventListener("change", later);
  return end;
}

// Calls `change(width)` whenever the element has another width: a new height is our own doing.
function followWidth(node, change) {
  let width = 0;
  const watcher = new ResizeObserver(() => {
    if (node.clientWidth === width) return;
    width = node.clientWidth;
    change(width);
  });
  watcher.observe(node);
  return () => watcher.disconnect();
}

// ---- data ----------------------------------------------------------------------------------------------------

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// The weights of one panel, as pack.py wrote them: a Float32Array (queries * keys) per head, and their maximum.
async function decode(panel) {
  if (panel.live) return { heads: panel.live, top: topOf(panel.live) }; // computed in this page, as they are
  let bytes = bytesOf(panel.w);
  if (panel.z) bytes = await inflate(bytes);
  const levels = panel.bits === 16 ? new Uint16Array(bytes.buffer) : bytes;
  const top = new Float32Array(bytesOf(panel.m).buffer);
  const share = new Float32Array(panel.bits === 16 ? 65536 : 256); // of the row's largest weight, by level
  share[1] = 1e-9; // less than half of the next level, but more than nothing
  for (let i = 2; i < share.length; i++) share[i] = panel.bits === 16 ? (i - 1) / 65534 : ((i - 1) / 254) ** 2;
  const heads = [];
  for (let h = 0, at = 0; h < panel.h; h++) {
    const head = new Float32Array(panel.q * panel.k);
    for (let q = 0, i = 0; q < panel.q; q++) {
      const largest = top[h * panel.q + q];
      for (let k = 0; k < panel.k; k++) head[i++] = share[levels[at++]] * largest;
    }
    heads.push(head);
  }
  return { heads, top: topOf([top]) };
}

function topOf(arrays) {
  return arrays.reduce((most, array) => array.reduce((a, b) => Math.max(a, b), most), 0);
}

// A file of its own answers keys at once; in a notebook they belong to the notebook until a view is chosen.
const alone = () => document.body.hasAttribute("data-mhac-page");

function whenKeysWork(keys) {
  return (alone() ? T("Keys work as soon as the page is open") : T("Keys work after a click here")) + ": " + keys;
}

// ---- mounting --------------------------------------------------------------------------------------------------

// Puts the view into every element that waits for it.  An output may be shown twice under one id, and some notebooks
// run the script before its element is in the document: so look again for two seconds.  The shadow root keeps the
// notebook's styles out and ours in, and hides the text that stands in the element for readers without scripts.
function mount(id, style, data, build, tries) {
  const hosts = [...document.querySelectorAll('[data-mhac="' + id + '"]')].filter((host) => !host.shadowRoot);
  if (!hosts.length && (tries || 0) < 20) {
    setTimeout(() => mount(id, style, data, build, (tries || 0) + 1), 100);
    return;
  }
  for (const host of hosts) {
    build(host, data).then(({ root, ready, first }) => {
      if (host.shadowRoot) return;
      const shadow = host.attachShadow({ mode: "open" });
      shadow.append(el("style", { text: style }), root);
      ready();
      if (first && alone()) first.focus({ preventScroll: true });
      host.setAttribute("data-mhac-ready", Math.round(performance.now()));
    }).catch((error) => host.append("The interactive view could not start: " + error.message));
  }
}
