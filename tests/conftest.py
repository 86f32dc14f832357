"""Fixtures that all tests share: isa, dtype, seed, rng."""

import gc
import heapq
import inspect
import itertools
import os
import sys
import tempfile
import zlib

import hypothesis
import numpy as np
import pytest

import mha_c.d2l
import needs
import promises
from mha_c import _core, config
from mha_c.teach.asking import mistakes

# torch.compile keeps compiled graphs in a place that all programs share, and one of an operator that has since got
# another argument fails.
COMPILED = tempfile.TemporaryDirectory(prefix="mha_c-compiled-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = COMPILED.name

# Every process that a test starts finds the package under test, wherever that is.
HERE = os.path.dirname(os.path.dirname(mha_c.__file__))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (HERE, os.environ.get("PYTHONPATH"))))

# The same examples in every run: a failure seen once is seen again.  New ones every night, which print how to see them
# again.  No deadline: the machines are shared.
hypothesis.settings.register_profile(
    "mha_c",
    deadline=None,
    derandomize=not needs.FREE_SEEDS,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("mha_c")


# What a test changes or counts for the whole process: `make free-threaded`, which runs each test in several threads at
# once, runs these in one.
FOR_ALL_THREADS = (
    "set_isa( caches set_num_threads( set_language( add_mistake( threadpool references_are_lost leaks_ tracemalloc "
    "doctest interrupts.py decoder"  # the last is one layer, whose weights are of its last call
)


def is_for_one_thread(item):
    """Nor is it for several what works in a folder: the fixtures that write there are shared by the threads."""
    in_a_folder = "tmp_path_factory" in item.fixturenames  # which tmp_path asks for, too
    return in_a_folder or any(word in inspect.getsource(item.function) for word in FOR_ALL_THREADS.split())


# Where files run side by side these begin first, in this order: the C programs, which keep every core busy for minutes;
# meanwhile what waits for browsers; and the type checkers, for which all others would wait at the end.
FIRST = "test_c_core", "test_browser", "test_playground", "test_types"


def turn(item):
    return next((i for i, name in enumerate(FIRST) if item.path.name.startswith(name)), len(FIRST))


def pytest_addoption(parser):
    parser.addoption("--smoke", action="store_true", help="one test of each promise of docs/promises.md")
    parser.addoption("--few", action="store_true", help="a few cases of each test: for a second environment")


def pytest_configure(config):
    needs.FEW = config.getoption("few")


def pytest_ignore_collect(collection_path, config):
    """With --smoke other files are not even imported."""
    if config.getoption("smoke") and collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        return collection_path.name not in {file for file, _ in promises.smoke()} or None
    return None


def leave(config, items, kept):
    left = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in left])
    items[:] = kept


def of_the_smoke_test(items):
    wanted = set(promises.smoke())
    for item in items:
        pair = item.path.name, item.originalname
        if pair in wanted:
            wanted.remove(pair)
            yield item


def of_this_isa(item):
    active = _core.isa()
    return not hasattr(item, "callspec") or item.callspec.params.get("isa", active) == active


def a_few(items):
    """Of each test the first and the last of its cases, on one instruction set: what an older Python, NumPy or torch
    breaks is a line of ours that asks them for something, and each test goes through its lines with each of its cases.
    So no test is left out, and no file that comes later.  A property draws as few: needs.draws.
    """
    cases = {}
    for item in filter(of_this_isa, items):
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        yield from {0: each[0], len(each) - 1: each[-1]}.values()


def by_day(items):
    """Of a test with a product of parameters (instruction set, dtype, shape) enough cases that each pair of values
    comes together: what breaks one case breaks nearly always all that share some two values with it.
    """
    offered, active, cases = {name for name, there in _core.isas() if there}, _core.isa(), {}
    for item in items:
        if not hasattr(item, "callspec") or item.callspec.params.get("isa", active) in offered:  # else it is skipped
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        marked, lists = each[0].get_closest_marker("by_day"), getattr(each[0], "callspec", None)
        if marked or (lists and len(lists._idlist) > 2):
            each = covering(each, [what_comes_together(item) for item in each])
        yield from each


def what_comes_together(item):
    """Pairs of the ids of a case's parameters, one id for each list of them, or what its mark `by_day` says."""
    call, mark = item.callspec, item.get_closest_marker("by_day")
    values = call._idlist  # pytest's, joined in `call.id`
    if mark:  # of names of parameters; of several that are one value together, a tuple
        names = [(each,) if isinstance(each, str) else each for each in mark.args]
        values = [tuple(call.params[name] for name in each) for each in names]
    several = mark.kwargs.get("together", 2) if mark else 2
    return frozenset(itertools.combinations(enumerate(values), several)) or frozenset([item.nodeid])


def covering(items, pairs):
    """Each time the first of those that bring the most pairs which none before had.

    What one brings only ever gets less: it is counted again when it is first by what it brought before.
    """
    wanted, kept = set().union(*pairs), []
    left = [(-len(each), i) for i, each in enumerate(pairs)]
    heapq.heapify(left)
    while wanted:
        before, i = heapq.heappop(left)
        now = len(pairs[i] & wanted)
        if now == -before:
            wanted -= pairs[i]
            kept.append(i)
        elif now:
            heapq.heappush(left, (-now, i))
    return [items[i] for i in sorted(kept)]


def pytest_collection_modifyitems(config, items):
    if config.getoption("smoke"):
        leave(config, items, [*of_the_smoke_test(items)])
    if config.getoption("few"):
        leave(config, items, [*a_few(items)])
    if not needs.NIGHTLY:
        leave(config, items, [*by_day(items)])
    if hasattr(config, "workerinput"):
        items.sort(key=turn)
    if config.getoption("parallel_threads", None):
        for item in items:
            if is_for_one_thread(item):
                item.add_marker(pytest.mark.thread_unsafe(reason="changes or counts something of the whole process"))


class TestsOfTorch(pytest.Module):
    """A file that imports torch in its first lines: where there is none, it is skipped by its name."""

    def collect(self):
        needs.module("torch").default_generator.manual_seed(0)  # for what a file draws when it is imported
        if self.path.name.startswith("test_distributed_"):
            needs.distributed()
        return super().collect()


def pytest_pycollect_makemodule(module_path, parent):
    if module_path.parent.name in ("torch", "d2l") or module_path.name.startswith("test_distributed_"):
        return TestsOfTorch.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    """A test that asks torch for a name that this torch does not have is skipped, and the name said."""
    outcome = yield
    error = outcome.excinfo and outcome.excinfo[1]
    name = needs.lacking(error) if isinstance(error, (AttributeError, ImportError)) else None
    if name is not None:
        try:
            needs.skip_without(name)
        except BaseException as skipped:
            outcome.force_exception(skipped)


@pytest.fixture(autouse=True)
def settings_end_with_a_test():
    """Threads and the instruction set that a test has set, here and in torch, are as they were; and the mistakes that
    check knows, to which examples add.
    """
    torch = sys.modules.get("torch")
    isa, threads, chosen = _core.isa(), _core.get_num_threads(), config._threads_chosen
    torchs = torch and torch.get_num_threads()
    known = [*mistakes.MISTAKES]
    yield
    mistakes.MISTAKES[:] = known
    _core.set_isa(isa)
    _core.set_num_threads(threads)
    config._threads_chosen = chosen
    if torchs and torch.get_num_threads() != torchs:
        torch.set_num_threads(torchs)


@pytest.fixture(params=[name for name, _ in _core.isas()])
def isa(request):
    """Every compiled instruction set in turn, active during the test."""
    name = request.param
    if not dict(_core.isas())[name]:
        pytest.skip(f"this CPU does not offer {name}")
    _core.set_isa(name)
    assert _core.isa() == name
    return name


@pytest.fixture(params=needs.real_d2l.VERSIONS)
def d2l(request):
    """The real package, both generations, with its own classes in it when the test is over."""
    module = needs.d2l(request.param)
    yield module
    mha_c.d2l.unpatch()
    assert all(getattr(module, f"{name}Attention").__module__ == module.__name__ for name in ("MultiHead", "Additive"))


@pytest.fixture
def float64():
    """torch's modules are made in float64."""
    torch = needs.module("torch")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return np.dtype(request.param)


@pytest.fixture
def seed(request):
    """A number of the test's own, the same in every run and in whichever folder its file is."""
    return zlib.crc32(f"tests/{request.node.nodeid.rsplit('/', 1)[-1]}".encode())


@pytest.fixture(autouse=True)
def torch_draws_the_same(seed):
    """In every run and in any order of tests, whatever a test draws without a seed.

    Where no GPU draws, of the CPU's generator alone: for each other kind of device that might come, `manual_seed` would
    keep the call and its stack.
    """
    torch = sys.modules.get("torch")
    if torch:
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


def pytest_collection_finish():
    """torch gets one thread: on a busy machine its own spend far more time waiting than small tensors take.

    And garbage is looked for among what tests make, not in all that was imported and collected.
    """
    gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", ())
    if any(needs.SYSTEM_PIECES in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(f"To run the tests skipped for missing programs: {needs.SYSTEM_PIECES}")
