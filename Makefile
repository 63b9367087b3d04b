# Each target works alone from a fresh clone: it first makes .venv complete (seconds when nothing changed).
BOOTSTRAP = sh scripts/bootstrap.sh
RUN = sh scripts/run.sh
PYTEST = $(RUN) -m pytest -m 'not gpu and not soak' --durations=15

.PHONY: demo test test-stress test-gpu lint build venv requirements clean

demo: build
	@$(RUN) -m flashrt_ros.demo $(ARGS)

test: build
	@$(PYTEST) --stress 0.1 $(ARGS)

test-stress: build
	@mkdir -p out
	@bash -o pipefail -c "$(PYTEST) --stress 1 $(ARGS) 2>&1 | tee out/test-stress-$$(date +%Y%m%d-%H%M%S).log"

test-gpu: build
	@$(RUN) -m pytest -m gpu --stress 0.1 $(ARGS)

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
