"""A real Chromium for the browser tests, driven through its own chromedriver by the WebDriver protocol.

The protocol is JSON over HTTP, so the standard library is enough; chromedriver comes with the distribution's
Chromium and fits it.  The browser runs without a window, as root too, and can reach no other host.
"""

import base64
import http.client
import json
import re
import shutil
import subprocess
import tempfile
import time

import numpy as np

from checks import softmax

FLAGS = [
    "--headless=new",
    "--no-sandbox",  # containers run tests as root, where Chromium's sandbox cannot start
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
]
NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND"  # it is cut
WIDE, HIGH = 1280, 900
PATIENCE = 180  # seconds: what a page has not done by then it will not do, whatever else the machine does
KEYS = {
    "ArrowUp": "\ue013", "ArrowDown": "\ue015", "ArrowLeft": "\ue012", "ArrowRight": "\ue014",
    "PageUp": "\ue00e", "PageDown": "\ue00f", "Home": "\ue011", "End": "\ue010", "Escape": "\ue00c",
    "Tab": "\ue004", "Enter": "\ue007", "Space": " ",
}  # fmt: skip


# A script as a function of its arguments; what it returns as JSON: an element is true, nothing null.
AS_JSON = """(() => {
    const json = (value) => JSON.stringify(value === undefined ? null : value instanceof Element || value);
    const value = (function () { %s
    }).apply(null, %s);
    return value instanceof Promise ? value.then(json) : json(value);
})()"""


class BrowserError(Exception):
    """What the driver answered instead of a result."""


def started(chromedriver):
    """(a driver, its port).  On a busy machine a driver was seen to end at once, as it does where another program takes
    the port that it has chosen: then the next one is started."""
    for _ in range(5):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        driver, said = subprocess.Popen([chromedriver, "--port=0"], **pipes), ""
        for line in driver.stdout:
            said += line
            found = re.search(r"started successfully on port (\d+)", line)
            if found:
                return driver, found.group(1)
        driver.stdout.close()
        said += f"exit status {driver.wait()}"
    raise BrowserError(f"chromedriver did not start, five times; last it said: {said}")


class Browser:
    """One window.  Coordinates are CSS pixels from the top left of what is visible."""

    def __init__(self, chromium, chromedriver, reached=None):
        self._driver, port = started(chromedriver)
        self._connection, self._session = http.client.HTTPConnection("127.0.0.1", int(port), timeout=600), ""
        self._in_a_frame = False
        self._profile = tempfile.mkdtemp(prefix="mha_c-chromium-")
        args = [*FLAGS, f"--user-data-dir={self._profile}"]
        args += [f"{NETWORK}, EXCLUDE {reached}" if reached else NETWORK]
        options = {"binary": chromium, "args": args}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._session = f"/session/{answer['sessionId']}"
        self.devtools("Performance.enable", timeDomain="threadTicks")

    def close(self):
        try:
            self._call("DELETE", "")
        finally:
            self._connection.close()
            self._driver.terminate()
            self._driver.wait(PATIENCE)
            self._driver.stdout.close()
            shutil.rmtree(self._profile, ignore_errors=True)

    def _call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        self._connection.request(method, self._session + path, data, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        value = json.load(answer)["value"]
        if answer.status != 200:
            raise BrowserError(f"{value['error']}: {value['message']}")
        return value

    # ---- pages ----

    def open(self, url):
        self._call("POST", "/url", {"url": url})

    def run(self, script, *args):
        """The value of a script that returns one; a promise is waited for.

        The driver's own way asks for the window and its frames each time, and takes three times as long: it is for what
        is inside a frame."""
        if self._in_a_frame:
            return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})
        expression = AS_JSON % (script, json.dumps(args))
        said = self.devtools("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in said:
            error = said["exceptionDetails"]
            raise BrowserError(f"javascript error: {error.get('exception', {}).get('description', error['text'])}")
        return json.loads(said["result"]["value"])

    def wait(self, script, *args, seconds=PATIENCE):
        """The first true value of the script."""
        return self.until(lambda: self.run(script, *args), seconds)

    def until(self, condition, seconds=PATIENCE):
        """The first true value of a Python function that looks at the page."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = condition()
            if value:
                return value
            time.sleep(0.02)
        raise BrowserError(f"still not true after {seconds} s: {condition}")

    def devtools(self, command, **params):
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def thread_seconds(self):
        """What the page's main thread has computed since it was opened."""
        metrics = {each["name"]: each["value"] for each in self.devtools("Performance.getMetrics")["metrics"]}
        return metrics["TaskDuration"]

    def console(self):
        """The messages since the last look."""
        return self._call("POST", "/se/log", {"type": "browser"})

    def size(self, width, height, scale=1):
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def scheme(self, name):
        """The system's colours: light or dark."""
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def javascript(self, on):
        self.devtools("Emulation.setScriptExecutionDisabled", value=not on)

    def screenshot(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self._call("GET", "/screenshot")))

    def enter_frame(self, selector):
        """From now on everything is inside this frame."""
        element = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", "/frame", {"id": element})
        self._in_a_frame = True

    def leave_frames(self):
        self._call("POST", "/frame", {"id": None})
        self._in_a_frame = False

    # ---- hands ----

    def _pointer(self, *actions):
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": list(actions)}
        self._call("POST", "/actions", {"actions": [mouse]})

    def move(self, x, y):
        self._pointer(_move(x, y))

    def click(self, x, y):
        self._pointer(_move(x, y), {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0})

    def drag(self, start, end):
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        down, up = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}
        self._pointer(_move(*start), down, _move(*middle), _move(*end), up)

    def press(self, *keys):
        """Keys by their name in KeyboardEvent.key, or single characters."""
        strokes = [KEYS.get(key, key) for key in keys]
        actions = [{"type": kind, "value": key} for key in strokes for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})


def _move(x, y):
    return {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}


class Shown:
    """One view in the page, looked at through its shadow root."""

    def __init__(self, browser, number=0):
        self.browser, self.number = browser, number

    def run(self, script, *args):
        root = f"const R = document.querySelectorAll('[data-mhac]')[{self.number}].shadowRoot;"
        return self.browser.run(root + script, *args)

    def text(self, selector):
        return self.run("return R.querySelector(arguments[0]).textContent", selector)

    def texts(self, selector):
        return self.run(
            "return [...R.querySelectorAll(arguments[0])].filter(e => e.offsetParent).map(e => e.textContent)", selector
        )

    def box(self, selector, at=0):
        return self.run(
            "const e = R.querySelectorAll(arguments[0])[arguments[1]]; e.scrollIntoView({block: 'nearest'});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]",
            selector,
            at,
        )

    def point(self, selector, across=0.5, down=0.5, at=0):
        left, top, width, height = self.box(selector, at)
        self.browser.move(left + across * width, top + down * height)
        self.settle()

    def click(self, selector, at=0):
        left, top, width, height = self.box(selector, at)
        self.browser.click(left + width / 2, top + height / 2)
        self.settle()

    def press(self, *keys):
        self.browser.press(*keys)
        self.settle()

    def focus(self, selector):
        self.run("R.querySelector(arguments[0]).focus()", selector)

    def settle(self):
        """Two frames later everything that was asked for is drawn."""
        self.browser.run("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def overflow(self):
        """By how many pixels the page is wider than the window."""
        return self.browser.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def pair(self):
        """The query and key positions and the weight that the column of numbers shows."""
        query, key = (int(text) for text in self.texts(".mhac-pair sub"))
        return query, key, float(re.sub(r"[≈<\s]", "", self.text(".mhac-value")))

    def chosen(self, selector):
        return self.run(
            "return [...R.querySelectorAll(arguments[0])].findIndex(e => e.getAttribute('aria-checked') === 'true')",
            selector,
        )

    def colours(self, selector, x=0, y=0, width=None, height=None):
        """The different colours in a part of a canvas, as 32-bit numbers; a copy of it is read, which warns nobody."""
        return self.run(
            "const c = R.querySelector(arguments[0]); const copy = document.createElement('canvas');"
            "copy.width = c.width; copy.height = c.height;"
            "const context = copy.getContext('2d', {willReadFrequently: true}); context.drawImage(c, 0, 0);"
            "const [x, y, w, h] = arguments[1];"
            "const part = context.getImageData(x, y, w || c.width, h || c.height);"
            "return [...new Set(new Uint32Array(part.data.buffer))]",
            selector,
            [x, y, width, height],
        )


# ---- time ----

STOP = """
const real = { setTimeout, setInterval, clearTimeout, clearInterval };
let now = Math.ceil(performance.now()); // whole, so that sums of milliseconds are exact
let last = 1e9; // far from the numbers of real timers, which can still be cleared
const timers = new Map();
const timer = (repeats) => (call, after = 0, ...given) => {
    timers.set(++last, { at: now + after, every: repeats && Math.max(1, after), call: () => call(...given) });
    return last;
};
const clear = (number) => timers.delete(number) || real.clearTimeout.call(window, number);
performance.now = () => now;
Object.assign(window, { setTimeout: timer(false), setInterval: timer(true) });
Object.assign(window, { clearTimeout: clear, clearInterval: clear });
window.played = {
    pass(milliseconds) {
        const end = now + milliseconds;
        const due = () => [...timers].filter(([, each]) => each.at <= end).sort(([, a], [, b]) => a.at - b.at)[0];
        for (let next; (next = due()); ) {
            const [number, each] = next;
            now = each.at;
            if (each.every) each.at += each.every;
            else timers.delete(number);
            each.call();
        }
        now = end;
    },
    end() {
        delete performance.now;
        Object.assign(window, real);
        delete window.played;
    },
};
"""


class Clock:
    """The clock of a page, and its timers, as a test plays them: no machine is too slow or too fast for what the page
    does within a time, or after it.  Frames are still drawn as they come."""

    def __init__(self, browser):
        self.browser = browser

    def stop(self):
        """Time stands still in the page that is open, until it passes."""
        self.browser.run(STOP)

    def passes(self, milliseconds):
        """What was to happen by then has happened when this returns, in the order of its time."""
        self.browser.run("played.pass(arguments[0])", milliseconds)

    def end(self):
        """The page has the real clock again; timers that still waited are forgotten."""
        self.browser.run("if (window.played) played.end()")


# ---- what several test files need ----

MATRIX = ".mhac-matrix .mhac-stage"
SENTENCE = "the animal did not cross the street because it was too tired".split()


def weights_of(heads, tokens, seed=0):
    return softmax(2 * np.random.default_rng(seed).standard_normal((heads, tokens, tokens)))


def at(box, across, down):
    left, top, width, height = box
    return left + across * width, top + down * height
