"""What the tests of the playground do in its page, and what they look at."""

import contextlib
import io

import numpy as np

# In float32, sums of at most 64 products of numbers around 1 make 64 roundings of 6e-8; so do arguments of exp, and
# a softmax as sharp as scores of 40 leaves 2e-5 of them.
CLOSE = 2e-5

STATES = {
    "attend": "ch=all",
    "additive": "kind=additive&causal=top_left&drop=0.3&seed=4",
    "distance": "from=nadaraya&kind=distance&kernel=epanechnikov",
    "encoder": "from=encoder&heads=8&len=3",
    "tiles": "part=tiles&causal=top_left",
    "gradients": "part=gradients&causal=top_left&row=3",
}


def results(shown, name):
    """A table of results as numbers, by its caption."""
    shown.run("R.querySelectorAll('details').forEach((each) => each.open = true)")
    cells = shown.run(
        "return [...R.querySelectorAll(`[data-result='${arguments[0]}'] tbody tr`)]"
        ".map((row) => [...row.querySelectorAll('td')].map((cell) => cell.textContent))",
        name,
    )
    return np.array([[float(text.replace("−∞", "-inf")) for text in row] for row in cells])


def inputs(shown):
    """Q, K and V as the page has them, from the lines of Python that it gives; and what these print."""
    names = run_python(python_of(shown))
    return names["q"], names["k"], names["v"]


def python_of(shown):
    shown.run("[...R.querySelectorAll('button')].find((b) => b.textContent === 'Copy as Python').click()")
    return shown.run("return R.querySelector('textarea').value")


def run_python(text, book=False):
    ours, _, theirs = text.partition("# The same with the book's package")
    names = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(ours + ("#" + theirs if book else ""), names)
    return names


def press(shown, text):
    """Clicks the button of that text."""
    shown.run("[...R.querySelectorAll('.mhac-button')].find((b) => b.textContent === arguments[0]).click()", text)


def type_into(shown, label, text):
    """Replaces what stands in the field of that label, as a hand does."""
    shown.run(
        "const field = [...R.querySelectorAll('.mhac-field')].find((f) => f.firstChild.textContent === arguments[0]);"
        "const box = field.querySelector('input, select'); box.value = arguments[1];"
        "box.dispatchEvent(new Event(box.tagName === 'SELECT' ? 'change' : 'input', {bubbles: true}));",
        label,
        str(text),
    )
    shown.settle()
