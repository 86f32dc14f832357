// Curves, points, stems and bars over two axes.  A plot is a picture of its numbers, and keeps nothing.

// [value, …] at round distances, or at powers of ten.
function ticksOf({ low, high, log, ticks }, most) {
  if (ticks) return ticks;
  if (log) {
    const [from, to] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
    const every = Math.ceil((to - from + 1) / most);
    return range(from, to).filter((x) => (x - from) % every === 0).map((x) => 10 ** x);
  }
  const rough = (high - low) / most;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((each) => each * unit >= rough);
  const first = Math.ceil(low / step - 1e-9);
  return range(first, Math.floor(high / step + 1e-9)).map((n) => Number((n * step).toPrecision(12)));
}

const tickText = (x) => (x !== 0 && (Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3) ? x.toExponential(0) : String(x)).replace("-",
  "−");

// spec: name (said to who cannot see it), title, width, height, x and y {low, high, log, ticks, label, say}, and
// marks [{kind, at: [[x, y], …], color, size, dash, text, alpha}, …]: line, points (each [x, y], or [x, y, its own size]),
// stems, bars (each [x0, x1, y]), span
// (each [x0, x1]: a bracket on the x axis), text (each [x, y], `text` beside it), level (each [y]: across the plot).
function Plot(pen, spec) {
  const canvas = el("canvas", { role: "img", "aria-label": spec.name });
  const node = el("figure", { class: "mhac-plot" }, canvas);
  const { width, height, x, y } = spec;
  const size = pen.type;
  const box = { left: 4 * size, right: 1.6 * size, top: (spec.title ? 2.3 : 1) * size, bottom: (x.label ? 3.3 : 2) * size };
  const part = (axis, value) => (axis.log ? Math.log(value / axis.low) / Math.log(axis.high / axis.low)
    : (value - axis.low) / (axis.high - axis.low));
  const toX = (value) => box.left + part(x, value) * (width - box.left - box.right);
  const toY = (value) => height - box.bottom - part(y, value) * (height - box.top - box.bottom);
  const font = (weight, letters = size) => weight + " " + letters + "px " + FONT;

  // The value of x where an event is.
  function where(event) {
    const at = event.clientX - canvas.getBoundingClientRect().left;
    return clamp(x.low + ((at - box.left) / (width - box.left - box.right)) * (x.high - x.low), x.low, x.high);
  }

  const context = sized(canvas, width, height);
  const says = (text, px, py, align, color) => {
    context.fillStyle = pen.color(color || "soft");
    context.textAlign = align;
    context.fillText(text, px, py);
  };

  function axes() {
    context.textBaseline = "middle";
    context.font = font(400);
    context.lineWidth = 1;
    context.strokeStyle = pen.color("faint");
    for (const value of ticksOf(y, Math.max(2, Math.floor((height - box.top - box.bottom) / 44)))) {
      stroke([[box.left, toY(value)], [width - box.right, toY(value)]]);
      says(tickText(value), box.left - 6, toY(value), "right");
    }
    for (const value of ticksOf(x, Math.max(2, Math.floor((width - box.left - box.right) / 56)))) {
      says((x.say || tickText)(value), toX(value), height - box.bottom + 0.95 * size, "center");
    }
    context.strokeStyle = pen.color("soft");
    stroke([[box.left, height - box.bottom], [width - box.right, height - box.bottom]]);
    if (x.label) says(x.label, (box.left + width - box.right) / 2, height - 0.8 * size, "center");
    if (!spec.title) return;
    context.font = font(600);
    const fits = Math.min(1, (width - 16) / context.measureText(spec.title).width);
    context.font = font(600, Math.max(11, Math.min(size, size * fits))); // a long title has smaller letters
    says(shorten(context, spec.title, width - 16), 8, size, "left", "ink");
  }

  function stroke(points) {
    context.beginPath();
    points.forEach(([px, py], i) => (i ? context.lineTo(px, py) : context.moveTo(px, py)));
    context.stroke();
  }

  const draws = {
    line: (at) => stroke(at.map(([a, b]) => [toX(a), toY(b)])),
    points: (at, mark) => at.forEach(([a, b, own]) => {
      context.beginPath();
      context.arc(toX(a), toY(b), own || mark.size || 3, 0, 2 * Math.PI);
      context.fill();
    }),
    stems: (at) => at.forEach(([a, b]) => stroke([[toX(a), toY(y.low)], [toX(a), toY(b)]])),
    bars: (at) => at.forEach(([a, b, top]) =>
      context.fillRect(toX(a) + 0.5, toY(top), Math.max(1, toX(b) - toX(a) - 1), toY(y.low) - toY(top))),
    level: (at) => at.forEach(([b]) => stroke([[box.left, toY(b)], [width - box.right, toY(b)]])),
    upright: (at) => at.forEach(([a]) => stroke([[toX(a), box.top], [toX(a), height - box.bottom]])),
    span: (at) => at.forEach(([a, b]) => {
      const [from, to, py] = [toX(Math.max(a, x.low)), toX(Math.min(b, x.high)), height - box.bottom - 5];
      stroke([[from, py - 4], [from, py + 4], [from, py], [to, py], [to, py - 4], [to, py + 4]]);
    }),
    text(at, mark) {
      context.font = font(mark.weight || 400);
      at.forEach(([a, b]) => says(mark.text, toX(a) + (mark.shift || 0), toY(b) - (mark.up || 0), mark.align || "left",
        mark.color));
    },
  };

  axes();
  for (const mark of spec.marks) {
    context.strokeStyle = context.fillStyle = pen.color(mark.color || "ink");
    context.lineWidth = mark.size || 1.5;
    context.globalAlpha = mark.alpha || 1;
    context.setLineDash(mark.dash || []);
    draws[mark.kind](mark.at, mark);
    context.globalAlpha = 1;
    context.setLineDash([]);
  }
  return { node, canvas, where };
}
