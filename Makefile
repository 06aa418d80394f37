# make demo         a real run on this machine: a tiny model learns addition on real vLLM engines
# make test         the tests that every change must pass
# make test-quick   the unit tests, 9 minutes on 2 cores
# make tensorboard  the curves, samples and settings of the newest run; RUN=runs/NAME for another one
# Others: setup, lint, test-all (adds the slow tests), clean. Every target sets up .venv first, once.
PYTHON ?= python3
DEVICE ?= auto
VENV := .venv
ACTIVATE := . $(VENV)/bin/activate

.PHONY: setup demo tensorboard test test-quick test-all lint clean

setup:
	@$(PYTHON) tools/install.py --device $(DEVICE)

demo: setup
	@$(ACTIVATE) && torchrun --nproc-per-node 2 train.py run.name=demo checkpoint.resume=never $(ARGS)

tensorboard: setup
	@$(ACTIVATE) && python tools/open_tensorboard.py $(RUN) $(ARGS)

test-quick: setup
	@$(ACTIVATE) && pytest -n 2 --dist loadfile -m "not slow and not gpu" tests/unit $(ARGS)

# Three workers for 2 cores, because tests also wait for timeouts and for each other's ranks.
test: lint
	@$(ACTIVATE) && pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not alone and not slow and not gpu" $(ARGS)
	@$(ACTIVATE) && pytest -m "alone and not slow and not gpu" tests/e2e $(ARGS)

test-all: setup lint
	@$(ACTIVATE) && pytest -m "not gpu" $(ARGS)

lint: setup
	@$(ACTIVATE) && ruff check . && ruff format --check . && mypy rl train.py benchmarks tools launch

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
