# Reproduce the recipe: one target per stage. `make` prints the targets for daily use, `make help-all` all of them.
#
# A target's line ends with its help: `##` for `make help-all`, `##*` for `make` as well. `#=` names its variables.
MAKEFLAGS += --no-builtin-rules --warn-undefined-variables
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# What and where, as in `make stage1.1 SCALE=tiny LAUNCHER=local`. The launcher reads these and the variables of
# tools/draft/contract.py from the environment; what is empty here counts as not given.
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
DETERMINISM ?=
WITH ?=
CHECKPOINT ?=
CONFIG_PATH ?=
DIFF ?=
FILE ?=
BASE ?=
DATA ?=
BLEND ?=
ROWS ?=
REWARD ?=
EXTRA_MOUNTS ?=
FIELDS ?=
MODEL_PATH ?=
VAL_ROWS ?=
TEST_ROWS ?=
SAMPLE ?=
# Under WSL the environment has a NAME, that of the machine: only one that is given to make counts.
NAME := $(if $(filter command,$(origin NAME)),$(NAME))
URL ?=
CMD ?=
PORT ?=
# A misspelt variable would be ignored: what is given to make is named in this file or in the launcher's contract, and
# in the `#=` lines of a target that is made ("a launch" stands for that contract, "an image" for tools/images).
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(if $(strip $($(name))),$(name))))
SCALE_GIVEN := $(SCALE)
override SCALE := $(or $(SCALE),prod)
override PLATFORM := $(or $(PLATFORM),h100)
override ENGINE := $(or $(ENGINE),native)
override RESULTS_DIR := $(or $(RESULTS_DIR),results)
override STAGE := $(or $(STAGE),stage1.1)
override PORT := $(or $(PORT),5000)
export SCALE PLATFORM LAUNCHER CLUSTER ENV_TOML ENGINE SEED EXP_NAME DRY_RUN RESULTS_DIR
# W&B refuses a mode that is there and empty.
$(if $(WANDB_MODE),$(eval export WANDB_MODE),$(eval unexport WANDB_MODE))

NAMED = $(shell grep -ohE '[A-Z][A-Z0-9_]+' $(MAKEFILE_LIST) tools/draft/contract.py tools/images/*.py)
UNREAD := $(if $(GIVEN),$(filter-out $(NAMED),$(GIVEN)))
$(if $(UNREAD),$(error got $(UNREAD), which nothing here reads; expected variables of the Makefile or of \
tools/draft/contract.py: correct the name, or put it before `make` when a program that is started reads it))
ALL_STAGES := stage1.1 stage1.2 stage1.3 stage2.1 stage2.2 stage3 stage4 mopd nano-rl nano-dpo
# What a target reads is in its `#=` lines; a sub-make has the variables of all targets of the command.
READS_OF = $(shell awk -v target='$(if $(filter stage% $(ALL_STAGES),$(1)),stage1.1,$(1))' '/^[a-z0-9._-]+:.*##/ { is_it = index($$0, target ":") == 1 } \
  is_it && /^#=/' $(firstword $(MAKEFILE_LIST)))
LAUNCH_NAMES = $(if $(findstring a launch,$(1)),tools/draft/contract.py) $(if $(findstring an image,$(1)),tools/images/*.py)
READ_BY = PYTHON VENV $(shell echo '$(if $(findstring a launch,$(1)),WANDB_MODE) $(subst ','"'"',$(1))' | cat - $(LAUNCH_NAMES) /dev/null | grep -ohE '[A-Z][A-Z0-9_]+')
ifeq ($(MAKELEVEL),0)
IDLE := $(if $(GIVEN),$(if $(MAKECMDGOALS),$(filter-out $(foreach goal,$(MAKECMDGOALS),$(call READ_BY,$(call READS_OF,$(goal)))),$(GIVEN))))
$(if $(IDLE),$(error got $(IDLE), which `make $(MAKECMDGOALS)` does not read; leave it out: `make help-all` lists \
what each target reads))
endif

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.synced
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

$(READY): containers/requirements-cpu.lock pyproject.toml
	@VENV='$(CURDIR)/$(VENV)' tools/dev/setup.sh

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
# A real language model has rows, sizes and steps of its own, and learns less in them.
ENGLISH = $(filter smollm2,$(MODEL))
SMOKE_MODEL = $(if $(ENGLISH),MODEL_PATH=$(CURDIR)/models/smollm2 CONFIG_PATH=configs/tiny/smollm2.yaml \
TRAIN_PATH=$(CURDIR)/data/english/train-split.jsonl VAL_PATH=$(CURDIR)/data/english/val-split.jsonl,\
MODEL_PATH=$(CURDIR)/models/tiny-$(MODEL)-sft)
SMOKE_GAIN = $(if $(ENGLISH),0.15,0.25)

# The tasks of the tiny blend are learned in so many steps, which stages 1.1 to 1.3 share when they run one by one.
TINY_STEPS := grpo.max_num_steps=40
SMOKE = SCALE=tiny LAUNCHER=local SEED=$(SMOKE_SEED) EXP_NAME=$(SMOKE_RUN) $(SMOKE_MODEL) ./super_launch.sh
# One order of everything that is summed: no batch and no version of the weights then depends on a clock.
EXACT = $(if $(DETERMINISM),$(if $(filter full,$(DETERMINISM)),policy.determinism=full \
grpo.async_grpo.max_trajectory_age_steps=0 policy.generation.vllm_kwargs.max_num_seqs=1 \
policy.generation.vllm_cfg.enable_prefix_caching=false,$(error got DETERMINISM=$(DETERMINISM), expected full)))
SMOKE_WORDS = $(if $(ENGLISH),,$(TINY_STEPS)) $(LAYOUT_ARGS) $(EXACT) $(ARGS)
# What `tiny` runs first for a target that trains afterwards: a wrong input is said before the warm-up, not after it.
BEFORE :=

.PHONY: smoke
smoke: MODEL := $(or $(MODEL),nemotron-h)
smoke: BEFORE = @$(SMOKE) --check stage1.1 $(SMOKE_WORDS)
smoke: tiny ##* train stage 1.1 with a tiny model on this machine and show what it learned
#= SEED=42 MODEL=nemotron-h|nemotron-dense|qwen3|qwen3-moe ARGS="key=value ..."
#= MODEL=smollm2 (a real language model, fetched; takes half an hour)
#= TP=2 | DP=2 | EP=2 (two processes train)
#= EXP_NAME RESULTS_DIR WANDB=1|offline WANDB_MODE
#= DETERMINISM=full (a run that can be repeated bit for bit)
	$(SMOKE) stage1.1 $(SMOKE_WORDS)
	$(PYTHON) -m tools.look.report --run-dir '$(RESULTS_DIR)/$(SMOKE_RUN)' --min-gain $(SMOKE_GAIN)
	$(PYTHON) -m tools.tiny.check_gain --run-dir '$(RESULTS_DIR)/$(SMOKE_RUN)' --min-gain $(SMOKE_GAIN)

.PHONY: try
try: $(READY) ##* train your model on your rows and reward, all in one; run it again to resume
#= MODEL=smollm2|directory|org/name DATA=my.jsonl|org/name REWARD=my_reward.py
#= FIELDS="question=q" CONFIG_PATH (else what fits this machine), RESULTS_DIR ARGS
	@$(PYTHON) -m tools.launch.try_own --model '$(MODEL)' --data '$(DATA)' --reward '$(REWARD)' --fields '$(FIELDS)' \
	  --config '$(CONFIG_PATH)' --results '$(RESULTS_DIR)' $(ARGS)

DRY = $(filter-out false 0 no,$(DRY_RUN))
# At scale tiny on this machine rules judge the wide blend, as long as the command runs.
JUDGED = $(if $(filter tiny/local/wide,$(SCALE)/$(LAUNCHER)/$(BLEND)),$(PYTHON) -m tools.tiny.rule_judge --)
# On this machine a tiny chain first makes its rows, its images and its start weights, where they are not there yet.
CHAIN_MAKES = $(if $(filter tiny/local/,$(SCALE)/$(LAUNCHER)/$(MODEL_PATH)),$(PYTHON) -m tools.tiny.prepare \
--models models --data data $(if $(filter wide,$(BLEND)),--blend wide) --stages '$(STAGES)')

PIPELINE = $(PYTHON) -m tools.launch.pipeline --stages "$(STAGES)" $(if $(and $(DRY),$(CHAIN_MAKES)),--first "$(CHAIN_MAKES)")

COMMA := ,
# Rows of your own become data/own-NAME before a launch, beside a copy of the reward that scores them.
OWN = data/own-$(basename $(notdir $(subst @,-,$(subst :,-,$(ROWS)))))
OWN_REWARD = $(OWN)/reward-$(shell sha256sum '$(REWARD)' | cut -c1-12).py
OWN_IMPORT = $(PYTHON) -m tools.data.import_rows --rows '$(or $(ROWS),$(error give ROWS=my.jsonl))' --out '$(OWN)' \
$(if $(REWARD),--reward '$(REWARD)') $(if $(FIELDS),--fields $(FIELDS))
OWN_TRY = $(PYTHON) -m tools.environments.try_reward --reward '$(OWN_REWARD)' --rows '$(OWN)/train-split.jsonl'
OWN_LAUNCH = TRAIN_PATH='$(CURDIR)/$(OWN)/train-split.jsonl' VAL_PATH='$(CURDIR)/$(OWN)/val-split.jsonl' \
EXP_NAME='$(or $(EXP_NAME),$@-$(notdir $(OWN))-$(SCALE))' \
$(if $(filter local,$(LAUNCHER)),,EXTRA_MOUNTS='$(CURDIR)/$(OWN):$(CURDIR)/$(OWN)$(addprefix $(COMMA),$(EXTRA_MOUNTS))')
OWN_WORDS = $(if $(REWARD),env.nemo_gym.reward.resources_servers.reward.file='$(CURDIR)/$(OWN_REWARD)')
# A reward that pays everything alike is said, and is the user's to judge (status 1); one that fails ends it (2).
OWN_FIRST = $(OWN_IMPORT) $(if $(REWARD),&& { $(OWN_TRY) || [ $$? = 1 ]; }) $(if \
$(filter tiny/local/,$(SCALE)/$(LAUNCHER)/$(MODEL_PATH)),&& $(PYTHON) -m tools.tiny.prepare --models models --data data)

##@ Stages (on Slurm; on this machine with LAUNCHER=local; DRY_RUN=1 prints the command)
.PHONY: $(ALL_STAGES) pipeline
$(ALL_STAGES) pipeline doctor: export BLEND := $(BLEND)
stage1.1: ##* run stage 1.1: RLVR, blend 1 (rlvr1); the others are stage1.2 to stage4
#= SCALE=prod|small|tiny PLATFORM=h100|b200 LAUNCHER=slurm|local ENGINE=native|nemo_rl
#= CLUSTER=profile MODEL_PATH SEED EXP_NAME DRY_RUN=1 ARGS="key=value ..."
#= DETERMINISM=full (a run that can be repeated bit for bit)
#= BLEND=wide (at scale tiny), SPARE_NODES=2, and the variables of a launch
#= your own: ROWS=my.jsonl REWARD=my_reward.py FIELDS="question=q"
stage1.2: ## RLVR, blend 2 (rlvr2)
stage1.3: ## RLVR, blend 3 (rlvr3)
stage2.1: ## software engineering, single-step edits (swe1)
stage2.2: ## software engineering, whole instances in containers (swe2)
stage3: ## RLHF with a generative reward model (rlhf)
stage4: ## MTP healing: the multi-token heads learn the policy's answers (healing)
mopd: ## a student learns from several teachers (distillation), at scale tiny
nano-rl: ## Nemotron 3 Nano: one stage of GRPO (nano3-grpo); in a pipeline only by its name
nano-dpo: ## DPO against calls of tools that do not exist, after nano-rl (nano3-dpo)
$(ALL_STAGES): $(READY)
	@$(if $(ROWS),$(if $(DRY),echo "first: make data-import ROWS=$(ROWS) REWARD=$(REWARD)" >&2,$(OWN_FIRST)),$(if $(REWARD),$(error REWARD scores the rows of ROWS: give ROWS=my.jsonl)))
	@$(JUDGED) $(if $(ROWS),$(OWN_LAUNCH)) ./super_launch.sh $@ $(if $(ROWS),$(OWN_WORDS)) $(EXACT) $(ARGS)

stage%: $(READY) # the launcher answers a stage that does not exist with the names of those that do
	@./super_launch.sh $@ $(ARGS)

pipeline: $(READY) ##* run all stages in order, each from its parent's export; run it again to resume
#= STAGES="stage1.1 stage2.1" MODEL_PATH BLEND SCALE PLATFORM, those of a launch
#= ARGS=--report (only the page about the chain)
	@$(if $(CHAIN_MAKES),$(if $(DRY),,$(PIPELINE) --check $(ARGS) && $(CHAIN_MAKES)))
	@$(JUDGED) $(PIPELINE) $(ARGS)

.PHONY: doctor
doctor: $(READY) ##* report every problem of a planned launch, each with a code and a fix
#= STAGE SCALE PLATFORM BLEND ARGS=--json, and the variables of a launch
	@$(JUDGED) $(PYTHON) -m tools.doctor --stage $(STAGE) $(ARGS)

.PHONY: plan
plan: $(READY) ##* print nodes, memory per GPU, step time and GPU-hours of a stage
#= STAGE SCALE PLATFORM MODEL_PATH ARGS, and the variables of a launch
	@$(PYTHON) -m tools.sizing.planner --stage $(STAGE) --scale $(SCALE) --platform $(PLATFORM) $(ARGS)

.PHONY: rehearse
rehearse: $(READY) ##* build a stage's model at full size without memory, and bring its nodes up
#= STAGE SCALE PLATFORM MODEL_PATH ARGS, and the variables of a launch
	@$(PYTHON) -m tools.dev.rehearse --stage $(STAGE) --scale $(SCALE) --platform $(PLATFORM) $(ARGS)

.PHONY: launch-golden
launch-golden: $(READY) ## update the recorded commands of every stage in tests/golden/launch
	$(PYTHON) -m tools.dev.golden --write tests/golden/launch

.PHONY: stages
stages: $(READY) ## print the stage table with its sizes; update the README's copy
	@$(PYTHON) -m tools.dev.stage_table --write README.md

.PHONY: config
config: $(READY) ##* print a stage's configuration and which file set each value
#= STAGE SCALE PLATFORM, or FILE=overlay.yaml; ENGINE DIFF=stage ARGS="key=value ..."
#= NEMO_RL_DIR (with ENGINE=nemo_rl, a checkout whose keys count)
	@$(PYTHON) -m tools.show_config $(if $(FILE),--file $(FILE),--stage $(STAGE)) --scale $(SCALE) --platform $(PLATFORM) --engine $(ENGINE) $(if $(DIFF),--diff $(DIFF)) $(ARGS)

.PHONY: config-import
config-import: $(READY) ## turn a NeMo RL stage file into an overlay, on standard output
#= FILE=their.yaml BASE=stage2.2 ARGS
	@$(PYTHON) -m tools.draft.nemo_rl.import_file --file $(or $(FILE),$(error give FILE=their.yaml)) $(if $(BASE),--base $(BASE)) $(ARGS)

UPSTREAM ?=
.PHONY: drift
drift: $(READY) ## compare published stage files with ours; a difference needs a reason
#= UPSTREAM=checkout of NeMo RL, NeMo Gym or Nemotron
	@$(PYTHON) -m tools.draft.nemo_rl.drift --upstream '$(or $(UPSTREAM),$(error give UPSTREAM=checkout))'

.PHONY: config-docs
config-docs: $(READY) ## write the reference of all configuration keys to build/configuration.md
	$(PYTHON) -m tools.dev.docs --write build/configuration.md

.PHONY: config-keys
config-keys: $(READY) ## write schema.json and the comments of grpo_base.yaml from recipes/config/tree
	$(PYTHON) -m tools.dev.keys

.PHONY: config-golden
config-golden: $(READY) ## update the recorded configurations in tests/golden/config
	$(PYTHON) -m tools.show_config --update-golden

##@ Inputs
.PHONY: data
data: $(READY) ##* download, check, fill and split a blend; without BLEND make the tiny rows
#= BLEND=rlvr1 VAL_ROWS=100 TEST_ROWS, SAMPLE=200 (first rows, to data/rlvr1-sample200)
#= HF_HOME ARGS="--stratify agent"
ifeq ($(BLEND),)
	$(PYTHON) -m tools.tiny.prepare --data data $(if $(VAL_ROWS)$(TEST_ROWS)$(SAMPLE),$(error VAL_ROWS, TEST_ROWS, SAMPLE: the tiny rows are split as they are made; give a BLEND with it, such as BLEND=rlvr1)) $(ARGS)
else
	$(PYTHON) -m tools.data.prepare --blend $(BLEND) --data data --val-rows $(or $(VAL_ROWS),100) $(addprefix --test-rows ,$(TEST_ROWS)) $(addprefix --sample ,$(SAMPLE)) $(ARGS)
endif

.PHONY: fetch
fetch: $(READY) ## fetch a model, or rows, by name on the hub into its cache
#= MODEL_PATH=org/name@REVISION ROWS=org/name:FOLDER HF_HOME HF_ENDPOINT
	@$(PYTHON) -m tools.data.files.fetch $(if $(MODEL_PATH),--model '$(MODEL_PATH)') $(if $(ROWS),--rows '$(ROWS)')

.PHONY: side-files
side-files: $(READY) ## download what verifiers read besides rows, as `make data` does
#= NAME=genrm_compare ARGS
	$(PYTHON) -m tools.data.side_files --out data/side_files $(addprefix --name ,$(NAME)) $(ARGS)

.PHONY: data-import
data-import: $(READY) ## make rows of your own ready for training, and say what became of each column
#= ROWS=my.jsonl|org/name REWARD=my_reward.py FIELDS="question=q" ARGS="--agent NAME"
	@$(OWN_IMPORT) $(ARGS)

.PHONY: data-validate
data-validate: $(READY) ## check every row of a blend's splits: shape, agents, duplicates, contamination
#= BLEND=tiny ARGS="--others data/rlvr1 key=value ..."
	$(PYTHON) -m tools.data.rows.validate --data data/$(or $(BLEND),tiny) --problems data/$(or $(BLEND),tiny)/problems.jsonl $(ARGS)

.PHONY: data-report
data-report: $(READY) ## count rows, lengths and pass rates per agent; write data/BLEND/report.html
#= BLEND=tiny ARGS="--tokenizer DIR"
	$(PYTHON) -m tools.data.rows.report --data data/$(or $(BLEND),tiny) --out data/$(or $(BLEND),tiny)/report.html $(ARGS)

# The model that is there by default is a tiny one, and so is then the scale.
.PHONY: profile
profile: override SCALE := $(or $(SCALE_GIVEN),$(if $(MODEL_PATH),prod,tiny))
profile: $(READY) ## record how often a checkpoint solves each training row; run it again to resume
#= BLEND=tiny MODEL_PATH STAGE SCALE PLATFORM RESULTS_DIR ARGS
	$(PYTHON) -m tools.data.curriculum.profile --stage $(STAGE) --model $(or $(MODEL_PATH),models/tiny-nemotron-h-sft) --data data/$(or $(BLEND),tiny)/train-split.jsonl --run-dir '$(RESULTS_DIR)/profile-$(or $(BLEND),tiny)' $(ARGS)

SAMPLES ?= 8
BASELINE ?=
ASKED = $(if $(URL),--url '$(URL)' $(if $(MODEL),--served '$(MODEL)') $(if $(CHECKPOINT),'$(CHECKPOINT)'),'$(or \
$(CHECKPOINT),$(RUN_DIR),$(error give CHECKPOINT=results/EXP_NAME, or the URL of an engine))') --stage $(STAGE) $(if \
$(CONFIG_PATH),--config '$(CONFIG_PATH)')
.PHONY: eval
eval chat: override SCALE := $(or $(SCALE_GIVEN),tiny)
eval: $(READY) ##* measure a checkpoint, and what it was trained from, on rows: pass@k with intervals
#= CHECKPOINT=results/EXP_NAME|directory|org/name BASELINE=directory|org/name SAMPLES=8
#= or URL=http://host:8000/v1 MODEL=name (of any engine with OpenAI's chat completions)
#= DATA=rows.jsonl CONFIG_PATH (without them those of the run), STAGE SCALE PLATFORM ARGS
#= RESULTS_DIR
	@$(PYTHON) -m tools.data.curriculum.evaluate $(ASKED) --samples $(SAMPLES) --results '$(RESULTS_DIR)' \
	  $(if $(BASELINE),--baseline '$(BASELINE)') $(if $(DATA),--data '$(DATA)') $(ARGS)

.PHONY: chat
chat: $(READY) ## talk to a checkpoint, line by line
#= CHECKPOINT=results/EXP_NAME (or a model), CONFIG_PATH ARGS="--temperature 0"
#= STAGE SCALE PLATFORM RESULTS_DIR
	@$(if $(CHECKPOINT),$(PYTHON) -m tools.data.files.fetch --model '$(CHECKPOINT)' >/dev/null)
	@$(PYTHON) -m tools.look.chat $(ASKED) $(ARGS)

PASS_RATES = $(addprefix --pass-rates ,$(if $(EXP_NAME),$(RESULTS_DIR)/$(EXP_NAME)/pass_rates.jsonl,$(wildcard \
$(RESULTS_DIR)/profile-$(or $(BLEND),tiny)/pass_rates.jsonl)))
.PHONY: curriculum
curriculum: $(READY) ## order rows by their pass rates into data/BLEND-ordered
#= BLEND=tiny EXP_NAME (of a run: its pass rates, not those of make profile)
#= RESULTS_DIR ARGS="seed=1 low_effort.share=0.02"
	$(PYTHON) -m tools.data.curriculum.write --in data/$(or $(BLEND),tiny)/train-split.jsonl --out data/$(or $(BLEND),tiny)-ordered/train-split.jsonl $(PASS_RATES) $(ARGS)

.PHONY: lineage
lineage: $(READY) ## record splits and the newest export in artifacts/; print where they came from
#= EXP_NAME RESULTS_DIR ARGS
	@$(PYTHON) -m tools.data.lineage.record --data $(patsubst %/,%,$(dir $(wildcard data/*/manifest.json))) $(if $(EXP_NAME),--run-dir '$(RESULTS_DIR)/$(EXP_NAME)') $(ARGS)

.PHONY: verify-checkpoint
verify-checkpoint: $(READY) ## read every file of a checkpoint and compare it with its checksum
#= CHECKPOINT=results/RUN/checkpoints/step_000010
	@$(PYTHON) -m tools.verify_checkpoint --checkpoint $(or $(CHECKPOINT),$(error give CHECKPOINT=results/RUN/checkpoints/step_...))

OUT ?=
.PHONY: export-hf
export-hf: $(READY) ## turn a checkpoint into a Hugging Face directory, on one process without a GPU
#= CHECKPOINT=results/RUN/checkpoints/step_000010 OUT=directory ARGS="--model DIR"
	@$(PYTHON) -m tools.export_hf --checkpoint $(or $(CHECKPOINT),$(error give CHECKPOINT=results/RUN/checkpoints/step_...)) --out $(or $(OUT),$(error give OUT=directory)) $(ARGS)

.PHONY: tiny
tiny: $(READY) ## make what SCALE=tiny needs: data/tiny and an SFT checkpoint, models/tiny-MODEL-sft
#= BLEND=wide (for the wide blend, and for stages 2.1, 2.2 and 3: models/tiny-wide-sft)
#= BLEND=tools (for nano-rl and nano-dpo: models/tiny-tools-sft)
#= BLEND=teachers (for mopd: models/tiny-teacher-...)
#= MODEL=nemotron-h|nemotron-dense|qwen3|qwen3-moe|smollm2
	$(BEFORE)
	$(PYTHON) -m tools.tiny.prepare --models models --data data $(if $(BLEND),--blend $(BLEND)) $(if $(MODEL),--model $(MODEL))

##@ Images (with docker buildx, podman or buildah; DRY_RUN=1 prints the commands)
SANDBOX ?=
override SANDBOX := $(or $(SANDBOX),sandbox)
SQSH ?=
export SQSH
.PHONY: container
container: $(READY) ##* build the training image and import its packages inside
#= ENGINE BUILDER REGISTRY TAG PUSH=1 SQSH=FILE BUILD_FLAGS BASE DRY_RUN
#= and the variables of an image (VLLM_VERSION, ...)
	@$(PYTHON) -m tools.images.build $(ENGINE)

.PHONY: swe-container
swe-container: $(READY) ## build the image of stage 2.2: a training image with Apptainer
#= APPTAINER_SHA256 BASE BUILDER REGISTRY TAG PUSH=1 SQSH=FILE DRY_RUN, those of an image
	@$(PYTHON) -m tools.images.build swe

.PHONY: sandbox
sandbox: $(READY) ## build the code sandbox: ours, or that of NeMo-Skills, which has Lean
#= SANDBOX=nemo-skills BUILDER REGISTRY TAG PUSH=1 DRY_RUN, those of an image
	@$(PYTHON) -m tools.images.build $(SANDBOX)

.PHONY: sandbox-sqsh
sandbox-sqsh: $(READY) ## build the sandbox and import it with enroot for pyxis
#= SANDBOX=nemo-skills SQSH=build/sandbox.sqsh DRY_RUN, those of an image
	@SQSH='$(or $(SQSH),$(CURDIR)/build/$(SANDBOX).sqsh)' $(PYTHON) -m tools.images.build $(SANDBOX)

.PHONY: test-container
test-container: $(READY) ## build the image in which the tests run without a GPU
#= BUILDER REGISTRY TAG PUSH=1 BUILD_FLAGS DRY_RUN, those of an image
	@$(PYTHON) -m tools.images.build cpu_test

SIF_DIR ?=
ALL ?=
MIRROR ?=
SIF_BLEND = data/$(or $(BLEND),swe2)
SIF_ROWS = --rows $(or $(ROWS),$(addprefix $(SIF_BLEND)/,train-split.jsonl val-split.jsonl))
.PHONY: sif
sif: $(READY) ##* make the SIF image of every task of a blend; run it again to resume
#= SIF_DIR BLEND=swe2 | ROWS=FILE | ALL=1, MIRROR HF_HOME ARGS=--retry-failed
	@$(PYTHON) -m tools.task_images.build --sif-dir $(or $(SIF_DIR),$(error give SIF_DIR=...)) $(if $(ALL),--all,$(SIF_ROWS)) $(if $(MIRROR),--mirror $(MIRROR)) $(ARGS)

.PHONY: sif-check
sif-check: $(READY) ## check that task images can run tests; write their rows to data/BLEND-good
#= SIF_DIR BLEND=swe2 | ROWS=FILE, ARGS=--golden
	@$(PYTHON) -m tools.task_images.check --sif-dir $(or $(SIF_DIR),$(error give SIF_DIR=...)) $(SIF_ROWS) $(if $(ROWS),,--out $(SIF_BLEND)-good) $(ARGS)

##@ Looking at a run
.PHONY: status
status: $(READY) ##* say what a run is doing and who waits for whom
#= EXP_NAME (the newest run without it), RESULTS_DIR ARGS=--json
	@$(PYTHON) -m tools.look.status --results '$(RESULTS_DIR)' $(if $(EXP_NAME),--exp-name $(EXP_NAME)) $(ARGS)

.PHONY: why
why: $(READY) ## say why a run does not learn, and which key to change
#= EXP_NAME (the newest run without it), RESULTS_DIR
	@$(PYTHON) -m tools.look.why --results '$(RESULTS_DIR)' $(if $(EXP_NAME),--exp-name $(EXP_NAME))

.PHONY: watch
watch: $(READY) ## follow a run until it ends, redrawn in a terminal
#= EXP_NAME RESULTS_DIR
	@$(PYTHON) -m tools.look.watch --results '$(RESULTS_DIR)' $(if $(EXP_NAME),--exp-name $(EXP_NAME))

.PHONY: report
report: $(READY) ##* write report.html of a run: curves, samples, provenance; rollouts.html
#= EXP_NAME (the newest run without it), RESULTS_DIR
	$(PYTHON) -m tools.look.report --run-dir '$(or $(RUN_DIR),$(error no run in $(RESULTS_DIR)/; start one, e.g. `make smoke`, or give EXP_NAME and RESULTS_DIR))'

.PHONY: compare
compare: $(READY) ## compare two runs bit for bit; those with DETERMINISM=full are equal
#= EXP_NAME WITH (names of two runs), RESULTS_DIR
	@$(PYTHON) -m tools.look.compare '$(RESULTS_DIR)/$(or $(EXP_NAME),$(error give EXP_NAME and WITH, the names of two runs))' \
	  '$(RESULTS_DIR)/$(or $(WITH),$(error give WITH, the name of the other run))'

INSTANCE ?=
.PHONY: swe-replay
swe-replay: $(READY) ## show what agents did on an instance of stage 2.2, turn by turn
#= EXP_NAME (the newest run without it), INSTANCE=instance_id RESULTS_DIR ARGS
	@$(PYTHON) -m tools.look.report.replay --results '$(RESULTS_DIR)' --run '$(or $(EXP_NAME),$(notdir $(RUN_DIR)))' --instance '$(INSTANCE)' $(ARGS)

SEEDS ?=
override SEEDS := $(or $(SEEDS),42 43 44)
ABLATE = $(PYTHON) -m tools.launch.ablate --stage $(STAGE) --seeds "$(SEEDS)" $(if $(filter tiny,$(SCALE)),--set $(TINY_STEPS))
.PHONY: ablate
ABLATE_STARTS = $(if $(DRY)$(filter --check --page,$(ARGS)),,$(filter tiny,$(SCALE)))
ablate: BEFORE = @$(ABLATE) --check $(ARGS)
ablate: $(if $(ABLATE_STARTS),tiny,$(READY)) ## compare variants of a stage over seeds, on one page; run it again to resume
#= STAGE SCALE LAUNCHER SEEDS="42 43 44" EXP_NAME, and the variables of a launch
#= ARGS="key=value,value ..." (without: configs/ablations.yaml), or ARGS=--check
	@$(ABLATE) $(ARGS)

.PHONY: bench
bench: ##* measure training, data tools, sandbox, verifiers, containers and job start
#= no ARGS: each part has its own
	@$(if $(ARGS),$(error ARGS: got $(ARGS), expected nothing; each part has its own options: give them to bench-train, bench-data, bench-sandbox, bench-verifiers, bench-swe or bench-launch))
	@$(MAKE) --no-print-directory bench-train bench-data bench-sandbox bench-verifiers bench-swe bench-launch

bench-train bench-peer: MODEL := qwen3
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
	@$(PYTHON) -m tools.dev.agent_programs $(AGENT)

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
	@tools/dev/test_tools.sh
	PYTHONPATH=.:tests/functional $(PYTHON) -m slurm.bench $(ARGS)

.PHONY: serve-env
serve-env: $(READY) ## serve one verifier over HTTP
#= NAME=mcqa PORT=5000 ARGS
	$(PYTHON) -m tools.environments.serve_env --name $(or $(NAME),mcqa) --port $(PORT) $(ARGS)

.PHONY: agent-check
agent-check: $(READY) ## run one task with an agent and show what would be trained
#= URL=http://127.0.0.1:8000 or CMD=program, ARGS
	$(PYTHON) -m tools.environments.agent_check $(if $(URL),--url $(URL),--command "$(or $(CMD),$(error give URL=http://host:port or CMD=program))") $(ARGS)

.PHONY: env-check
env-check: $(READY) ## try an environment with right, wrong and dishonest answers
#= NAME=mcqa (all environments without it), or URL=http://host:port DATA=rows.jsonl; ARGS
	@$(PYTHON) -m tools.environments.check $(if $(NAME),--name $(NAME)) $(if $(URL),--url $(URL)) $(if $(DATA),--data $(DATA)) $(ARGS)

.PHONY: try-reward
try-reward: $(READY) ## show what a reward of your own pays right, empty, echoed, foreign and long answers
#= ROWS=my.jsonl REWARD=my_reward.py FIELDS ARGS="--count 12"
	@$(if $(REWARD),$(OWN_IMPORT) && $(OWN_TRY) $(ARGS),$(error give REWARD=my_reward.py ROWS=my.jsonl))

##@ Development
.PHONY: lint
lint: $(READY) ## run ruff, mypy, shellcheck, shfmt, hadolint, yamllint and check the overlays
	@tools/dev/lint.sh

.PHONY: fix
fix: $(READY) ## let ruff and shfmt correct what they can
	@tools/dev/lint.sh --fix

.PHONY: test
test: lint-and-unit test-promises ##* run lint, unit tests, and one functional test of each promise

.PHONY: lint-and-unit
lint-and-unit: $(READY) ## run lint beside the unit tests
	+@$(MAKE) --no-print-directory -j2 lint test-unit

.PHONY: test-unit
test-unit: $(READY) ## run the pure tests and those of the shell scripts
#= ARGS
	$(PYTHON) -m pytest -m 'not functional and not gpu and not slow' --ignore tests/functional --ignore tests/gpu \
	  -n 3 --dist worksteal --durations 10 $(ARGS)

FUNCTIONAL = $(PYTHON) -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 40

.PHONY: test-promises
test-promises: $(READY) ## run one functional test of each promise (it learns, resumes, ...)
#= ARGS
	@tools/dev/test_tools.sh
	$(FUNCTIONAL) -m 'promise and not slow' $(ARGS)

.PHONY: test-more
test-more: $(READY) ## run all other tests that start something real (half an hour)
#= ARGS
	@tools/dev/test_tools.sh
	$(FUNCTIONAL) -m 'functional and not promise and not gpu and not slow' $(ARGS)

.PHONY: test-gpu
test-gpu: $(READY) ## run the tests of one GPU and print what they measured; see tests/gpu/conftest.py
#= ARGS
	$(PYTHON) -m pytest tests/gpu -m gpu $(ARGS)

# OpenHands needs another Python. Where it cannot be installed, its test fails and names the command; the others run.
.PHONY: test-all
test-all: lint swe-agent ## run every test, also those that take hours: long matrices, many kills, mutations
#= ARGS
	-@$(MAKE) --no-print-directory swe-agent AGENT=openhands-ai
	@tools/dev/test_tools.sh
	$(PYTHON) -m pytest -m 'not gpu' -n 2 --dist loadfile --no-loadscope-reorder --durations 40 $(ARGS) \
	  && $(PYTHON) -m tests.mutation

.PHONY: clean
clean: ## remove caches and build outputs; never data, models or results
	rm -rf build .mypy_cache .pytest_cache .ruff_cache super_rl_recipe.egg-info
	find recipes tools tests -name __pycache__ -prune -exec rm -rf {} +
