# Two commands: `make lab` to learn, `make test` to check. `make help` lists the rest.
# Needed: Python 3.11 or newer and GNU make. Everything is installed into .venv, nothing outside this folder.

TORCH := 2.13.0
VENV := .venv
BIN := $(VENV)/bin/python
PINS := $(VENV)-pins
PYTHON ?=
ARGS :=
# One thread a process: tests use both cores by themselves, and sums are added in one order everywhere.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PIP_INSTALL := $(BIN) -m pip install --disable-pip-version-check $(if $(CI),-qq)
FIND_PYTHON := PYTHON="$(PYTHON)" sh .ci/find-python

# A stamp says that .venv holds what these files ask for, in this place. It is removed before an install and written
# after it, so an interrupted install leaves none.
KEY := $(shell { pwd; cat pyproject.toml requirements.txt requirements-test.txt; } | cksum | cut -d' ' -f1)
LAB_STAMP := $(VENV)/lab-$(KEY).stamp
TEST_STAMP := $(VENV)/test-$(KEY).stamp

.DEFAULT_GOAL := help
.PHONY: help lab panel test env notebooks bench pins
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

lab: $(LAB_STAMP) ## install what the course needs, then open it in JupyterLab (ARGS="--no-browser" adds options)
	JUPYTER_PREFER_ENV_PATH=1 $(BIN) -m jupyterlab --ServerApp.ip=127.0.0.1 \
		$(if $(filter 0,$(shell id -u)),--allow-root) --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ARGS)

panel: $(LAB_STAMP) ## the control room alone as a web page, on this machine only (ARGS="--port=8867 --no-browser")
	JUPYTER_PATH="$(CURDIR)/course_lib/explorers/page" $(BIN) -m voila course_lib/explorers/page/control_room.ipynb \
		--template=course --Voila.ip=127.0.0.1 $(ARGS)

test: $(TEST_STAMP) ## everything: lint, format, spelling, unit tests, notebooks (ARGS="-k batches" picks some)
	$(ONE_THREAD) $(BIN) -m pytest -n 2 --dist loadfile $(if $(CI),--color=no) --nbval tests notebooks $(ARGS)

env: $(TEST_STAMP) ## build or update .venv with everything for tests and benchmarks

notebooks: $(TEST_STAMP) ## run every notebook anew and store it in canonical form
	$(ONE_THREAD) $(BIN) -m tests.rewrite_notebooks $(ARGS)

bench: $(TEST_STAMP) ## run the benchmarks one after another; fails if one is short of its mark
	@found=; short=; \
	for file in tests/benchmarks/*.py; do \
		name=`basename "$$file" .py`; \
		if [ ! -e "$$file" ] || [ "$$name" = __init__ ]; then continue; fi; \
		found=yes; echo "$$name"; \
		$(BIN) -m "tests.benchmarks.$$name" $(ARGS) || short="$$short $$name"; \
	done; \
	if [ -z "$$found" ]; then echo "No benchmark in tests/benchmarks." >&2; exit 1; fi; \
	if [ -n "$$short" ]; then echo "Short of their mark:$$short" >&2; exit 1; fi

# The ranges come from pyproject.toml. Name the oldest Python at hand, so that every pin runs on it: Debian 12 has 3.11.2,
# `make pins PYTHON=/usr/bin/python3.11`. A `+cpu` behind a version and the CUDA packages belong to one build of torch: out.
FREEZE := $(PINS)/bin/python -m pip freeze --all --exclude-editable --exclude pip --exclude wheel \
	| sed 's/+cpu$$//' | grep -Ev '^(nvidia|triton|cuda)'
pins: ## write requirements.txt and requirements-test.txt anew: the newest releases that pyproject.toml allows
	python=`$(FIND_PYTHON)` && "$$python" -m venv --clear $(PINS)
	$(PINS)/bin/python -m pip install -q torch==$(TORCH) -e .
	{ echo "# What the course needs to run. Written by 'make pins' from pyproject.toml."; $(FREEZE); } > $(PINS)/lab.txt
	$(PINS)/bin/python -m pip install -q -c $(PINS)/lab.txt -e '.[test,bench]'
	{ echo "# What the tests and benchmarks need on top. Written by 'make pins' from pyproject.toml."; \
		echo "-r requirements.txt"; $(FREEZE) | grep -Fvx -f $(PINS)/lab.txt; } > $(PINS)/test.txt
	mv $(PINS)/lab.txt requirements.txt
	mv $(PINS)/test.txt requirements-test.txt
	rm -rf $(PINS)

# Leaves a .venv alone whose Python and pip work; builds a missing, broken or too old one anew.
define ensure_venv
@if ! $(BIN) -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	python=`$(FIND_PYTHON)` || exit 1; \
	echo "Building $(VENV) with $$python"; \
	"$$python" -m venv --clear $(VENV) || exit 1; \
fi
@rm -f $(VENV)/*.stamp
endef

# The package itself, and JupyterLab without its question about news from the network.
define install_course
$(PIP_INSTALL) --no-deps --no-build-isolation -e .
@mkdir -p $(VENV)/etc/jupyter/labconfig
@echo '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}' \
	> $(VENV)/etc/jupyter/labconfig/page_config.json
endef

$(BIN):
	$(ensure_venv)

$(LAB_STAMP): $(BIN)
	$(ensure_venv)
	@echo "Installing what the course needs: a minute or two, and more than 1 GB on disk."
	$(PIP_INSTALL) -r requirements.txt
	$(install_course)
	@touch $(LAB_STAMP)

$(TEST_STAMP): $(BIN)
	$(ensure_venv)
	@echo "Installing what the course and its tests need: a minute or two, and more than 1 GB on disk."
	$(PIP_INSTALL) -r requirements-test.txt
	$(install_course)
	@touch $(LAB_STAMP) $(TEST_STAMP)
