# Reproduce the recipe: one target per stage. `make` prints the targets for daily use, `make help-all` all of them.
#
# A target's line ends with its help: `##` for `make help-all`, `##*` for `make` as well. `#=` names its variables.
MAKEFLAGS += --no-builtin-rules --warn-undefined-variables
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# What and where, as in `make stage1.1 SCALE=tiny LAUNCHER=local`. The launcher reads these and the variables of
# tools/planning/contract.py from the environment; what is empty here counts as not given.
SCALE ?=
PLATFORM ?=
LAUNCHER ?=
CLUSTER ?=
ENV_TOML ?=
ENGINE ?=
SEED ?=
EXP_NAME ?=
DRY_RUN ?=
ARGS ?=
RESULTS_DIR ?=
STAGE ?=
STAGES ?=
DIFF ?=
FILE ?=
BASE ?=
DATA ?=
BLEND ?=
MODEL_PATH ?=
VAL_ROWS ?=
# Under WSL the environment has a NAME, that of the machine: only one that is given to make counts.
NAME := $(if $(filter command,$(origin NAME)),$(NAME))
URL ?=
CMD ?=
PORT ?=
override SCALE := $(or $(SCALE),prod)
override PLATFORM := $(or $(PLATFORM),h100)
override ENGINE := $(or $(ENGINE),native)
override RESULTS_DIR := $(or $(RESULTS_DIR),results)
override STAGE := $(or $(STAGE),stage1.1)
override PORT := $(or $(PORT),5000)
export SCALE PLATFORM LAUNCHER CLUSTER ENV_TOML ENGINE SEED EXP_NAME DRY_RUN RESULTS_DIR

# A misspelt variable would be ignored: what is given to make is named in this file or in the launcher's contract.
NAMED = $(shell grep -ohE '[A-Z][A-Z0-9_]+' $(MAKEFILE_LIST) tools/planning/contract.py tools/images/*.py)
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
UNREAD := $(if $(GIVEN),$(filter-out $(NAMED),$(GIVEN)))
$(if $(UNREAD),$(error got $(UNREAD), which nothing here reads; expected variables of the Makefile or of \
tools/planning/contract.py: correct the name, or put it before `make` when a program that is started reads it))

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.synced
ALL_STAGES := stage1.1 stage1.2 stage1.3 stage2.1 stage2.2 stage3
SMOKE_SEED := $(or $(SEED),42)
SMOKE_RUN := $(or $(EXP_NAME),smoke-seed$(SMOKE_SEED)-$(shell date +%Y%m%d-%H%M%S))
# The newest run is the one that logged last: a report that is written makes its directory newer, not its run.
RUN_DIR = $(if $(EXP_NAME),$(RESULTS_DIR)/$(EXP_NAME),$(shell \
ls -t '$(RESULTS_DIR)'/*/metrics.jsonl 2>/dev/null | sed -n '1s:/metrics.jsonl$$::p'))

##@ Start here
.PHONY: help help-all
help: ## print the targets for daily use
	@awk -F ':.*##[*] ' '/^[a-z0-9._-]+:.*##[*] / { printf "  %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@printf '\nEvery target and its variables: make help-all. Start with: make smoke\n'

help-all: ## print every target, with its variables
	@awk -F ':.*##[*]? ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^#= / { printf "  %-9s   %s\n", "", substr($$0, 4) } \
	  /^[a-z0-9._-]+:.*##[*]? / { printf "  %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: setup
setup: $(READY) ##* install the Python environment into .venv, once

$(READY): containers/requirements-cpu.lock
	@VENV='$(CURDIR)/$(VENV)' tools/setup/setup.sh

# Two processes train instead of one: each has half of every layer (TP), of the batch (DP) or of the experts (EP).
MODEL ?=
TP ?=
DP ?=
EP ?=
LAYOUT := $(strip $(if $(TP),TP=$(TP)) $(if $(DP),DP=$(DP)) $(if $(EP),EP=$(EP)))
LAYOUT_ARGS = $(if $(LAYOUT),cluster.gpus_per_node=3)
ifeq ($(LAYOUT),TP=2)
LAYOUT_ARGS += policy.megatron_cfg.tensor_model_parallel_size=2 policy.megatron_cfg.sequence_parallel=true
else ifeq ($(LAYOUT),EP=2)
LAYOUT_ARGS += policy.megatron_cfg.expert_model_parallel_size=2
else ifneq ($(LAYOUT),$(filter DP=2,$(LAYOUT)))
$(error got $(LAYOUT), expected one of TP=2, DP=2 and EP=2)
endif
SMOKE_MODEL = $(if $(filter-out qwen3,$(MODEL)),MODEL_PATH=$(CURDIR)/models/tiny-$(MODEL)-sft)

# The tasks of the tiny blend are learned in so many steps, which stages 1.1 to 1.3 share when they run one by one.
TINY_STEPS := grpo.max_num_steps=40
SMOKE = SCALE=tiny LAUNCHER=local SEED=$(SMOKE_SEED) EXP_NAME=$(SMOKE_RUN) $(SMOKE_MODEL) ./super_launch.sh
SMOKE_WORDS = $(TINY_STEPS) $(LAYOUT_ARGS) $(ARGS)
# What `tiny` runs first for a target that trains afterwards: a wrong input is said before the warm-up, not after it.
BEFORE :=

.PHONY: smoke
smoke: MODEL := $(or $(MODEL),nemotron-h)
smoke: BEFORE = @$(SMOKE) --check stage1.1 $(SMOKE_WORDS)
smoke: tiny ##* train stage 1.1 with a tiny model on this machine and show what it learned
#= SEED=42 MODEL=nemotron-h|nemotron-dense|qwen3|qwen3-moe ARGS="key=value ..."
#= TP=2 | DP=2 | EP=2 (two processes train)
	$(SMOKE) stage1.1 $(SMOKE_WORDS)
	$(PYTHON) -m tools.report --run-dir '$(RESULTS_DIR)/$(SMOKE_RUN)' --min-gain 0.25
	$(PYTHON) -m tools.tiny.check_gain --run-dir '$(RESULTS_DIR)/$(SMOKE_RUN)'

# At scale tiny on this machine rules judge the wide blend, as long as the command runs.
JUDGED = $(if $(filter tiny/local/wide,$(SCALE)/$(LAUNCHER)/$(BLEND)),$(PYTHON) -m tools.tiny.rule_judge --)
# Only the wide warm-up has seen tools, repositories and preferences: a chain that comes to their stages starts from it.
AT_TINY = $(filter tiny,$(SCALE))$(MODEL_PATH)
CHAIN = $(or $(STAGES),$(ALL_STAGES))
IS_LONG = $(filter stage2.1 stage2.2 stage3,$(CHAIN))
CHAIN_START = $(if $(filter tiny,$(AT_TINY)),$(if $(filter stage1.1,$(CHAIN)),$(if \
$(IS_LONG),MODEL_PATH=$(CURDIR)/models/tiny-wide-sft)))
# On this machine a tiny chain first makes its rows, its images and its SFT checkpoint, where they are not there yet.
CHAIN_MAKES = $(if $(filter tiny/local/,$(SCALE)/$(LAUNCHER)/$(MODEL_PATH)$(DRY_RUN)),$(PYTHON) -m tools.tiny.prepare \
--models models --data data $(if $(filter stage2.2,$(CHAIN)),--with-containers) $(if \
$(IS_LONG)$(filter wide,$(BLEND)),--blend wide))

PIPELINE = $(PYTHON) -m tools.launch.pipeline --stages "$(STAGES)"

##@ Stages (on Slurm; on this machine with LAUNCHER=local; DRY_RUN=1 prints the command)
.PHONY: $(ALL_STAGES) pipeline
$(ALL_STAGES) pipeline doctor: export BLEND := $(BLEND)
stage1.1: ##* run stage 1.1: RLVR, blend 1 (rlvr1); the others are stage1.2 to stage3
#= SCALE=prod|small|tiny PLATFORM=h100|b200 LAUNCHER=slurm|local ENGINE=native|nemo_rl
#= CLUSTER=profile MODEL_PATH SEED EXP_NAME DRY_RUN=1 ARGS="key=value ..."
#= BLEND=wide (at scale tiny)
stage1.2: ## RLVR, blend 2 (rlvr2)
stage1.3: ## RLVR, blend 3 (rlvr3)
stage2.1: ## software engineering, single-step edits (swe1)
stage2.2: ## software engineering, whole instances in containers (swe2)
stage3: ## RLHF with a generative reward model (rlhf)
$(ALL_STAGES): $(READY)
	@$(JUDGED) ./super_launch.sh $@ $(ARGS)

stage%: $(READY) # the launcher answers a stage that does not exist with the names of those that do
	@./super_launch.sh $@ $(ARGS)

pipeline: $(READY) ##* run all six stages in order, each from its parent's export; run it again to resume
#= STAGES="stage1.1 stage2.1" MODEL_PATH BLEND
#= ARGS=--report (only the page about the chain)
	@$(if $(CHAIN_MAKES),$(CHAIN_START) $(PIPELINE) --check $(ARGS) && $(CHAIN_MAKES))
	@$(CHAIN_START) $(JUDGED) $(PIPELINE) $(ARGS)

.PHONY: doctor
doctor: $(READY) ##* report every problem of a planned launch, each with a code and a fix
#= STAGE SCALE PLATFORM ARGS=--json
	@$(JUDGED) $(PYTHON) -m tools.doctor --stage $(STAGE) $(ARGS)

.PHONY: plan
plan: $(READY) ##* print nodes, memory per GPU, step time and GPU-hours of a stage
#= STAGE SCALE PLATFORM ARGS
	@$(PYTHON) -m tools.sizing.planner --stage $(STAGE) --scale $(SCALE) --platform $(PLATFORM) $(ARGS)

.PHONY: launch-golden
launch-golden: $(READY) ## update the recorded commands of every stage in tests/golden/launch
	$(PYTHON) -m tools.launch.golden --write tests/golden/launch

.PHONY: stages
stages: $(READY) ## print the stage table with its sizes; update the README's copy
	@$(PYTHON) -m tools.launch.stage_table --write README.md

.PHONY: config
config: $(READY) ##* print a stage's configuration and which file set each value
#= STAGE SCALE PLATFORM, or FILE=overlay.yaml; ENGINE DIFF=stage ARGS="key=value ..."
	@$(PYTHON) -m tools.config.show $(if $(FILE),--file $(FILE),--stage $(STAGE)) --scale $(SCALE) --platform $(PLATFORM) --engine $(ENGINE) $(if $(DIFF),--diff $(DIFF)) $(ARGS)

.PHONY: config-import
config-import: $(READY) ## turn a NeMo RL stage file into an overlay, on standard output
#= FILE=their.yaml BASE=stage2.2
	@$(PYTHON) -m tools.nemo_rl.import_file --file $(or $(FILE),$(error give FILE=their.yaml)) $(if $(BASE),--base $(BASE)) $(ARGS)

.PHONY: config-docs
config-docs: $(READY) ## write the reference of all configuration keys to build/configuration.md
	$(PYTHON) -m tools.config.docs --write build/configuration.md

.PHONY: config-keys
config-keys: $(READY) ## write schema.json and the comments of grpo_base.yaml from recipes/config/tree
	$(PYTHON) -m tools.config.keys

.PHONY: config-golden
config-golden: $(READY) ## update the recorded configurations in tests/golden/config
	$(PYTHON) -m tools.config.show --update-golden

##@ Inputs
.PHONY: data
data: $(READY) ##* download, check, fill and split a blend; without BLEND make the tiny rows
#= BLEND=rlvr1 VAL_ROWS=100 ARGS="--stratify agent"
ifeq ($(BLEND),)
	$(PYTHON) -m tools.tiny.prepare --data data $(if $(VAL_ROWS),$(error VAL_ROWS: the tiny rows are split as they are made; give a BLEND with it, such as BLEND=rlvr1)) $(ARGS)
else
	$(PYTHON) -m tools.data.prepare --blend $(BLEND) --data data --val-rows $(or $(VAL_ROWS),100) $(ARGS)
endif

.PHONY: data-validate
data-validate: $(READY) ## check every row of a blend's splits: shape, agents, duplicates, contamination
#= BLEND=tiny ARGS="--others data/rlvr1"
	$(PYTHON) -m tools.rows.validate --data data/$(or $(BLEND),tiny) --problems data/$(or $(BLEND),tiny)/problems.jsonl \
	  $(if $(filter tiny-wide,$(BLEND)),--config configs/tiny/wide.yaml) $(ARGS)

.PHONY: data-report
data-report: $(READY) ## count rows, lengths and pass rates per agent; write data/BLEND/report.html
#= BLEND=tiny ARGS="--tokenizer DIR"
	$(PYTHON) -m tools.rows.report --data data/$(or $(BLEND),tiny) --out data/$(or $(BLEND),tiny)/report.html $(ARGS)

.PHONY: profile
profile: $(READY) ## record how often a checkpoint solves each training row; run it again to resume
#= BLEND=tiny MODEL_PATH STAGE SCALE
	$(PYTHON) -m tools.curriculum.profile --stage $(STAGE) --model $(or $(MODEL_PATH),models/tiny-sft) --data data/$(or $(BLEND),tiny)/train-split.jsonl --run-dir '$(RESULTS_DIR)/profile-$(or $(BLEND),tiny)' $(ARGS)

PASS_RATES = $(addprefix --pass-rates ,$(if $(EXP_NAME),$(RESULTS_DIR)/$(EXP_NAME)/pass_rates.jsonl,$(wildcard \
$(RESULTS_DIR)/profile-$(or $(BLEND),tiny)/pass_rates.jsonl)))
.PHONY: curriculum
curriculum: $(READY) ## order rows by their pass rates into data/BLEND-ordered
#= BLEND=tiny EXP_NAME (of a run: its pass rates, not those of make profile)
#= ARGS="seed=1 low_effort.share=0.02"
	$(PYTHON) -m tools.curriculum.write --in data/$(or $(BLEND),tiny)/train-split.jsonl --out data/$(or $(BLEND),tiny)-ordered/train-split.jsonl $(PASS_RATES) $(ARGS)

.PHONY: lineage
lineage: $(READY) ## record splits and the newest export in artifacts/; print where they came from
#= EXP_NAME
	@$(PYTHON) -m tools.lineage.record --data $(patsubst %/,%,$(dir $(wildcard data/*/manifest.json))) $(if $(EXP_NAME),--run-dir '$(RESULTS_DIR)/$(EXP_NAME)') $(ARGS)

CHECKPOINT ?=
OUT ?=
.PHONY: export-hf
export-hf: $(READY) ## turn a checkpoint into a Hugging Face directory, on one process without a GPU
#= CHECKPOINT=results/RUN/checkpoints/step_000010 OUT=directory ARGS="--model DIR"
	@$(PYTHON) -m tools.export_hf --checkpoint $(or $(CHECKPOINT),$(error give CHECKPOINT=results/RUN/checkpoints/step_...)) --out $(or $(OUT),$(error give OUT=directory)) $(ARGS)

.PHONY: tiny
tiny: $(READY) ## make what SCALE=tiny needs: data/tiny and the SFT checkpoint models/tiny-sft
#= BLEND=wide (for the wide blend, and for stages 2.1, 2.2 and 3)
#= MODEL=nemotron-h|nemotron-dense|qwen3-moe (makes models/tiny-MODEL-sft)
	$(BEFORE)
	$(PYTHON) -m tools.tiny.prepare --models models --data data $(if $(BLEND),--blend $(BLEND)) $(if $(MODEL),--model $(MODEL))

##@ Images (with docker buildx, podman or buildah; DRY_RUN=1 prints the commands)
SANDBOX ?=
override SANDBOX := $(or $(SANDBOX),sandbox)
SQSH ?=
export SQSH
.PHONY: container
container: $(READY) ##* build the training image and import its packages inside
#= ENGINE BUILDER REGISTRY TAG PUSH=1 SQSH=FILE BUILD_FLAGS BASE
	@$(PYTHON) -m tools.images.build $(ENGINE)

.PHONY: swe-container
swe-container: $(READY) ## build the image of stage 2.2: a training image with Apptainer
#= APPTAINER_SHA256 BASE BUILDER REGISTRY TAG PUSH=1 SQSH=FILE
	@$(PYTHON) -m tools.images.build swe

.PHONY: sandbox
sandbox: $(READY) ## build the code sandbox: ours, or that of NeMo-Skills, which has Lean
#= SANDBOX=nemo-skills BUILDER REGISTRY TAG PUSH=1
	@$(PYTHON) -m tools.images.build $(SANDBOX)

.PHONY: sandbox-sqsh
sandbox-sqsh: $(READY) ## build the sandbox and import it with enroot for pyxis
#= SANDBOX=nemo-skills SQSH=build/sandbox.sqsh
	@SQSH='$(or $(SQSH),$(CURDIR)/build/$(SANDBOX).sqsh)' $(PYTHON) -m tools.images.build $(SANDBOX)

.PHONY: test-container
test-container: $(READY) ## build the image in which the tests run without a GPU
#= BUILDER REGISTRY TAG PUSH=1 BUILD_FLAGS
	@$(PYTHON) -m tools.images.build cpu_test

SIF_DIR ?=
ROWS ?=
ALL ?=
MIRROR ?=
SIF_BLEND = data/$(or $(BLEND),swe2)
SIF_ROWS = --rows $(or $(ROWS),$(addprefix $(SIF_BLEND)/,train-split.jsonl val-split.jsonl))
.PHONY: sif
sif: $(READY) ##* make the SIF image of every task of a blend; run it again to resume
#= SIF_DIR BLEND=swe2 | ROWS=FILE | ALL=1, MIRROR ARGS=--retry-failed
	@$(PYTHON) -m tools.sif.build --sif-dir $(or $(SIF_DIR),$(error give SIF_DIR=...)) $(if $(ALL),--all,$(SIF_ROWS)) $(if $(MIRROR),--mirror $(MIRROR)) $(ARGS)

.PHONY: sif-check
sif-check: $(READY) ## check that task images can run tests; write their rows to data/BLEND-good
#= SIF_DIR BLEND=swe2 | ROWS=FILE, ARGS=--golden
	@$(PYTHON) -m tools.sif.check --sif-dir $(or $(SIF_DIR),$(error give SIF_DIR=...)) $(SIF_ROWS) $(if $(ROWS),,--out $(SIF_BLEND)-good) $(ARGS)

##@ Looking at a run
.PHONY: status
status: $(READY) ##* say what a run is doing and who waits for whom
#= EXP_NAME (the newest run without it)
	@$(PYTHON) -m tools.watching.status --results '$(RESULTS_DIR)' $(if $(EXP_NAME),--exp-name $(EXP_NAME)) $(ARGS)

.PHONY: watch
watch: $(READY) ## follow a run until it ends, redrawn in a terminal
#= EXP_NAME
	@$(PYTHON) -m tools.watching.watch --results '$(RESULTS_DIR)' $(if $(EXP_NAME),--exp-name $(EXP_NAME))

.PHONY: report
report: $(READY) ##* write report.html of a run: curves, samples, provenance
#= EXP_NAME (the newest run without it)
	$(PYTHON) -m tools.report --run-dir '$(or $(RUN_DIR),$(error no run in $(RESULTS_DIR)/; start one, e.g. `make smoke`, or give EXP_NAME and RESULTS_DIR))'

RUN ?=
INSTANCE ?=
.PHONY: swe-replay
swe-replay: $(READY) ## show what agents did on an instance of stage 2.2, turn by turn
#= RUN=name of the run INSTANCE=instance_id
	@$(PYTHON) -m tools.report.replay --results '$(RESULTS_DIR)' --run '$(RUN)' --instance '$(INSTANCE)' $(ARGS)

SEEDS ?=
override SEEDS := $(or $(SEEDS),42 43 44)
ABLATE = $(PYTHON) -m tools.ablate --stage $(STAGE) --seeds "$(SEEDS)" $(if $(filter tiny,$(SCALE)),--set $(TINY_STEPS))
.PHONY: ablate
ablate: BEFORE = @$(ABLATE) --check $(ARGS)
ablate: $(if $(filter tiny,$(SCALE)),tiny,$(READY)) ## compare variants of a stage over seeds, on one page; run it again to resume
#= STAGE SCALE LAUNCHER SEEDS="42 43 44" EXP_NAME
#= ARGS="key=value,value ..." (without: configs/ablations.yaml)
	@$(ABLATE) $(ARGS)

.PHONY: bench
bench: ##* measure training, data tools, sandbox, verifiers, containers and job start
	@$(if $(ARGS),$(error ARGS: got $(ARGS), expected nothing; each part has its own options: give them to bench-train, bench-data, bench-sandbox, bench-verifiers, bench-swe or bench-launch))
	@$(MAKE) --no-print-directory bench-train bench-data bench-sandbox bench-verifiers bench-swe bench-launch

.PHONY: bench-train
bench-train: tiny ## measure asynchronous against synchronous training, and rollouts against vLLM
#= ARGS
	$(PYTHON) -m tools.bench $(ARGS)

.PHONY: bench-policy
bench-policy: $(READY) ## measure train step, weight push and save beside something plain
#= ARGS="--rounds 5 --steps 10 50 --pushes 1 50 300" (millions of parameters)
	$(PYTHON) -m tools.bench.policy $(ARGS)

.PHONY: bench-peer
bench-peer: tiny ## measure the tiny stage beside TRL's GRPOTrainer, installed to build/peer
#= ARGS
	$(PYTHON) -m tools.bench.peer $(ARGS)

AGENT ?=
override AGENT := $(or $(AGENT),mini-swe-agent)
.PHONY: swe-agent
swe-agent: $(READY) ## install an agent program that agent_framework names, to build/agents
#= AGENT=mini-swe-agent or openhands-ai (needs Python 3.12)
	@$(PYTHON) -m tools.setup.agent_programs $(AGENT)

.PHONY: bench-scale
bench-scale: $(READY) ## measure what a step of 4,096 rollouts costs, with engines that answer at random
#= ARGS="--ranks 2"
	$(PYTHON) -m tools.bench.scale $(ARGS)

.PHONY: bench-data
bench-data: $(READY) ## measure split, fill and validate beside cat, sha256sum, head and tail
#= ARGS="--rounds 5"
	$(PYTHON) -m tools.bench.data $(ARGS)

.PHONY: bench-sandbox
bench-sandbox: $(READY) ## measure how many programs a second the sandbox runs, beside plain processes
#= ARGS="--programs 400"
	$(PYTHON) -m tools.bench.sandbox $(ARGS)

.PHONY: bench-swe
bench-swe: $(READY) ## measure how soon task containers start, and what agents cost beside the model
#= ARGS="--containers 200 --agents 16"
	$(PYTHON) -m tools.bench.swe $(ARGS)

.PHONY: bench-verifiers
bench-verifiers: $(READY) ## measure verdicts a second of each environment: function, process, HTTP
#= ARGS="--names mcqa --count 4096"
	$(PYTHON) -m tools.bench.verifiers $(ARGS)

.PHONY: bench-launch
bench-launch: $(READY) ## measure how soon the driver of a job starts, on a throw-away Slurm
#= ARGS="--starts 5"
	@tools/setup/test_tools.sh
	PYTHONPATH=.:tests/functional $(PYTHON) -m slurm.bench $(ARGS)

.PHONY: serve-env
serve-env: $(READY) ## serve one verifier over HTTP
#= NAME=mcqa PORT=5000
	$(PYTHON) -m tools.serve_env --name $(or $(NAME),mcqa) --port $(PORT) $(ARGS)

.PHONY: agent-check
agent-check: $(READY) ## run one task with an agent and show what would be trained
#= URL=http://127.0.0.1:8000
	$(PYTHON) -m tools.agent_check $(if $(URL),--url $(URL),--command "$(or $(CMD),$(error give URL=http://host:port or CMD=program))") $(ARGS)

.PHONY: env-check
env-check: $(READY) ## try an environment with right, wrong and dishonest answers
#= NAME=mcqa (all environments without it), or URL=http://host:port DATA=rows.jsonl
	@$(PYTHON) -m tools.env_check $(if $(NAME),--name $(NAME)) $(if $(URL),--url $(URL)) $(if $(DATA),--data $(DATA)) $(ARGS)

##@ Development
.PHONY: lint
lint: $(READY) ## run ruff, mypy, shellcheck, shfmt, hadolint, yamllint and check the overlays
	@tools/setup/lint.sh

.PHONY: fix
fix: $(READY) ## let ruff and shfmt correct what they can
	@tools/setup/lint.sh --fix

.PHONY: test
test: lint-and-unit test-functional ##* run what CI runs: lint, unit tests, functional tests

.PHONY: lint-and-unit
lint-and-unit: $(READY) ## run lint beside the unit tests
	+@$(MAKE) --no-print-directory -j2 lint test-unit

.PHONY: test-unit
test-unit: $(READY) ## run the pure tests and those of the shell scripts
#= ARGS
	$(PYTHON) -m pytest -m 'not functional and not gpu and not slow' --ignore tests/functional --ignore tests/gpu \
	  -n 3 --dist worksteal --durations 10 $(ARGS)

.PHONY: test-functional
test-functional: $(READY) ## run the tests that start something real: Ray, vLLM, Megatron, Slurm, ...
#= ARGS
	@tools/setup/test_tools.sh
	$(PYTHON) -m pytest -m 'functional and not gpu and not slow' -n 3 --dist loadfile --no-loadscope-reorder --durations 40 $(ARGS)

.PHONY: test-gpu
test-gpu: $(READY) ## run the tests of one GPU and print what they measured; see tests/gpu/conftest.py
#= ARGS
	$(PYTHON) -m pytest tests/gpu -m gpu $(ARGS)

# OpenHands needs another Python. Where it cannot be installed, its test fails and names the command; the others run.
.PHONY: test-all
test-all: lint swe-agent ## run every test, also those that take hours: long matrices, many kills, mutations
#= ARGS
	-@$(MAKE) --no-print-directory swe-agent AGENT=openhands-ai
	@tools/setup/test_tools.sh
	$(PYTHON) -m pytest -m 'not gpu' -n 2 --dist loadfile --no-loadscope-reorder --durations 40 $(ARGS) \
	  && $(PYTHON) -m tests.mutation

.PHONY: clean
clean: ## remove caches and build outputs; never data, models or results
	rm -rf build .mypy_cache .pytest_cache .ruff_cache super_rl_recipe.egg-info
	find recipes tools tests -name __pycache__ -prune -exec rm -rf {} +
