// The end of the lecture: a sentence of each chapter, and where to go on.

// Addresses of the book, of this site where the page stands on one, and of the repository that made the page.
const BOOK = { en: "https://d2l.ai/chapter_attention-mechanisms-and-transformers/",
  zh: "https://zh.d2l.ai/chapter_attention-mechanisms/" };

const addresses = (data, language) => [
  [BOOK[language] || BOOK.en, T("the book's chapter")],
  ...(location.protocol.startsWith("http") ? [["examples/notebooks/scoring.html", T("these chapters as notebooks")],
    ["docs/start.html", T("installation and first steps")]].map(([path, text]) => [new URL(path, location.href).href, text]) : []),
  ...(data.repository ? [[data.repository, T("installation and first steps")]] : []),
];

const ONWARD = () => [
  ["layer.playground(inputs=x)", T("this page, with your own layer in chapter 4")],
  ["layer.view(tokens=…)", T("all heads of your layer side by side")],
  ["mha_c.teach.steps(q, k, v)", T("one call step by step, in a notebook")],
  ["mha_c.teach.check(…)", T("says what is wrong in attention that you have written")],
];

const SUMMARY = {
  id: "summary", title: "What we have seen", nav: "Summary",
  fields: {},
  numbers: () => ({}),
  build({ data, store }) {
    const seen = CHAPTERS().filter((each) => each.seen).map((each) => el("li", {}, el("b", { text: T(each.title) }), " ",
      T(each.seen)));
    const node = el("section", { class: "mhac-summary", tabindex: -1 }, el("h1", { text: T(SUMMARY.title) }), el("ol", {}, ...seen),
      el("h2", { text: T("Where to go on") }),
      el("dl", {}, ...ONWARD().flatMap(([code, text]) => [el("dt", { text: code }), el("dd", { text })]),
        ...addresses(data, store.state.lang).flatMap(([href, text]) => [
          el("dt", {}, el("a", { href, target: "_blank", rel: "noopener", text: href })), el("dd", { text })])));
    return { node, start() {}, draw() {}, end() {}, focus: () => node.focus({ preventScroll: true }) };
  },
};
