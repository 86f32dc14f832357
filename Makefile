# make demo   build and install the wheel in .venv, then run the book's examples
# make test   the same, then the test tools, the real d2l packages and all tests
# make help   everything else
#
# Needs Python 3.9 or later with its headers and venv, a C compiler, make, and the package index.

PYTHON ?= python3
ARGS ?=
# Images of containers often ask Python to write no bytecode: each of the many hundred processes that tests start would
# compile torch anew, twice the time of its import.
unexport PYTHONDONTWRITEBYTECODE
# Files of tests that run side by side.  On two cores one more than those: tests wait a fifth of their time, for
# processes, browsers and threads.
JOBS ?= 3

BIN := $(CURDIR)/.venv/bin
STAMPS := .venv/stamps
RUN := build/run
D2L := $(foreach version,0.17.6 1.0.3,.cache/d2l-$(version)/d2l/torch.py)
SOURCES := pyproject.toml setup.py MANIFEST.in LICENSE README.md CITATION.cff \
	$(shell find csrc mha_c -type f ! -name '*.so' ! -name '*.pyc')
PLAYGROUND_SOURCES := $(filter-out csrc/python/%,$(wildcard csrc/*.h csrc/*/*)) \
	tools/playground.c $(wildcard mha_c/viz/* mha_c/viz/playground_page/*.* mha_c/viz/playground_page/*/*)
PYTEST = cd $(RUN) && $(BIN)/pytest --config-file=../../pyproject.toml --rootdir=../.. -p no:cacheprovider
# Several files at once, each by one process, in the order that conftest.py has: the C programs, few tests and the
# longest, would else be met last, and all other processes wait for them.
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Leaves test_<word>*.py, or all of a folder, out of PYTEST's run.
without = $(foreach word,$(1),--ignore-glob='../../tests/*/test_$(word)*' --ignore='../../tests/$(word)')

# C programs with another build of the core, in build/: $(call c-tests,folder,options,prefix), and as a fourth word their
# names where they are not those that need no special build.
C_TESTS := scratch visible arguments attention values projections slices backward shared_gradients failures guards \
	safety explain
C_TEST_FLAGS := -std=c11 -ffp-contract=off -fno-math-errno -pthread -I$(CURDIR)/csrc -I$(CURDIR)/tests/c
CORE_SOURCES := $(filter-out $(CURDIR)/csrc/python/%,$(wildcard $(CURDIR)/csrc/*/*.c))
c-tests = mkdir -p build/$(1) && cd build/$(1) && rm -f *.o && $(CC) $(C_TEST_FLAGS) $(2) -c $(CORE_SOURCES) && \
	for test in $(or $(4),$(C_TESTS)); do \
		flags=$$(sed -n 's/^ \* build: //p' ../../tests/c/test_$$test.c); \
		$(CC) $(C_TEST_FLAGS) $(2) $$flags ../../tests/c/test_$$test.c *.o -o $$test -lm && \
		echo "test_$$test:" && $(3) ./$$test quick || exit 1; \
	done

.PHONY: demo test bench bench-core bench-browser bench-distributed scaling chart lint format typecheck coverage sanitize valgrind tsan fuzz \
	mutants guards nightly oldest free-threaded dev dev-torch smoke docs playground wheel wheels wheels-twice test-wheels compare-wheels browser-wheel clean help
.DELETE_ON_ERROR:
.NOTPARALLEL:

demo: $(STAMPS)/installed
	@mkdir -p $(RUN)
	cd $(RUN) && $(BIN)/python -m mha_c demo
	@printf '\nNow you: this starts Python with mha_c (without -I it would import the source folder).\n\n    %s\n' \
		'.venv/bin/python -I'

# Run from an empty folder, so that the installed wheel is what is imported.
test: $(STAMPS)/installed $(STAMPS)/test-tools $(D2L)
	@mkdir -p $(RUN)
	$(PYTEST) $(SIDE_BY_SIDE) ../../tests $(ARGS)

# Of the NumPy part alone, in an environment of their own: 120 MB, NumPy among them, not 1.8 GB.  What needs more is
# skipped.  On another Python and NumPy: PYTHON=python3.9 NUMPY=1.21.6, the oldest of both.
NUMPY ?=
.PHONY: test-numpy
test-numpy: $(STAMPS)/wheel
	$(PYTHON) tools/wheels/suite.py build/wheel $(NUMPY:%=--numpy %) --jobs $(JOBS) $(ARGS)

# tests/torch, tests/d2l and the book's chapters with another torch, in the environment of the book's install page:
# tools/torches.txt lists them.  make test-torch TORCH=1.12.0 PYTHON=python3.9
.PHONY: test-torch
test-torch: $(STAMPS)/wheel $(D2L)
	$(PYTHON) tools/torches.py $(TORCH) --jobs $(JOBS) $(ARGS)

# Pages in marimo itself, in a browser; marimo has an environment of its own, because it is as large as all else.
.PHONY: test-marimo
test-marimo: $(STAMPS)/installed $(STAMPS)/test-tools build/marimo/installed
	build/marimo/bin/pip install -q --no-deps --force-reinstall build/wheel/*.whl
	@mkdir -p $(RUN)
	MHA_C_MARIMO=$(CURDIR)/build/marimo/bin/python; export MHA_C_MARIMO; $(PYTEST) -q ../../tests/viz/test_marimo.py $(ARGS)

# tests/torch/test_clients.py beside the libraries that quantize, offload, adapt, draw and explain models, in an
# environment of their own, in which none of them may replace torch.
.PHONY: clients
clients: $(STAMPS)/wheel $(D2L)
	@mkdir -p $(RUN)
	$(PYTHON) -m venv build/clients
	build/clients/bin/pip install -q --upgrade 'pip>=25.1'
	build/clients/bin/pip install -q --constraint constraints.txt torch
	build/clients/bin/pip install -q --constraint constraints.txt --group clients
	build/clients/bin/pip install -q --force-reinstall --no-deps build/wheel/*.whl
	cd $(RUN) && MHA_C_CLIENTS=1 ../clients/bin/python -m pytest --config-file=../../pyproject.toml --rootdir=../.. \
		-p no:cacheprovider ../../tests/torch/test_clients.py ../../tests/torch/test_clients_watched.py $(ARGS)

bench: $(STAMPS)/installed $(STAMPS)/test-tools $(D2L)
	@mkdir -p $(RUN)
	$(BIN)/python benchmarks/bench.py --json build/bench.json $(ARGS)
	$(BIN)/python benchmarks/training.py --json build/training.json $(ARGS)
	$(BIN)/python benchmarks/beside.py
	$(BIN)/python benchmarks/readers.py

scaling: $(STAMPS)/installed
	$(BIN)/python benchmarks/scaling.py

chart: $(STAMPS)/test-tools
	$(BIN)/python benchmarks/chart.py build/bench.json build/training.json

# The kernels alone, in plain C: no Python is involved.
bench-core:
	@mkdir -p build/core
	$(CC) -O3 -std=c11 -ffp-contract=off -fno-math-errno -fno-trapping-math -fno-tree-slp-vectorize -pthread \
		-Icsrc -Itests/c benchmarks/core.c $(CORE_SOURCES) -o build/core/bench -lm
	build/core/bench $(ARGS)

# Which step of a multi_head_attention in C differs from the book's, in float and in double: make check-c FILE=mine.c
# Its main, if it has one, does not run.  CHECK_FLAGS= where the compiler has no sanitizers.
.PHONY: check-c
FILE ?= examples/c/attention.c
CHECK_FLAGS ?= -fsanitize=address,undefined -fno-sanitize-recover=undefined
check-c:
	@mkdir -p build/check-c
	@for real in float double; do \
		cc="$(CC) -std=c11 -g -O1 -Wall -Wextra -Iexamples/c -DREAL=$$real $(CHECK_FLAGS)"; \
		$$cc -Dmulti_head_attention=book_attention -c examples/c/attention.c -o build/check-c/book.o && \
		$$cc -Dmain=main_of_the_file -c $(FILE) -o build/check-c/file.o && \
		$$cc examples/c/check.c build/check-c/file.o build/check-c/book.o -o build/check-c/check -lm && \
		build/check-c/check tests/data/vectors.json || exit 1; \
	done

# The same in WebAssembly, as a browser runs it, in node.  A link with -O2 asks emscripten for a minifier.
bench-browser:
	@mkdir -p build/core && rm -f build/core/*.o
	cd build/core && emcc -w -O3 -std=c11 -ffp-contract=off -fno-math-errno -fno-trapping-math -DMHA_NO_THREADS \
		-I$(CURDIR)/csrc -I$(CURDIR)/tests/c -c $(CURDIR)/benchmarks/core.c $(CORE_SOURCES)
	cd build/core && emcc -O1 -sALLOW_MEMORY_GROWTH=1 -sSINGLE_FILE=1 *.o -o bench.js
	node build/core/bench.js $(ARGS)

# Ring attention on 1, 2 and 4 processes: work per CPU second, bytes sent, memory of a rank; then the model of a step.
bench-distributed: $(STAMPS)/installed $(STAMPS)/test-tools
	@mkdir -p $(RUN)
	$(BIN)/python benchmarks/distributed.py --json build/distributed.json $(ARGS)
	$(BIN)/python benchmarks/scale_out.py build/distributed.json docs/scale-out.svg

# What our calls cost in instructions and in bytes that caches of Zen 2 and 3 do not hold: ARGS="--beside ../before".
.PHONY: counts
counts: $(STAMPS)/installed
	$(BIN)/python benchmarks/counts.py $(ARGS)

# The same inner loops on processors that are not at hand, by llvm-mca's models: cycles, registers spilled.
.PHONY: model
model:
	$(PYTHON) tools/machine_model.py $(ARGS)

# Formatters are pinned in pyproject.toml: two versions do not write the same text.
C_FILES = $(filter-out tools/wheels/pyconfig_posix.h,$(shell git ls-files '*.c' '*.h'))
format: $(STAMPS)/lint-tools
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(C_FILES)

lint: $(STAMPS)/lint-tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(BIN)/python tools/check_style.py
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet .github

typecheck: $(STAMPS)/installed $(STAMPS)/lint-tools
	$(BIN)/mypy
	cd $(RUN) && $(BIN)/python -m mypy.stubtest --concise mha_c._core

# Lines and branches of C, and lines of Python, that the tests run.  Without optimisation and with every function
# compiled once, so that a branch counted is a branch written.  A kernel's line counts once, whichever of its instances
# run it; the last figure of the core counts the instances of each instruction set and type apart.
# Left out: pages in a browser, notebooks and the wheel, which other builds are tested with; trainings and
# the tables of accuracy, which take minutes so and reach nothing else.
COVERAGE_REPORT = $(BIN)/gcovr --root . --merge-mode-functions=separate --exclude csrc/kernels/simd_neon.h \
	--gcov-suspicious-hits-threshold 0 --filter csrc/ build
coverage: $(STAMPS)/test-tools $(STAMPS)/build-tools $(D2L)
	mkdir -p build && rm -rf build/coverage build/coverage-c && find build -name '*.gcda' -delete
	MHA_C_COVERAGE=1 $(BIN)/python setup.py -q build --build-lib build/coverage
	$(BIN)/pip install -q gcovr pytest-cov
	@mkdir -p $(RUN) build/coverage-c
	export PYTHONPATH=$(CURDIR)/build/coverage COVERAGE_FILE=$(CURDIR)/build/coverage/python \
		MHA_C_COUNTERS=$(CURDIR)/build/coverage-c; \
	$(PYTEST) $(SIDE_BY_SIDE) --cov=$(CURDIR)/build/coverage/mha_c --cov-branch --cov-report= ../../tests \
		$(call without,browser playground site notebooks packaging accuracy) -k 'not training_translates' $(ARGS) || touch $(CURDIR)/build/coverage/failed
	$(COVERAGE_REPORT) --exclude csrc/python/ --merge-lines --txt-metric branch
	$(COVERAGE_REPORT) --exclude csrc/python/ --merge-lines --print-summary
	$(COVERAGE_REPORT) --exclude csrc/python/ --txt build/coverage/instances.txt --print-summary
	$(COVERAGE_REPORT) --exclude 'csrc/[^p].*' --print-summary
	COVERAGE_FILE=build/coverage/python $(BIN)/coverage report --show-missing --skip-covered
	@test ! -e build/coverage/failed || { echo 'Tests failed, see above.'; exit 1; }

# The suite on an extension that stops at the first bad address or undefined operation, and says where.  The C programs
# have such a build of their own in any suite, a browser does not start under a preloaded sanitizer, notebooks
# measure time and memory, and packaging is about the wheel.
sanitize: $(STAMPS)/test-tools $(STAMPS)/build-tools $(D2L)
	MHA_C_SANITIZE=1 $(BIN)/python setup.py -q build --build-lib build/sanitize
	@mkdir -p $(RUN) && rm -f build/sanitizer.*
	export PYTHONPATH=$(CURDIR)/build/sanitize UBSAN_OPTIONS=print_stacktrace=1:log_path=$(CURDIR)/build/sanitizer \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:log_path=$(CURDIR)/build/sanitizer \
		LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)"; \
	$(PYTEST) $(SIDE_BY_SIDE) ../../tests $(call without,browser playground site c_core notebooks packaging) \
		-k 'not takes_little_longer and not first_minute' $(ARGS) || { cat $(CURDIR)/build/sanitizer.*; exit 1; }

# The C programs under memcheck, which sees numbers used before they were written.  It knows no AVX-512.  Silent in
# children: those of test_guards touch a forbidden page to see that it is one.
MEMCHECK := valgrind -q --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite \
	--show-leak-kinds=definite --child-silent-after-fork=yes
valgrind:
	@command -v valgrind > /dev/null || { echo 'valgrind is missing: apt-get install -y valgrind'; exit 1; }
	$(call c-tests,valgrind,-O1 -g,$(MEMCHECK))

# Threads, pool and forks under ThreadSanitizer, which sees two threads at one number without an order
# between them: as Linux parks threads, by futexes, and as macOS does.  Then the suite's tests of threads, on a sanitized
# extension; what NumPy and Python do themselves it does not see.
THREADED := pool threads threads_process team slices failures
TSAN := -O1 -g -fsanitize=thread
tsan: $(STAMPS)/native-tools $(STAMPS)/build-tools
	$(call c-tests,tsan-futex,$(TSAN),env,$(THREADED))
	$(call c-tests,tsan-condition,$(TSAN) -DMHA_PARK_ON_CONDITION,env,$(THREADED))
	MHA_C_TSAN=1 $(BIN)/python setup.py -q build --build-lib build/tsan
	@mkdir -p $(RUN)
	cd $(RUN) && PYTHONPATH=$(CURDIR)/build/tsan LD_PRELOAD="$$($(CC) -print-file-name=libtsan.so)" \
		TSAN_OPTIONS=suppressions=$(CURDIR)/tests/isolated/tsan.txt $(BIN)/python -m pytest \
		--config-file=../../pyproject.toml --rootdir=../.. -p no:cacheprovider -q -k many_threads \
		../../tests/system/test_process.py ../../tests/binding $(ARGS)

# Inputs nobody thought of, 60 s a target: tests/fuzz/run.py.
fuzz:
	$(PYTHON) tests/fuzz/run.py $(ARGS)

# Changes the core in one place at a time: do the tests notice?
mutants: $(STAMPS)/test-tools $(STAMPS)/build-tools
	$(BIN)/python tools/mutants.py $(ARGS)

# Everything that takes long, one after the other, some hours on two cores; then a page that says how each part ended.
nightly:
	$(PYTHON) tools/nightly.py $(ARGS)

# Guard pages around every operand, for all pairs of head sizes and keys up to 130.
guards:
	@mkdir -p build/guards
	cd build/guards && $(CC) $(C_TEST_FLAGS) -O2 -c $(CORE_SOURCES)
	$(CC) $(C_TEST_FLAGS) -O2 tests/c/test_guards.c build/guards/*.o -o build/guards/test -lm
	build/guards/test full

# The suite on a Python without the global lock, then each test in four threads at once: PYTHON=python3.14t.  Debian's
# source package of python3.14, configured with --disable-gil, gives one in five minutes.  What other builds and other
# programs are tested with is left out; in threads also what loads modules or needs torch.
FREE := build/free-threaded
FREE_PYTEST = cd $(RUN) && ../free-threaded/bin/pytest --config-file=../../pyproject.toml --rootdir=../.. \
	-p no:cacheprovider ../../tests
free-threaded:
	@$(PYTHON) -c 'import sys, sysconfig as s; sys.exit(not s.get_config_var("Py_GIL_DISABLED"))' \
		|| { echo '$(PYTHON) has a global lock: make free-threaded PYTHON=python3.14t'; exit 1; }
	@mkdir -p $(RUN)
	$(PYTHON) -m venv --clear $(FREE)
	$(FREE)/bin/pip install -q --prefer-binary . pytest hypothesis threadpoolctl pytest-run-parallel
	$(FREE_PYTEST) $(call without,browser playground c_core packaging) $(ARGS)
	$(FREE_PYTEST) $(call without,browser playground c_core packaging memory loading torch patch heads notebooks) \
		--parallel-threads=4 $(ARGS)

# The same wheel on the oldest NumPy that exists for this Python.
oldest: $(STAMPS)/wheel
	@mkdir -p $(RUN)
	$(PYTHON) -m venv --clear build/oldest
	build/oldest/bin/pip install -q oldest-supported-numpy build/wheel/*.whl
	cd $(RUN) && ../oldest/bin/python -m mha_c && ../oldest/bin/python -m mha_c.selftest

# In place, for work on the sources: `.venv/bin/python -m pytest tests/layers` then tests the working tree.  What needs
# torch and other large tools is skipped; `make dev-torch` brings them.
dev: $(STAMPS)/native-tools $(STAMPS)/build-tools
	$(BIN)/python setup.py -q build_ext --inplace
	$(BIN)/python tools/compile_commands.py

# One test of each promise of docs/promises.md on the working tree: a minute after a change, before all tests.
smoke: dev
	$(BIN)/python -m pytest -p no:cacheprovider -q --smoke tests $(ARGS)

dev-torch: dev $(STAMPS)/test-tools $(D2L)

wheel: $(STAMPS)/wheel

# The real d2l packages, both generations, in .cache/.
.PHONY: books
books: $(D2L)

# One file that computes with the core in a browser, without network, and the core in the package: tools/playground.py.
playground: build/playground.html
	@echo 'Open build/playground.html in a browser.'

# The repository's address, once it has one, on every page and in every notebook: tools/address.py.
.PHONY: address
REPOSITORY ?=
address:
	@$(PYTHON) tools/address.py '$(REPOSITORY)'

# The site: build/docs/html/index.html.  Notebooks are executed; warnings, dead links and loads from elsewhere are errors.
docs: $(STAMPS)/installed $(STAMPS)/docs-tools build/playground.html
	cd build && $(BIN)/python ../tools/site.py $(ARGS)

# Every platform's wheel into dist/, from this machine (Linux, Python 3.11 or later): tools/wheels/build.py.
wheels: build/wheel-tools/installed
	build/wheel-tools/bin/python tools/wheels/build.py $(ARGS)

# And once more from nothing: the same bytes.
wheels-twice: wheels
	cd dist && sha256sum * > ../build/wheels-first
	rm -rf build/wheels
	build/wheel-tools/bin/python tools/wheels/build.py $(ARGS)
	cd dist && sha256sum --check ../build/wheels-first

# The wheel for Pyodide, into build/browser, by tools pinned by their hashes; then held to what all others are.
browser-wheel: build/wheel-tools/installed build/browser-tools/installed
	build/browser-tools/bin/python -m cibuildwheel --platform pyodide --output-dir build/browser
	build/wheel-tools/bin/python tools/wheels/check.py build/browser/*.whl

clean:
	rm -rf build dist .venv .cache *.egg-info mha_c/*.so

help:
	@echo 'demo        install the wheel, run the book'"'"'s examples'
	@echo 'test        all tests on the installed wheel          ARGS="-k additive" picks some'
	@echo 'dev         in-place build for work on the sources    dev-torch   the same with torch and d2l'
	@echo 'lint        ruff, clang-format, check_style.py        typecheck   mypy and stubtest'
	@echo 'bench       our layers beside d2l and torch           ARGS="--quick --filter M1"'
	@echo
	@echo 'check-c     attention in C, step by step              FILE=mine.c'
	@echo 'test-numpy  those of the NumPy part, without torch and other large tools'
	@echo 'test-torch  those of torch and d2l with another torch    TORCH=1.12.0 PYTHON=python3.9 (tools/torches.txt)'
	@echo 'bench-core  products, their gradients, exp and tanh in plain C'
	@echo 'bench-browser   the same in WebAssembly, in node (emscripten)'
	@echo 'bench-distributed   ring attention on 1, 2 and 4 processes'
	@echo 'counts      instructions and bytes of our calls (valgrind); model   inner loops by llvm-mca'
	@echo 'scaling     two threads, many keys, sharp scores, memory, the cost of a call'
	@echo 'chart       chart and table of the README from the last bench'
	@echo 'format      writes what lint asks of layout'
	@echo 'coverage    what of C and Python the tests run        sanitize    tests under ASan and UBSan'
	@echo 'valgrind    C tests under memcheck                    fuzz        libFuzzer on the C API, 60 s a target'
	@echo 'mutants     do the tests notice a changed core?       guards      guard pages, all sizes'
	@echo 'clients     our layers inside bitsandbytes, accelerate, torchao, peft, torchviz, torchinfo and captum'
	@echo 'nightly     all of these, for longer'
	@echo 'oldest      the wheel on the oldest NumPy for this Python'
	@echo 'free-threaded   the suite without the global lock     PYTHON=python3.14t'
	@echo 'docs        the site, from pages, notebooks and docstrings'
	@echo 'playground  build/playground.html, attention in a browser: one file, the core inside'
	@echo 'smoke       one test of each promise, in a minute       wheel       build/wheel/*.whl, *.tar.gz'
	@echo 'wheels      every platform'"'"'s wheel into dist/, checked  ARGS="--only macos"'
	@echo 'wheels-twice   and once more: the same bytes          browser-wheel   for Pyodide'
	@echo 'test-wheels dist/ on every Python, under qemu, wine   ARGS="x86 arm64 musl windows browser"'
	@echo 'compare-wheels   a wheel of this system'"'"'s own compiler and dist/: the same files and bits of results'
	@echo 'address     the repository'"'"'s address on all pages       REPOSITORY=https://...'
	@echo 'clean       remove everything that was made'

# --- what the goals above share ------------------------------------------------------------------

$(STAMPS)/venv:
	@command -v $(CC) >/dev/null || { echo 'No C compiler found: apt-get install -y gcc'; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_paths()["include"] + "/Python.h"))' \
		|| { echo 'The headers of $(PYTHON) are missing: apt-get install -y python3-dev'; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; echo 'venv is missing: apt-get install -y python3-venv'; exit 1; }
	$(BIN)/python -m pip install -q --upgrade 'pip>=25.1'
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build-tools: $(STAMPS)/venv
	$(BIN)/pip install -q build 'setuptools>=77' 'numpy>=2.0'
	@touch $@

# The source archive first, and the wheel from it: so the archive is complete.  That is done in a folder that is thrown
# away; objects stay in build/, for the next wheel and for the C programs of the tests.
$(STAMPS)/wheel: $(STAMPS)/build-tools $(SOURCES)
	@rm -rf build/wheel && mkdir -p build
	MHA_C_OBJECTS=$(CURDIR) $(BIN)/python -m build --no-isolation --outdir build/wheel . > build/wheel.log 2>&1 \
		|| { grep -E 'error|undefined|multiple definition' build/wheel.log | cut -c 1-300; \
		echo 'All of it: build/wheel.log'; exit 1; }
	@ls build/wheel
	@touch $@

$(STAMPS)/installed: $(STAMPS)/wheel
	$(BIN)/pip install -q --force-reinstall --no-deps build/wheel/*.whl
	$(BIN)/pip install -q build/wheel/*.whl
	@touch $@

$(STAMPS)/%-tools: $(STAMPS)/venv pyproject.toml constraints.txt
	$(BIN)/pip install -q --group $* --constraint constraints.txt
	@touch $@

# Of what makes the wheels, the compiler alone.
build/zig/installed: tools/wheels/requirements.txt
	@echo 'Fetching the compiler, zig, into build/zig: 100 MB, once'
	@$(PYTHON) -m venv --clear build/zig
	@sed -n '/^ziglang==/,/[^\]$$/p' tools/wheels/requirements.txt > build/zig/requirements.txt
	@build/zig/bin/pip install -q --no-deps --require-hashes -r build/zig/requirements.txt
	@touch $@

# Of the page's sources the compiled core is left out, which this makes: ARGS=--keep leaves it as it is.  The compiler is
# asked for where sources have changed since, or by ARGS=--compile.
build/playground.html: tools/playground.py tools/playground.txt $(filter-out %.wasm,$(PLAYGROUND_SOURCES))
	@$(PYTHON) tools/playground.py --known $(ARGS) || { $(MAKE) --no-print-directory build/zig/installed && \
		build/zig/bin/python tools/playground.py $(ARGS); }

# dist/ on every Python found, on 64-bit ARM under qemu, and the C programs on musl and Windows: ARGS="x86 windows".
test-wheels: build/wheel-tools/installed
	build/wheel-tools/bin/python tools/wheels/test.py $(ARGS)

# A wheel that this system's own compiler made, beside that of `make wheels`: files, metadata, bits of results.
compare-wheels:
	$(PYTHON) -m venv --clear build/native/tools
	build/native/tools/bin/python -m pip install -q numpy packaging
	$(if $(filter Darwin,$(shell uname -s)),ARCHFLAGS='-arch $(shell uname -m)') \
		build/native/tools/bin/python -m pip wheel -q --no-deps --wheel-dir build/native .
	build/native/tools/bin/python tools/wheels/compare.py build/native dist

MARIMO := 0.25.2
build/marimo/installed:
	$(PYTHON) -m venv --clear build/marimo
	build/marimo/bin/pip install -q marimo==$(MARIMO) numpy
	@touch $@

build/browser-tools/installed: tools/wheels/browser.txt
	$(PYTHON) -m venv --clear build/browser-tools
	build/browser-tools/bin/pip install -q --require-hashes -r tools/wheels/browser.txt
	@touch $@

build/wheel-tools/installed: tools/wheels/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'make wheels needs Python 3.11 or later: make wheels PYTHON=python3.11'; exit 1; }
	$(PYTHON) -m venv --clear build/wheel-tools
	build/wheel-tools/bin/pip install -q --require-hashes -r tools/wheels/requirements.txt
	@touch $@

.cache/d2l-%/d2l/torch.py: | $(STAMPS)/venv
	$(BIN)/pip install -q --no-deps --no-compile --upgrade --target .cache/d2l-$* d2l==$*
	@touch $@
