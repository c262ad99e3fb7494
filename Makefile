# `make demo` trains the demo, and `make assistant` fine-tunes it; `make test` runs the whole suite. All create .venv when it is
# missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is installed: the base alone, what fine-tuning needs, what the tests import, and what the other targets need. Each
# contains the one before.
BASE := $(VENV)/.base
FINETUNE := $(VENV)/.finetune
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.tools

.PHONY: demo assistant test test-fast test-distributed test-reliability test-finetune test-planner test-runs test-words mutations lint bench oracles clean

define install
	@echo "Installing into $(VENV) the packages that constraints.txt pins."
	@echo "The first time this takes minutes: PyTorch and its libraries are large downloads. pip shows how far each is."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check -c constraints.txt "torch" -e "$(1)"
	@touch $(2)
endef

$(BASE): pyproject.toml constraints.txt
	$(call install,.,$(BASE))

$(FINETUNE): pyproject.toml constraints.txt
	$(call install,.[finetune],$(BASE) $(FINETUNE))

$(STAMP): pyproject.toml constraints.txt
	$(call install,.[dev],$(BASE) $(STAMP))

$(TOOLS): pyproject.toml constraints.txt
	$(call install,.[dev$(comma)tools],$(BASE) $(STAMP) $(TOOLS))

comma := ,

demo: $(BASE)
	$(BIN)/fgcli -p projects/tiny_llama train

# The model of the demo learns to answer questions: data, a LoRA, all weights, and the answers of the three models compared.
DEMO_MODEL := projects/tiny_llama/output_models/tiny_llama/model.safetensors
assistant: $(FINETUNE) $(DEMO_MODEL)
	$(BIN)/python projects/assistant/make_data.py
	@mkdir -p build
	@echo "All weights are trained beside the LoRA: build/assistant_full.log has what that run prints."
	OMP_NUM_THREADS=1 $(BIN)/fgcli -p projects/assistant -t full train > build/assistant_full.log 2>&1 & \
	OMP_NUM_THREADS=1 $(BIN)/fgcli -p projects/assistant -t lora train || exit 1; \
	wait $$! || { tail build/assistant_full.log; exit 1; }
	$(BIN)/python projects/assistant/compare.py
	@echo "Talk to it:  $(BIN)/fgcli chat projects/assistant/output_models/lora"

$(DEMO_MODEL): | $(BASE)
	$(MAKE) demo

# Two processes on any machine: a test may start four more, and some of them must end within seconds. Files are taken in the
# order of tests/conftest.py, so that neither process waits for the other's last long file.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# For changes of the code that reads configs: trains nothing, starts no browser, builds no package. About 100 seconds on two cores.
FAST := architecture codegen config project signatures cli test_aliases.py test_errors.py test_rules.py test_spelling.py
# These start processes, measure growth, or read checkpoints.
NOT_FAST := cli/test_static.py cli/test_process.py cli/test_growth.py cli/test_ckpt.py cli/bad_input/test_surroundings.py \
  project/test_secrets.py project/test_trust.py
test-fast: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(addprefix tests/,$(FAST)) $(addprefix --ignore=tests/,$(NOT_FAST))

# Every cell of the matrix of strategies (about 600 training runs, about forty minutes), and the cases of other tests that
# `make test` leaves out. Writes the table of docs/parallelism.md.
test-distributed: $(STAMP)
	$(BIN)/python -m pytest tests --ignore tests/reliability -m "distributed or matrix" --all-cells --write-results build/results.json
	$(BIN)/python scripts/write_results.py build/results.json

# The full sets of the reliability tests, whose quick sets are part of `make test`, and the cost of a save. Writes the table of
# docs/guarantees.md. A cost above its limit is printed but does not stop make, because other load on the machine can cause it.
test-reliability: $(STAMP)
	$(BIN)/python -m pytest tests/reliability --full --timeout 3600
	-$(BIN)/python scripts/bench/checkpoint_save.py --figures build/figures.json
	$(BIN)/python scripts/write_guarantees.py

# The full sets of the tests of fine-tuning, whose quick sets are part of `make test`. Writes the table of docs/finetuning.md.
# Libraries that are not part of `dev` get a folder of their own.
test-finetune: $(STAMP)
	$(BIN)/pip install -q --no-deps -t build/libs/finetuning -c constraints.txt bitsandbytes certifi charset-normalizer diffusers idna importlib_metadata requests torchao trl urllib3 zipp
	PYTHONPATH=build/libs/finetuning $(BIN)/python -m pytest $$($(BIN)/python scripts/write_finetuning.py --files) --full --all-cells --timeout 3600 -o junit_family=xunit1 --junitxml build/finetuning.xml
	$(BIN)/python scripts/write_finetuning.py build/finetuning.xml

# The full sets of the tests of the planner, whose quick sets are part of `make test`, in pieces of a few minutes. Writes the
# tables of docs/planner.md.
test-planner: $(STAMP)
	rm -rf build/planner
	$(BIN)/python scripts/write_planner.py --pieces | while read name words; do \
	  $(BIN)/python -m pytest $$words --full --timeout 3600 -o junit_family=xunit1 --junitxml build/planner/$$name.xml; \
	done
	$(BIN)/python scripts/write_planner.py build/planner

# The full sets of the tests of many runs, whose quick sets are part of `make test`, in pieces of a few minutes. Writes the
# table of docs/runs.md.
test-runs: $(STAMP)
	rm -rf build/runs
	$(BIN)/python scripts/write_runs.py --pieces | while read name words; do \
	  $(BIN)/python -m pytest $$words --full --timeout 3600 -o junit_family=xunit1 --junitxml build/runs/$$name.xml; \
	done
	$(BIN)/python scripts/write_runs.py build/runs

# The full sets of the tests of other tools' words and of trainers from scripts, whose quick sets are part of `make test`, in
# pieces of a few minutes. Writes the table of docs/coming-from/index.md.
test-words: $(STAMP)
	rm -rf build/words
	$(BIN)/python scripts/write_word_reach.py --pieces | while read name words; do \
	  $(BIN)/python -m pytest $$words --full --timeout 3600 -o junit_family=xunit1 --junitxml build/words/$$name.xml; \
	done
	$(BIN)/python scripts/write_word_reach.py build/words

# Checks that the tests detect each defect that scripts/mutations describes. About an hour.
mutations: $(STAMP)
	$(BIN)/python scripts/mutations/run.py --json build/mutations.json

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# All benchmarks, and the figures of a step, which tests record. Writes the table of docs/performance.md.
bench: $(TOOLS)
	rm -rf build/performance
	mkdir -p build/performance
	$(BIN)/python scripts/bench/run.py -o build/performance/bench.json
	$(BIN)/python scripts/write_performance.py --pieces | while read name words; do \
	  $(BIN)/python -m pytest $$words --full --all-cells --timeout 3600 -o junit_family=xunit1 --junitxml build/performance/$$name.xml; \
	done
	$(BIN)/python scripts/write_performance.py build/performance

# Records what other libraries give for the same input, with their versions, for the tests to compare with. No library is
# installed into .venv: each has a folder of its own. Needs the package index.
oracles: $(STAMP)
	$(BIN)/python scripts/oracles/chat_templates.py
	$(BIN)/pip install -q --no-deps -t build/oracles/trl -c constraints.txt trl
	PYTHONPATH=build/oracles/trl $(BIN)/python scripts/oracles/preference_losses.py
	PYTHONPATH=build/oracles/trl $(BIN)/python scripts/oracles/rewarded_runs.py
	$(BIN)/pip install -q --no-deps -t build/oracles/lightning -c constraints.txt lightning lightning-utilities torchmetrics
	PYTHONPATH=build/oracles/lightning $(BIN)/python scripts/oracles/lightning_runs.py
	$(BIN)/pip install -q --no-deps -t build/oracles/quant -c constraints.txt bitsandbytes torchao
	PYTHONPATH=build/oracles/quant $(BIN)/python scripts/oracles/quantized_models.py
	PYTHONPATH=build/oracles/quant $(BIN)/python scripts/oracles/bitsandbytes_optimizers.py
	PYTHONPATH=build/oracles/quant $(BIN)/python scripts/oracles/library_pairs.py
	PYTHONPATH=build/oracles/quant $(BIN)/python scripts/oracles/float8_runs.py
	PYTHONPATH=build/oracles/quant TORCHDYNAMO_DISABLE=1 $(BIN)/python scripts/oracles/low_bit_optimizers.py
	$(BIN)/python scripts/oracles/gguf_exports.py
	DS_ACCELERATOR=cpu $(BIN)/python scripts/oracles/memory_estimates.py
	$(BIN)/pip install -q --no-deps -t build/oracles/lightning -c constraints.txt lightning lightning-utilities torchmetrics
	DS_ACCELERATOR=cpu PYTHONPATH=build/oracles/lightning $(BIN)/python scripts/oracles/lightning_words.py
	DS_ACCELERATOR=cpu PYTHONPATH=build/oracles/lightning $(BIN)/python scripts/oracles/word_lists.py
	$(BIN)/pip install -q --no-deps -t build/oracles/seqeval seqeval
	PYTHONPATH=build/oracles/seqeval $(BIN)/python scripts/oracles/entity_metrics.py
	$(BIN)/python scripts/oracles/launch_schemas.py files build/oracles/launch
	for kind in skypilot dstack kubeflow; do \
	  case $$kind in kubeflow) packages=kubeflow_trainer_api;; *) packages=$$kind;; esac; \
	  $(PYTHON) -m venv build/oracles/$$kind && build/oracles/$$kind/bin/pip install -q $$packages ruamel.yaml && \
	  build/oracles/$$kind/bin/python scripts/oracles/launch_schemas.py $$kind build/oracles/launch || exit 1; \
	done
	$(BIN)/pip install -q -t build/oracles/ray ray
	PYTHONPATH=build/oracles/ray $(BIN)/python scripts/oracles/ray_driver.py
	$(BIN)/pip download -q --no-deps -d build/oracles/nccl nvidia-nccl-cu12
	$(BIN)/python scripts/oracles/nccl_variables.py build/oracles/nccl
	$(BIN)/pip install -q -t build/oracles/wandb "$$(grep "^wandb==" constraints.txt)"
	PYTHONPATH=build/oracles/wandb $(BIN)/python scripts/oracles/tracked_files.py
# Without the other constraints: these libraries need older releases of what they share with Forgather.
	for library in wandb mlflow trackio aim comet_ml; do \
	  $(BIN)/pip install -q -t build/oracles/$$library "$$(grep "^$$library==" constraints.txt)" && \
	  PYTHONPATH=build/oracles/$$library $(BIN)/python scripts/oracles/trackers.py $$library || exit 1; \
	done

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
