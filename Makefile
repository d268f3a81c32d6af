# Two commands on a fresh machine with Python 3.11 or newer: `make run` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The main job is sized for a laptop; say JAX_PLATFORMS=cuda make run to use a GPU.
export JAX_PLATFORMS ?= cpu

.PHONY: run test test-312 gpu-plans test-jax-0.11 browser slurm test-slow test-trackers faults fuzz lint docs docs-serve offline bench bench-loop bench-optimizers bench-data bench-checkpoints bench-plan bench-plan-scale bench-weak-scaling bench-plan-search bench-published compare-optimizers clean

run: $(VENV)/.run
	$(BIN)/shardwise train recipes/stdlib_gpt.py

# Most of the time of these tests is compilation, so LLVM does not optimize; the slow tests compile as users do.
test: export XLA_FLAGS ?= --xla_backend_optimization_level=0
test: browser $(VENV)/.test lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not faults and not trackers and not gpu_plan" --durations=30 --durations-min=3

# Kernels for Hopper GPUs need a newer JAX than Python 3.11 can install. Where Python 3.12 is installed,
# their tests run in Mosaic GPU's interpreter on the CPU, and XLA's compiler for GPUs compiles them for
# an H200 that is not attached; elsewhere this says so and does nothing.
PYTHON312 := $(shell for name in python3.12 "env PYENV_VERSION=$$(pyenv latest 3.12 2>/dev/null) python3.12"; do \
  $$name -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)
KERNEL_TESTS := tests/unit/kernels tests/unit/models/test_gpt.py tests/unit/test_step.py

test-312:
ifeq ($(PYTHON312),)
	@echo "Python 3.12 is not installed: the tests of Hopper kernels are not run"
else
	$(MAKE) VENV=$(VENV)-312 PYTHON=$(PYTHON312) $(VENV)-312/.test
	$(VENV)-312/bin/python -m pytest tests/unit/kernels
	$(MAKE) VENV=$(VENV)-312 gpu-plans
endif

# Plans for GPUs that are not attached. Their compiler takes half a gigabyte, and JAX loads it wherever it
# is installed, so it is in a folder of its own.
gpu-plans: $(VENV)/.gpu
	PYTHONPATH=$(abspath $(VENV))/gpu $(BIN)/python -m pytest -n 2 tests/gpu_plan

$(VENV)/.gpu: requirements-gpu-plan.txt $(VENV)/.test
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/gpu -r requirements-gpu-plan.txt
	touch $@

# The release of JAX on which the GPU figures were measured, between the two that are pinned.
test-jax-0.11:
	$(PYTHON312) -m venv $(VENV)-jax-0.11
	$(VENV)-jax-0.11/bin/python -m pip install --quiet -r requirements-test.txt
	$(VENV)-jax-0.11/bin/python -m pip install --quiet jax==0.11.2 jaxlib==0.11.2
	$(VENV)-jax-0.11/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(VENV)-jax-0.11/bin/python -m pytest $(KERNEL_TESTS)

# A browser looks at the pages. Both commands are used where they are; else Debian's packages are installed.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
	  echo "installing chromium and chromium-driver with apt-get"; \
	  sudo=; [ "$$(id -u)" = 0 ] || sudo=$$(command -v sudo); \
	  { $$sudo apt-get update && $$sudo apt-get install -y --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1; } || { \
	  echo "the tests need a browser and apt-get could not install it: put chromium and chromedriver on the PATH" >&2; exit 1; }

# A real Slurm of one node runs the written job files. Its commands are used where they are; else Debian's packages are installed.
slurm:
	@PATH="$$PATH:/usr/sbin"; command -v munged >/dev/null && command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v sbatch >/dev/null || { \
	  echo "installing slurmctld, slurmd, slurm-client and munge with apt-get"; \
	  sudo=; [ "$$(id -u)" = 0 ] || sudo=$$(command -v sudo); \
	  { $$sudo apt-get update && $$sudo apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge; } >/dev/null 2>&1; } || { \
	  echo "the slow tests need Slurm and apt-get could not install it: put munged, slurmctld, slurmd and sbatch on the PATH" >&2; exit 1; }

test-slow: slurm $(VENV)/.test test-jax-0.11 gpu-plans
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

faults: $(VENV)/.test
	FAULTS_TABLE=docs/faults.md $(BIN)/python -m pytest tests/faults tests/hosts -m "faults or not faults" -s

# Random models, losses, optimizers and meshes, compared with a loop of plain Flax and Optax, until
# the time is over: make fuzz FUZZ_SECONDS=1800 FUZZ_SEED=1. One line of JSON per case.
fuzz: $(VENV)/.test
	$(BIN)/python -m tests.fuzz.fuzz --first tests/fuzz/differed.txt --out build/fuzz.jsonl

# Weights & Biases, MLflow and Trackio read back what a run wrote; half a gigabyte, so in an environment of its own.
test-trackers:
	$(PYTHON) -m venv $(VENV)-trackers
	$(VENV)-trackers/bin/python -m pip install --quiet -r requirements-trackers.txt
	$(VENV)-trackers/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(VENV)-trackers/bin/python -m pytest tests/trackers

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documents as a site, in site/; docs-serve shows it while it is written.
docs docs-serve: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.test
	$(BIN)/python -m mkdocs build --quiet --strict
	@echo "open site/index.html"

docs-serve: $(VENV)/.test
	$(BIN)/python -m mkdocs serve

# What shardwise needs besides JAX, for Python 3.12, as one archive of 45 MB: for measurements on a GPU
# machine that has JAX but no network. CONTRIBUTING.md shows how to use it.
JAX_NEEDS := jax jaxlib ml_dtypes numpy numpy.libs opt_einsum scipy scipy.libs
offline: build/offline.tar.xz

build/offline.tar.xz: requirements.txt
	rm -rf build/offline
	$(PYTHON312) -m pip install --quiet --no-compile --target build/offline -r requirements.txt
	cd build/offline && rm -rf bin share $(foreach name,$(JAX_NEEDS),$(name) $(name)-*)
	tar -C build -cJf $@ offline

# All that is claimed of a CPU, as one table and one record; TORCH names an interpreter that has PyTorch, to stand beside.
bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.cpu $(if $(TORCH),--torch $(TORCH))
	$(BIN)/python -m benchmarks.page

bench-loop: $(VENV)/.run
	$(BIN)/python -m benchmarks.loop

bench-optimizers: $(VENV)/.run
	$(BIN)/python -m benchmarks.optimizers --preset byte

bench-data: $(VENV)/.run
	$(BIN)/python -m benchmarks.data

bench-checkpoints: $(VENV)/.run
	$(BIN)/python -m benchmarks.checkpoint

# What plans say beside what runs take, on the accelerator at hand; then on paper, by libtpu: minutes to half an hour each.
bench-plan: $(VENV)/.run
	$(BIN)/python benchmarks/plan.py

bench-plan-scale: $(VENV)/.test
	$(BIN)/python benchmarks/plan_scale.py

bench-weak-scaling: $(VENV)/.test
	$(BIN)/python benchmarks/weak_scaling.py

bench-plan-search: $(VENV)/.test
	$(BIN)/python benchmarks/plan_search.py

bench-published: $(VENV)/.test
	$(BIN)/python benchmarks/published.py --chosen

compare-optimizers: $(VENV)/.run
	$(BIN)/python benchmarks/compare_optimizers.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: requirements.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.test: requirements-test.txt $(VENV)/.run
	$(BIN)/python -m pip install --quiet -r requirements-test.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-312 $(VENV)-jax-0.11 $(VENV)-trackers build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
