# Everything runs inside .venv, made here where it is missing.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# For the interpreter of Triton, which tests kernels without a GPU. It is not in requirements.txt, because builds of torch
# for CUDA require another version.
TRITON := triton==3.6.0

.PHONY: setup demo count test all-tests test-quick test-slow test-gpu check docs tutorials results format mutants torchrec test-torchrec ray test-ray clean

setup: $(READY)

$(READY): requirements.txt pyproject.toml benchmarks/pyproject.toml
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TRITON)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . --editable benchmarks
	touch $(READY)

demo: setup
	$(BIN)/nestrec demo --output runs/demo

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell nestrec benchmarks tests tools examples deploy docs *.md
	$(BIN)/python tools/check_language.py
	$(BIN)/mypy

# Modules, lines and median lines per folder.
count:
	python3 docs/count_lines.py

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Executes the tutorial notebooks and stores their outputs; DATASETS is the folder with the unpacked datasets.
DATASETS := .
tutorials: setup
	$(BIN)/python docs/run_tutorials.py --data $(DATASETS)

# Tables and charts of pages, from the result files.
results: setup
	$(BIN)/python docs/result_tables.py
	$(BIN)/python docs/charts.py

# File by file, the longest (tests/conftest.py), then those that start processes: what is left over at the end is short.
# Four at a time on two cores: many tests wait for processes, signals and limits. The checks and the docs, a core each,
# run beside them.
# Bytecode is kept, whatever the environment says: a hundred processes of tests import the package.
PYTHON := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python
PYTEST := $(PYTHON) -m pytest
BY_FILE := --dist loadfile --no-loadscope-reorder
WORKERS := 4
ALL_TESTS := tests/faults tests/examples tests/multi tests/serve tests/versions tests/unit tests/meta
test: setup
	$(MAKE) --no-print-directory --jobs 3 check docs all-tests

all-tests: setup
	PYTHONPATH=tests $(PYTHON) -m support.compile_warmup $(ALL_TESTS)
	$(PYTEST) $(ALL_TESTS) --numprocesses $(WORKERS) $(BY_FILE)

# The core, without ranks, servers or benchmarks and without what interprets kernels or fills memory: for
# the loop of edit and test.
QUICK := base trace jagged ops models distributed balance embedding pipeline tasks checkpoint
LONGER := ops/test_under_interpreter.py ops/test_hopper_compiles.py embedding/test_disk_memory.py base/test_memory.py
test-quick: setup
	$(PYTEST) $(QUICK:%=tests/unit/%) $(LONGER:%=--ignore=tests/unit/%) --numprocesses 2 $(BY_FILE)

# Ranks are interpreters of their own here, which hash strings each in its way; in `make test` those under torchrun are.
test-slow: setup
	NESTREC_RANKS_START=spawn $(PYTEST) -m "slow and not gpu" --timeout 7200 --numprocesses $(WORKERS) $(BY_FILE) \
		--junit-xml build/test-slow.xml; \
	status=$$?; $(BIN)/python docs/test_reports.py slow-tests.json build/test-slow.xml && $(BIN)/python docs/result_tables.py; exit $$status

# On a machine with a GPU, in the environment that has a torch for it (`make test-gpu PY=python3`): kernels are compiled
# by as many processes as there are cores for it, ranks and servers of tests share the device.
PY := $(BIN)/python
test-gpu:
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "gpu and not slow" tests/gpu --numprocesses 10 --junit-xml build/test-gpu.xml; \
	status=$$?; $(PY) docs/test_reports.py gpu-tests.json build/test-gpu.xml && $(PY) docs/result_tables.py; exit $$status

# Mutation testing, on demand: plants small faults in FOLDER and lists those that no test detects. Runs for hours on two
# cores: SAMPLE=200 tries so many of each folder. If it is interrupted, the next run continues.
FOLDER := nestrec/tasks nestrec/data/samples nestrec/checkpoint
SAMPLE := 0
MUTATION := build/mutation
mutants: setup $(MUTATION)/.ready
	PYTHONPATH=$(MUTATION) $(PYTHON) tests/mutants.py --folders $(FOLDER) --sample $(SAMPLE) --output docs/results/mutants.json

# Pure Python and two compiled modules, next to the environment: nothing in it changes.
$(MUTATION)/.ready:
	$(BIN)/python -m pip install --quiet --target $(MUTATION) --no-deps mutmut==3.8.1 libcst==1.9.0 coverage==7.17.3
	touch $@

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# TorchRec, for comparison and conversion only, in an environment of its own: its requirements would replace our torch.
TORCHREC := .venv-torchrec
torchrec: $(TORCHREC)/.ready

$(TORCHREC)/.ready: requirements.txt
	test -x $(TORCHREC)/bin/python || python3 -m venv $(TORCHREC)
	$(TORCHREC)/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(TORCHREC)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0
	$(TORCHREC)/bin/python -m pip install --quiet --disable-pip-version-check tensordict torchmetrics==1.0.3 tqdm pyre-extensions
	$(TORCHREC)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . --editable benchmarks
	$(TORCHREC)/bin/python -W ignore -c "import torchrec"
	touch $@

# Ray Serve, in an environment of its own. Ray listens on every interface: the tests run in a network namespace.
RAY := .venv-ray
ray: $(RAY)/.ready

$(RAY)/.ready: requirements.txt
	test -x $(RAY)/bin/python || python3 -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check 'ray[serve,train]==2.60.0'
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . --editable benchmarks
	touch $@

test-ray: ray
	unshare --net sh -c 'ip link set lo up && OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest tests/with_ray'

test-torchrec: torchrec
	OMP_NUM_THREADS=1 $(TORCHREC)/bin/python -m pytest tests/with_torchrec tests/unit/jagged
