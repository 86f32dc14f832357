// The end of the lecture: a sentence of each chapter, and where to go on.

const ONWARD = () => [
  ["layer.playground(inputs=x)", T("this page, with your own layer in chapter 4")],
  ["layer.view(tokens=…)", T("all heads of your layer side by side")],
  ["mha_c.teach.steps(q, k, v)", T("one call step by step, in a notebook")],
  ["mha_c.teach.check(…)", T("says what is wrong in attention that you have written")],
  ["examples/notebooks", T("these chapters as notebooks")],
  ["docs/start.md", T("installation and first steps")],
];

const SUMMARY = {
  id: "summary", title: "What we have seen", nav: "Summary",
  fields: {},
  numbers: () => ({}),
  build() {
    const seen = CHAPTERS().filter((each) => each.seen).map((each) => el("li", {}, el("b", { text: T(each.title) }), " ",
      T(each.seen)));
    const node = el("section", { class: "mhac-summary", tabindex: -1 }, el("h1", { text: T(SUMMARY.title) }), el("ol", {}, ...seen),
      el("h2", { text: T("Where to go on") }),
      el("dl", {}, ...ONWARD().flatMap(([code, text]) => [el("dt", { text: code }), el("dd", { text })])));
    return { node, start() {}, draw() {}, end() {}, focus: () => node.focus({ preventScroll: true }) };
  },
};
