// The one store of a page: what is chosen.  Parts read `state`, change it by `set`, and hear of it; nobody else keeps a
// choice.  A part that ends takes its hearing with it: subscribe() gives the function that does so.

function Store(state) {
  const hearers = new Set();
  return {
    state,
    set(patch) {
      const changed = Object.keys(patch).filter((name) => !Object.is(state[name], patch[name]));
      if (!changed.length) return;
      Object.assign(state, patch);
      for (const hear of [...hearers]) if (hearers.has(hear)) hear(changed);
    },
    subscribe(hear) {
      hearers.add(hear);
      return () => hearers.delete(hear);
    },
  };
}

// What is to be ended together, in one function.
function endings() {
  const list = [];
  return { add: (end) => list.push(end), end: () => list.splice(0).forEach((end) => end()) };
}
