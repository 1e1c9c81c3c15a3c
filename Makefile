# Every target can be run again and again; what it runs is printed, and can be typed by hand.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUN    ?= runs/quickstart
CHAT   ?= runs/chat-75m-drafter
# Conversations of `make chat`: files, or names on the hub (MIT)
CHAT_TRAIN ?= HuggingFaceH4/ultrachat_200k:train_sft
CHAT_VALID ?= HuggingFaceH4/ultrachat_200k:test_sft
CHAT_DATA  := --data.train $(CHAT_TRAIN) --data.valid $(CHAT_VALID)

# What a file's tests share is made once when one worker has them all; in tests/conftest.py's order
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
QUICK := OMP_NUM_THREADS=1
# Python compiles a module when it is first imported: all that is imported is a quarter of what is
# installed, and pip would compile it all. It is kept even where the environment forbids to, as in
# many containers, or every process would compile it anew
export PYTHONDONTWRITEBYTECODE :=

.NOTPARALLEL:  # two of them would set up the same environment

.PHONY: help install quickstart chat test test-all test-long test-gpu check docs clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/ready  ## set up the environment in .venv; then `. .venv/bin/activate`

quickstart: $(VENV)/ready  ## set up, distil a drafter on the CPU, evaluate every checkpoint, report
	$(BIN)/python pipelines/corpus.py data/python-docs
	$(BIN)/python pipelines/distill.py fit --config configs/distill/quickstart.yaml --run_dir $(RUN)
	$(BIN)/python pipelines/eval_spec.py --run $(RUN) --config configs/eval/quickstart.yaml
	$(BIN)/python pipelines/profile_drafter.py $(RUN)
	$(BIN)/python pipelines/report.py $(RUN)

chat: $(VENV)/ready  ## as docs/results/h200-sharegpt, on public chats: one large GPU
	$(BIN)/python pipelines/fetch_benchmarks.py mt_bench humaneval gsm8k
	$(BIN)/python pipelines/train_target.py fit --config configs/target/chat-75m.yaml \
	  --run_dir runs/chat-75m $(CHAT_DATA)
	$(BIN)/python pipelines/distill.py fit --config configs/distill/chat-75m-features.yaml \
	  --run_dir $(CHAT) $(CHAT_DATA)
	$(BIN)/python pipelines/eval_spec.py --run $(CHAT) --config configs/eval/chat-75m.yaml
	$(BIN)/python pipelines/eval_spec.py --target runs/chat-75m/target/latest \
	  --checkpoint $(CHAT)/drafter/latest --config configs/eval/chat-75m.yaml \
	  --temperatures 0 --dtype float32 --out $(CHAT)/eval-fp32
	$(BIN)/python pipelines/profile_drafter.py $(CHAT)
	$(BIN)/python pipelines/report.py $(CHAT)

test: $(VENV)/ready-dev  ## set up, and run the tests for each change
	$(QUICK) $(BIN)/python -m pytest -q $(WORKERS) --ignore=tests/slurm --ignore=tests/faults \
	  --ignore=tests/lab -m "not costly and not long"

test-all: $(VENV)/ready-dev  ## these and the costly ones, as .ci/run does (jobs of a cluster: test-long and .ci/run)
	$(QUICK) $(BIN)/python -m pytest -q $(WORKERS) --ignore=tests/slurm

test-long: $(VENV)/ready-dev  ## these and the long ones: faults at many more moments, more shapes and seeds
	$(QUICK) $(BIN)/python -m pytest -q $(WORKERS) -m "long or not long"

test-gpu: $(VENV)/ready-dev  ## what needs a GPU, and the kernels' tests on it
	$(BIN)/python -c "import torch; torch.cuda.is_available() or exit('make test-gpu found no GPU')"
	$(BIN)/python -m pytest -q -m gpu

check: $(VENV)/ready-dev  ## lint, types, and the rules of tests/test_house.py
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_house.py

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile torch==2.13.0 --editable '.[train,report]'
	touch $@

$(VENV)/ready-dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile torch==2.13.0 --editable '.[dev]'
	touch $@

docs: $(VENV)/ready  ## the documentation as a site, in build/site/index.html
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	PYTHONDONTWRITEBYTECODE=1 NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## remove the environment, runs, data and build folders
	rm -rf $(VENV) runs data build *.egg-info
