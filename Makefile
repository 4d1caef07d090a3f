# make demo, test, lint, bench: each builds what it needs in .venv first.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.24.0
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*) setup.py build_xpu.py pyproject.toml
FORMATTED = $(shell git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh' 'csrc/*.xpu')

export MAX_JOBS ?= 2

.PHONY: demo test lint format bench headers dist clean

demo: $(VENV)/.installed
	$(BIN)/gdn-ops demo

test: $(VENV)/.installed $(VENV)/.tests
	$(BIN)/pytest

lint: $(VENV)/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)

format: $(VENV)/.tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

bench: $(VENV)/.installed
	$(BIN)/gdn-ops bench

headers: $(VENV)/.torch
	scripts/check_headers.sh 2.5.1 $(BIN)/python

# Source archive and wheel in dist/, without network.
dist: $(VENV)/.torch
	$(BIN)/pip install --quiet build
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf build dist *.egg-info gdn_ops/_C*.so gdn_ops/_build_info.py

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip 'setuptools>=77' wheel packaging ninja numpy
	$(BIN)/pip install '$(TORCH)'
	touch $@

# Editable: the sources here are what runs, and the library is built into gdn_ops/.
$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	$(BIN)/pip install --quiet '$(TRANSFORMERS)' 'rich>=13' 'matplotlib>=3.8'
	$(BIN)/pip install --verbose --no-build-isolation --no-deps --editable . > $(VENV)/build.log 2>&1 \
	  || { tail -n 60 $(VENV)/build.log; exit 1; }
	@grep -m 1 'gdn_ops: built' $(VENV)/build.log
	touch $@

$(VENV)/.tests: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet pytest hypothesis expecttest onnx onnxruntime 'libclang>=18' \
	  ruff==0.17.6 clang-format==23.1.5
	touch $@
