# Each target works alone from a fresh clone: it first makes .venv complete (seconds when nothing changed).
BOOTSTRAP = sh scripts/bootstrap.sh
RUN = sh scripts/run.sh
# Test files are shared out to workers; WORKERS=0 runs all in one process, as one named test file does.
# Compiled modules are kept even where the environment says otherwise: hundreds of processes import them.
WORKERS = auto
PYTEST = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
  $(RUN) -m pytest --dist loadfile --no-loadscope-reorder
PYTEST_CPU = $(PYTEST) -n $(WORKERS) -m 'not gpu and not soak' --durations=20

.PHONY: demo test test-stress test-gpu lint build venv requirements clean

demo: build
	@$(RUN) -m flashrt_ros.demo $(ARGS)

test: build
	@$(PYTEST_CPU) --stress 0.1 $(ARGS)

test-stress: build
	@mkdir -p out
	@bash -o pipefail -c "$(PYTEST_CPU) --stress 1 $(ARGS) 2>&1 | tee out/test-stress-$$(date +%Y%m%d-%H%M%S).log"

# One process unless WORKERS is given: the GPU's memory is shared by all workers.
test-gpu: WORKERS = 0
test-gpu: build
	@$(PYTEST) -n $(WORKERS) -m gpu --stress 0.1 $(ARGS)

lint: venv
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

build:
	@$(BOOTSTRAP)

venv:
	@$(BOOTSTRAP) --only-packages

# Newest versions of requirements/*.in; `make requirements ARGS=--upgrade` to move pins.
requirements: venv
	@sh scripts/lock.sh $(ARGS)

clean:
	rm -rf .venv build install log out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
