# The commands of the project. `make serve` and `make test` work in a bare clone: both make the environment first.

BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help env serve test test-long bench lint format lock clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## */	/' | awk -F '\t' '{ printf "  make %-10s %s\n", $$1, $$2 }'

env: ## make or update .venv from the lock (PYTHON=... chooses the interpreter)
	@sh scripts/make-env.sh

serve: env ## open the gateway with the bundled model (ARGS="--port 8080 --model PATH")
	@$(BIN)/rewarm serve $(ARGS)

test: env ## run the tests, at most 15 minutes on two slow cores (ARGS="-k chain")
	@$(BIN)/python -m pytest -m "not long" $(ARGS)

test-long: env ## run what needs more: full counts, a browser
	@$(BIN)/python -m pytest -m "long" $(ARGS)

bench: env ## measure against the disk's limit and other formats (ARGS="--check", "--quick"); as root, on Linux
	@$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r benchmarks/requirements.lock
	@$(BIN)/python -m benchmarks $(ARGS)

lint: env ## ruff, import contracts, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/mypy

format: env ## format and sort imports
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: ## resolve the versions anew (needs uv)
	uv pip compile --universal --python-version 3.11 --all-extras --group dev --upgrade \
	  --no-emit-index-url --no-header --generate-hashes --no-annotate pyproject.toml -o requirements.lock
	uv pip compile --universal --python-version 3.11 --upgrade --no-emit-index-url --no-header --generate-hashes \
	  --no-annotate -c requirements.lock benchmarks/requirements.in -o benchmarks/requirements.lock

clean: ## remove what tests and tools left; .venv and converted models stay
	rm -rf build/tmp dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .grimp_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
