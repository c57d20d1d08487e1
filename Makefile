# Two commands do all their own set-up: `make demo` opens the app on the built-in model, `make test` checks everything.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
LOWEST := .venv-lowest
LOWEST_PYTHON ?= 3.11
NEWEST := .venv-newest
NEWEST_PYTHON ?= $(PYTHON)
QUICK := tests/test_layout.py tests/tui tests/lint tests/engine/test_imports.py \
	tests/engine/service/test_queue.py $(addprefix tests/engine/,core checkpoint recipe search reports)

.PHONY: demo test quick lint unit coverage test-lowest test-newest matrix fuzz random-keys engine-deaths benchmarks screenshots man clean

demo: $(VENV)/.runs
	@$(BIN)/dtype-tui demo

# Linters and tests run side by side, because mypy uses one core only. If one of the two fails, the other still ends, and `test` fails.
test: $(VENV)/.tests
	$(MAKE) -j2 lint unit

lint: $(VENV)/.tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.lint.private_names
	$(BIN)/python -m tests.lint.sizes engine/dtype_engine tui/dtype_tui
	$(BIN)/python -m tests.lint.mechanisms
	$(BIN)/python -m tests.lint.rooms

# Side by side, but in no more processes than have the memory for it.
unit: $(VENV)/.tests
	$(BIN)/pytest -n auto --maxprocesses 5 --dist worksteal

# The packages without torch and the app, without tests marked slow. Tests of the app mostly wait for a screen to come to rest, so
# more processes than cores pay.
quick: $(VENV)/.tests
	$(BIN)/pytest -n 8 --dist worksteal -m "not slow" $(QUICK)

# All tests once more, with the lines that none of them reaches: about half as long again on Python 3.11.
coverage: $(VENV)/.tests
	COVERAGE_CORE=$$($(BIN)/python -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")') \
		$(BIN)/pytest -n auto --maxprocesses 5 --dist worksteal --cov --cov-report=term

# The same tests on the oldest Python and the oldest libraries that pyproject.toml promises to work with.
test-lowest: $(LOWEST)/.tests
	$(LOWEST)/bin/pytest -n auto --maxprocesses 5 --dist worksteal

# The same tests on the newest libraries that pyproject.toml allows, as `pip install` takes them today: no constraints.txt.
test-newest: $(NEWEST)/.tests
	$(NEWEST)/bin/pytest -n auto --maxprocesses 5 --dist worksteal

# Every form of model with every way to use it: the table of tests/README.md.
matrix: $(VENV)/.tests
	$(BIN)/python -m tests.matrix

# Five thousand damaged files of each kind (the test run has 100, or 12 where each opens a model or the app), 100,000 damaged headers
# (it has 2,000), 5,000 damaged messages (it has 100), random events in every scene, and three times 20,000 keys.
fuzz: $(VENV)/.tests
	$(BIN)/python -m tests.engine.hostile.fuzz 5000
	$(BIN)/python -m tests.engine.hostile.test_checkpoints 100000
	$(BIN)/pytest --hypothesis-profile "many examples" tests/engine/service/test_messages.py
	$(BIN)/python -m tests.tui.test_hostile_events 1 10

random-keys: $(VENV)/.tests
	for seed in 1 2 3; do $(BIN)/python -m tests.terminal.random_keys $$seed || exit 1; done

# Each signal of a crash to the engine in each of its states; to each job each signal that ends a program, at random moments, and, as
# root on Linux, disks that are too small for it.
engine-deaths: $(VENV)/.tests
	$(BIN)/python -m tests.terminal.engine_deaths
	$(BIN)/python -m tests.engine.cli.interrupted_jobs 20

benchmarks: $(VENV)/.tests
	$(BIN)/python -m tests.benchmarks

screenshots: $(VENV)/.tests
	$(BIN)/python screenshots/draw.py --png
	$(BIN)/python screenshots/animate.py

# man/man1, made of the help; MANPATH=$PWD/man: shows them to `man dtype-tui`.
man: $(VENV)/.runs
	$(BIN)/python tui/write_man_pages.py man/man1

clean:
	rm -rf $(VENV) $(LOWEST) $(NEWEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "dtype-tui needs Python 3.11 or newer; name one with make PYTHON=python3.12"; exit 2; }
	@echo "Making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# The constraints hold the exact versions that the tests ran with, torch's among them. uv takes half of pip's time. Where it can't
# install, because only pip is configured to reach a mirror, say, pip does, and says what is wrong if it can't either.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
define install
	@echo "Installing $(2) and torch into $(VENV); this takes some minutes"
	@{ $(PIP) uv && UV_FIND_LINKS="$${UV_FIND_LINKS-$$PIP_FIND_LINKS}" \
		$(BIN)/uv pip install --quiet --python $(BIN)/python -c $(CONSTRAINTS) -e $(1); } 2> /dev/null || \
		{ echo "uv can't install here, so pip does; this takes twice as long"; $(PIP) -e $(1); }
endef

$(VENV)/.runs: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(call install,.,dtype-tui)
	@touch $@

$(VENV)/.tests: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(call install,'.[dev]',dtype-tui with the tools of its tests)
	@touch $@ $(VENV)/.runs

# uv is what can take the lowest versions; it looks for the oldest Python on PATH, and fetches it where there is none.
$(LOWEST)/.tests: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) uv
	$(BIN)/uv venv --quiet --clear --python $(LOWEST_PYTHON) $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct -e '.[dev,diffusers]'
	$(LOWEST)/bin/python -m tests.lint.bounds lowest
	@touch $@

# What is newest changes from day to day, so it is looked up each time. Wheels of a folder do not count: a user has PyPI's.
.PHONY: $(NEWEST)/.tests
$(NEWEST)/.tests: $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) uv
	[ -x $(NEWEST)/bin/python ] || $(BIN)/uv venv --quiet --python $(NEWEST_PYTHON) $(NEWEST)
	$(BIN)/uv pip install --quiet --python $(NEWEST)/bin/python --resolution highest --upgrade -e '.[dev,diffusers]'
	$(BIN)/uv pip list --python $(NEWEST)/bin/python
	$(BIN)/uv pip list --outdated --format json --python $(NEWEST)/bin/python | $(NEWEST)/bin/python -m tests.lint.bounds newest
