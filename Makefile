# `make demo` trains the demo; `make test` runs the whole suite. Both create .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-fast test-distributed test-reliability mutations lint bench clean

$(STAMP): pyproject.toml constraints.txt
	@echo "Making $(VENV), and installing into it the packages that constraints.txt pins."
	@echo "The first time this takes minutes: PyTorch and its libraries are large downloads. pip shows how far each is."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check -c constraints.txt "torch" -e ".[dev]"
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/fgcli -p projects/tiny_llama train

# Two processes, however many processors there are: a test may start four more, and some of them have seconds to end.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

# For a change of what reads configs: nothing is trained, no browser is started, no package is built. Under 90 seconds.
FAST := architecture codegen config project signatures cli test_aliases.py test_errors.py test_rules.py test_spelling.py
test-fast: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(addprefix tests/,$(FAST)) \
	  --ignore tests/cli/test_static.py --ignore tests/cli/test_process.py

# Every cell of the matrix of strategies (about 600 trainings, about forty minutes); writes the table of docs/parallelism.md.
# With it, the cases of other tests that `make test` leaves out.
test-distributed: $(STAMP)
	$(BIN)/python -m pytest tests --ignore tests/reliability -m "distributed or matrix" --all-cells --write-results build/results.json
	$(BIN)/python scripts/write_results.py build/results.json

# The full sets of the tests of reliability, whose quick sets are part of `make test`, and what a save costs (out of reach is
# told, and ends nothing: other load on the machine is enough for it); writes the table of docs/guarantees.md.
test-reliability: $(STAMP)
	$(BIN)/python -m pytest tests/reliability --full --timeout 3600
	-$(BIN)/python scripts/bench/checkpoint_save.py --figures build/figures.json
	$(BIN)/python scripts/write_guarantees.py

# Whether the tests notice changes that make the product wrong: scripts/mutations holds them. About an hour.
mutations: $(STAMP)
	$(BIN)/python scripts/mutations/run.py --json build/mutations.json

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python scripts/bench/run.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
