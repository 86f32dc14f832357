// The state of the page stands in the address behind #, as flat names and values.  A chapter's fields are its own, and
// their starts are its preset; each change is an entry of the history, so that Back undoes it.

const one = (...names) => ({ start: names[0], read: (text) => (names.includes(text) ? text : undefined) });
const textOf = (start, most) => ({ start, read: (given) => (given.length > most ? undefined : given) });
const realOf = (start, low, high) => ({ start, low, high, read: (given) => inRange(given, low, high, Number.isFinite) });
const wholeOf = (start, low, high) => ({ start, low, high, read: (given) => inRange(given, low, high, Number.isInteger) });

function inRange(given, low, high, kind) {
  const x = given.trim() === "" ? NaN : Number(given);
  return kind(x) && x >= low && x <= high ? x : undefined;
}

const MOST_TEXT = 400;
const MOST_ROWS = 128; // of an edited matrix
const rowsField = { start: "", read: (given) => (given.length <= 20000 && given.split(";").length <= MOST_ROWS ? given
  : undefined) };
const COMMON = { lang: one("en", "de", "zh", "tr"), p: one("", "1") };

// What an address says, and what of it is not understood: that keeps its start.  The links that were given before there
// were chapters name none, and open what stands behind "All controls".
function readState(hash, chapters) {
  const said = new URLSearchParams(hash.replace(/^#/, ""));
  const names = [...said.keys()].filter((name) => !(name in COMMON));
  const asked = said.get("ch");
  const chapter = chapters.find(({ id }) => id === asked) || (names.length ? chapters[chapters.length - 1] : chapters[0]);
  const fields = { ...COMMON, ...chapter.fields };
  const state = { ch: chapter.id, ...startOf(fields) };
  const unknown = [];
  for (const [name, value] of said) {
    if (name === "ch" && value === chapter.id) continue;
    const found = Object.hasOwn(fields, name) ? fields[name].read(value) : undefined;
    if (found === undefined) unknown.push(name + "=" + value.slice(0, 40));
    else state[name] = found;
  }
  return { state, chapter, unknown };
}

const startOf = (fields) => Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.start]));

function writeState(state, chapter) {
  const fields = Object.entries({ ...COMMON, ...chapter.fields }).filter(([name, field]) => state[name] !== field.start);
  return new URLSearchParams([["ch", chapter.id], ...fields.map(([name]) => [name, String(state[name])])]).toString();
}

const SAME = 1000; // milliseconds in which further changes of the same fields belong to the first: a hand that drags
const REST = 160; // between two writings: browsers refuse more than two hundred in half a minute

// Calls `open` with what the reader goes to: a link, Back, an address that is typed.
function Address(open) {
  let [written, said, last, waiting] = [null, "", -Infinity, null];
  let late = null; // what is to be written after a rest
  window.addEventListener("popstate", () => {
    const now = location.hash.replace(/^#/, "");
    if (now === written) return;
    written = now;
    said = "";
    clearTimeout(waiting); // what was to be written is of the state before
    late = null;
    open(now);
  });

  function write(text, push) {
    clearTimeout(waiting);
    const rest = last + REST - performance.now();
    if (!push && rest > 0) {
      late = text;
      waiting = setTimeout(() => write(text, false), rest);
      return;
    }
    try {
      if (push && late !== null) history.replaceState(null, "", "#" + late);
      late = null;
      history[push ? "pushState" : "replaceState"](null, "", "#" + text);
      [written, last] = [text, performance.now()];
    } catch (refused) {
      waiting = setTimeout(() => write(text, push), SAME);
    }
  }

  return {
    start() {
      written = location.hash.replace(/^#/, "");
      return written;
    },
    remember(text, changed) {
      if (text === written) return;
      const now = changed.join();
      write(text, !(now === said && performance.now() - last < SAME));
      said = now;
    },
  };
}
