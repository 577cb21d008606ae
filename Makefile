# make demo          train a small real model with replay, then without, and compare (STEPS=20)
# make gate          two steps of the demo, which have to keep their bounds
# make test          everything but the slow tests
# make test-all      every test
# make recipe-cpu    train by recipes/cpu_smollm2.yaml
# make dist          wheel and source distribution in dist/
# make docs          the documentation in site/, warnings as errors
# make compatibility docs/compatibility.md from the results of the last `make test` or `make test-all`
# make lint          ruff and mypy
# make programs      apt-get install of Chromium and nginx, which some tests drive, where they are missing
# make pins          write requirements/cpu.txt anew from requirements/cpu.in
# make clean         remove .venv, caches and what runs left behind
#
# Every target builds .venv first (docs: .venv-docs), when it is missing or the pins changed. PYTHON names the
# interpreter.
PYTHON ?= python3.11
STEPS ?= 20
VENV := .venv
RUN := $(VENV)/bin/python

# Two cores are enough for the small models here; more threads than cores make them slower.
export OMP_NUM_THREADS ?= 2
export HF_HUB_OFFLINE = 1
export VLLM_NO_USAGE_STATS = 1

.PHONY: help venv demo gate test test-all recipe-cpu dist docs compatibility lint programs pins clean

help:
	@sed -n 's/^# make /  make /p' Makefile

venv:
	@scripts/build_venv.sh $(PYTHON) $(VENV)

demo: venv
	@$(RUN) -m trl_support_replay demo --steps $(STEPS)

gate: venv
	@$(RUN) -m scripts.gate

test: venv
	@echo "==> Tests, except slow ones"
	@$(RUN) -m pytest -q -m "not slow" --junitxml build/tests.xml

test-all: venv
	@echo "==> All tests"
	@$(RUN) -m pytest -q --junitxml build/tests.xml

recipe-cpu: venv
	@$(RUN) -c "from trl_support_replay.cli.demo.model import fetch_smollm2; fetch_smollm2('models/SmolLM2-135M-Instruct')"
	@$(RUN) -m trl_support_replay grpo --config recipes/cpu_smollm2.yaml

dist: venv
	@rm -rf dist build && $(RUN) -m build --no-isolation

docs: .venv-docs/pins.stamp
	@echo "==> mkdocs build --strict"
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --site-dir site

.venv-docs/pins.stamp: requirements/docs.txt
	@echo "==> Creating .venv-docs"
	@rm -rf .venv-docs && $(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements/docs.txt
	@touch $@

compatibility: venv
	@$(RUN) -m scripts.make_compatibility build/tests.xml

lint: venv
	@echo "==> ruff check"
	@$(RUN) -m ruff check .
	@echo "==> ruff format --check"
	@$(RUN) -m ruff format --check .
	@echo "==> mypy"
	@$(RUN) -m mypy

programs:
	@scripts/install_programs.sh

pins:
	@echo "==> Resolving requirements/cpu.in in a fresh environment"
	@rm -rf build/pins && $(PYTHON) -m venv build/pins
	@build/pins/bin/python -m pip install -qq packaging
	@build/pins/bin/python scripts/make_pins.py
	@rm -rf build/pins

clean:
	rm -rf $(VENV) .venv-docs build dist site runs models .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
