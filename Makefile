# Each target does its own set-up. PYTHON chooses the interpreter that makes .venv.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.set-up
KERNELS_STAMP := $(VENV)/.kernels

.PHONY: setup lint format test sanitize demo serve bench bench-peers profile chaos fuzz readers clean exact

setup: $(KERNELS_STAMP)

$(STAMP): pyproject.toml constraints.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Perdure needs Python >= 3.11, this is " + sys.version.split()[0])'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $(STAMP)

# Only what changed is compiled; without a C compiler this is a notice
$(KERNELS_STAMP): $(STAMP) kernels/cpu/build.py kernels/cpu/csrc $(wildcard kernels/cpu/csrc/*)
	$(PY) kernels/cpu/build.py
	touch $(KERNELS_STAMP)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

test: setup
	$(PY) -m pytest

# gcc's alone: its runtime is loaded before Python, whose own leaks are not ours. Races are looked for where threads meet
sanitize: export UBSAN_OPTIONS = print_stacktrace=1
sanitize: export ASAN_OPTIONS = detect_leaks=0
sanitize: setup
	$(PY) kernels/cpu/build.py --sanitize memory --out build/sanitize/memory
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so)" PERDURE_CPU_LIBRARIES=build/sanitize/memory \
	    $(PY) -m pytest tests/kernels -k cpu
	$(PY) kernels/cpu/build.py --sanitize thread --out build/sanitize/thread
	LD_PRELOAD="$$($(CC) -print-file-name=libtsan.so)" PERDURE_CPU_LIBRARIES=build/sanitize/thread \
	    $(PY) -m pytest tests/kernels/test_cpu_step.py

demo: setup
	$(PY) -m ops.demo

serve: setup
	$(VENV)/bin/perdure serve

# ONLY="streams start ..." for some sections, ROUNDS as below
bench: setup
	$(PY) -m ops.bench --rounds $(ROUNDS) $(if $(ONLY),--only $(ONLY))

# Other engines beside ours, set up under PEERS_DIR: ROUNDS, ONLY="prefill-512 late ...", PEERS="openvino ..."
ROUNDS ?= 5
PEERS_DIR ?= build/peers

bench-peers: setup
	$(PY) -m ops.bench.peers --rounds $(ROUNDS) --directory $(PEERS_DIR) $(if $(ONLY),--only $(ONLY)) \
	    $(if $(PEERS),--peers $(PEERS))

# Where a step's time goes
profile: setup
	$(PY) -m ops.bench.profile

# Every circumstance that must not change a bit; ACTIVATIONS=int8 for the other numerics: docs/exactness.md
ACTIVATIONS ?= fp32

exact: setup
	$(PY) -m ops.exact --activations $(ACTIVATIONS)

# KILLS and SEED, MINUTES to end earlier, MODEL=toy|tiny|smollm2, WEATHER=one: docs/chaos.md
KILLS ?= 100
SEED ?= 1
MINUTES ?= 0
MODEL ?= toy

chaos: setup
	$(PY) -m ops.chaos --kills $(KILLS) --seed $(SEED) --minutes $(MINUTES) --model $(MODEL) $(if $(WEATHER),--weather $(WEATHER))

# SECONDS for all decoders together; SEED names the inputs
SECONDS ?= 60

fuzz: setup
	$(PY) -m ops.fuzz --seconds $(SECONDS) --seed $(SEED)

# Other processes read index and ledger while a stack works
readers: setup
	$(PY) -m ops.bench.readers --seconds $(SECONDS)

clean:
	rm -rf build results .mypy_cache .ruff_cache .pytest_cache .hypothesis
