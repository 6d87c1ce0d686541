# bild_lab: `make help` lists what there is. Everything installs itself on first use.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
GPU_TESTS := tests/pretended/test_policies.py tests/engine/models/test_compiled.py tests/engine/methods/ppd/test_pipeline.py \
  tests/engine/lossless/test_random_models.py tests/engine/models/test_quantized_matrix.py

.DEFAULT_GOAL := help
.PHONY: help setup peers run test test-slow lint format bench gpu toy figures docs clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: $(INSTALLED) ## Make .venv with the tested versions; PyTorch for CUDA where nvidia-smi answers, else for CPUs

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=python3.x"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $$(PYTHON=$(BIN)/python sh torch_index.sh) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# g++ takes the stores of llama.cpp's tile configuration for dead, and it ends by an illegal instruction (llama.cpp's #26954)
peers: .venv-peers/.installed ## Make .venv-peers: CTranslate2, OpenVINO and llama.cpp, which g++ compiles once, in up to 15 minutes

.venv-peers/.installed: constraints-peers.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-peers.txt $$(PYTHON=.venv-peers/bin/python TORCH_BUILD=cpu sh torch_index.sh) torch
	grep -v '^llama_cpp_python' constraints-peers.txt | .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r /dev/stdin
	@echo "Compiling llama.cpp for this processor, up to 15 minutes"
	@CMAKE_ARGS="-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse' $$CMAKE_ARGS" .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-cache-dir --force-reinstall -c constraints-peers.txt llama_cpp_python || \
	  echo "llama.cpp was not built, so policy=llama_cpp cannot run; install g++, then rm .venv-peers/.installed && make peers"
	@touch $@

run: setup ## Draw a first Pareto curve, outputs/quickstart/pareto.png, in about a minute
	@# both in one process, which loads PyTorch once: python run.py experiment=quickstart, then experiment=quickstart_lossless
	$(BIN)/python -c 'import bild_lab; [bild_lab.run([f"experiment={name}"]) for name in ("quickstart", "quickstart_lossless")]'

# what is compiled once serves both processes and later runs, also where the environment forbids it
test test-slow: export PYTHONDONTWRITEBYTECODE =

test: setup ## Run the fast tests, in seven minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-slow: setup ## Run every test, the slow ones too
	$(BIN)/python -m pytest -n 2

lint: setup ## Check style, and that imports go one way
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

format: setup ## Mend style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## Benchmark our loop against Transformers and, after `make peers`, other engines, by precision; up to 20 minutes
	$(BIN)/python scripts/bench.py all

gpu: setup ## On a machine with an NVIDIA GPU: check, test, certify and time into outputs/gpu; half an hour or more
	nvidia-smi && $(BIN)/python -c 'import torch; assert torch.cuda.is_available(), "PyTorch finds no GPU: make clean setup"'
	@# 1. the Triton kernels, in a few minutes: right, to the last bit, how near to the memory's speed, whole texts, lossless
	$(BIN)/python scripts/check_gpu.py
	$(BIN)/python run.py -m name=gpu_kernels policy=vanilla,speculative,speculative_tree pair=toy dataset=toy \
	  dataset.limit=24 measure.certify=true runtime.device=cuda runtime.engine=kernels runtime.dtype=bfloat16
	$(BIN)/python -c 'import pandas, sys; points = pandas.read_csv("outputs/gpu_kernels/sweep.csv"); \
	  n = points.certificate_defects.sum() + points.certificate_ties.sum(); \
	  sys.exit(f"{n:.0f} texts differ, see outputs/gpu_kernels/report.html" if n else 0)'
	@# 2. the tests of a GPU, certificates and times of the other engines
	BILD_LAB_TEST_DEVICE=cuda $(BIN)/python -m pytest -n 0 $(GPU_TESTS)
	$(BIN)/python run.py -m name=gpu policy=vanilla,speculative,speculative_tree,prompt_lookup,bild pair=toy dataset=toy \
	  dataset.limit=48 measure.certify=true runtime.device=cuda runtime.dtype=float16,bfloat16,float32
	$(BIN)/python -c 'import pandas, sys; points = pandas.read_csv("outputs/gpu/sweep.csv"); \
	  n = points[points.policy != "bild"].certificate_defects.sum(); \
	  sys.exit(f"{n:.0f} texts are defects, see outputs/gpu/report.html" if n else 0)'
	$(BIN)/python scripts/bench.py all name=gpu runtime.device=cuda

toy: setup ## Train the toy pair that is shipped anew, into bild_lab/toy; ten minutes
	set -e; for member in small large; do \
	  steps=$$([ $$member = small ] && echo 1200 || echo 4000); \
	  $(BIN)/python scripts/finetune.py name=toy_$$member model=toy_$$member dataset=toy train.max_steps=$$steps; \
	  $(BIN)/python -c "import torch, transformers as t; source, to = 'outputs/toy_$$member/checkpoint', 'bild_lab/toy/$$member'; \
	    t.T5ForConditionalGeneration.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(to); \
	    t.AutoTokenizer.from_pretrained(source).save_pretrained(to)"; \
	done

figures: setup ## Run the small experiments that are missing, and draw every table and figure of the papers into outputs/figures
	$(BIN)/python scripts/paper_run.py all scale=small run=true

docs: .venv/.docs-installed ## Build the site of all pages: open build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

.venv/.docs-installed: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

clean: ## Remove the environment and caches; outputs stay
	rm -rf .venv .venv-peers .ruff_cache .import_linter_cache build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
