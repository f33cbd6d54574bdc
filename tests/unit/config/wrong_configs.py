"""Wrong configuration files, each with the exact line it is answered with: name -> (text, expected line)."""

from __future__ import annotations

FILES = {
    "unknown key": (
        "grpo: {num_prompt_per_step: 8}",
        "x.yaml: grpo.num_prompt_per_step: there is no such key; did you mean grpo.num_prompts_per_step?",
    ),
    "unknown block": ("polcy: {precision: float32}", "x.yaml: polcy: there is no such key; did you mean policy?"),
    "key in the wrong block": (
        "grpo: {lr: 0.1}",
        "x.yaml: grpo.lr: there is no such key; did you mean policy.megatron_cfg.optimizer.lr?",
    ),
    "key like no other": (
        "grpo: {frobnicate: 1}",
        "x.yaml: grpo.frobnicate: there is no such key; delete it; configs/grpo_base.yaml has every key",
    ),
    "key that NeMo RL never reads": (
        "grpo: {penalize_invalid_tool_call: true}",
        "x.yaml: grpo.penalize_invalid_tool_call: there is no such key; set grpo.invalid_tool_call_advantage; null "
        "= off",
    ),
    "key that NeMo RL ignores": (
        "policy: {generation: {vllm_cfg: {max_num_seqs: 16}}}",
        "x.yaml: policy.generation.vllm_cfg.max_num_seqs: there is no such key; NeMo RL ignores it; set "
        "policy.generation.vllm_kwargs.max_num_seqs",
    ),
    "misspelled key among server instances": (
        "env: {nemo_gym: {num_gpu_node: 7}}",
        "x.yaml: env.nemo_gym.num_gpu_node: there is no such key; did you mean env.nemo_gym.num_gpu_nodes?",
    ),
    "checkpoints where no tool looks for them": (
        "checkpointing: {checkpoint_dir: results/grpo}",
        'x.yaml: checkpointing.checkpoint_dir: got "results/grpo", expected checkpoints; meaning: directory of the '
        "checkpoints in a run; later stages and tools look for this name",
    ),
    "server instance of no kind": (
        "env: {nemo_gym: {mcqa: {resource_servers: {mcqa: {}}}}}",
        "x.yaml: env.nemo_gym.mcqa.resource_servers: there is no such kind of server; did you mean "
        "resources_servers?",
    ),
    "server of no type": (
        "env: {nemo_gym: {quiz: {resources_servers: {mqca: {}}}}}",
        "x.yaml: env.nemo_gym.quiz.resources_servers.mqca: there is no such type of server; did you mean mcqa?",
    ),
    "server of a type of the user's own without an address": (
        "env: {nemo_gym: {quiz: {resources_servers: {rhymes: {language: en}}}}}",
        "x.yaml: env.nemo_gym.quiz.resources_servers.rhymes: there is no such type of server; give the `url` at which "
        "the server of your own type answers",
    ),
    "setting of a server of the user's own type": (
        "env: {nemo_gym: {quiz: {resources_servers: {rhymes: {url: http://x:1, timeout_second: 5}}}}}",
        "x.yaml: env.nemo_gym.quiz.resources_servers.rhymes.timeout_second: there is no such setting of this server; "
        "did you mean timeout_seconds?",
    ),
    "wrong address of a server of the user's own type": (
        "env: {nemo_gym: {quiz: {resources_servers: {rhymes: {url: 5}}}}}",
        "x.yaml: env.nemo_gym.quiz.resources_servers.rhymes.url: got 5, expected a text; meaning: address of a "
        "running server to ask, http://host:port; without it the verifier runs in process",
    ),
    "setting of no server": (
        "env: {nemo_gym: {code: {resources_servers: {code_gen: {num_proceses: 8}}}}}",
        "x.yaml: env.nemo_gym.code.resources_servers.code_gen.num_proceses: there is no such setting of this "
        "server; did you mean num_processes?",
    ),
    "setting of the wrong type": (
        "env: {nemo_gym: {code: {resources_servers: {code_gen: {num_processes: many}}}}}",
        'x.yaml: env.nemo_gym.code.resources_servers.code_gen.num_processes: got "many", expected an integer >= 1; '
        "meaning: programs that run at once",
    ),
    "choice of no server": (
        "env: {nemo_gym: {mcqa: {resources_servers: {mcqa: {grading_mode: lenient_boxt}}}}}",
        'x.yaml: env.nemo_gym.mcqa.resources_servers.mcqa.grading_mode: got "lenient_boxt", expected one of '
        "strict_single_letter_boxed, lenient_boxed, lenient_answer_colon, lenient_answer_colon_md, null; "
        "did you mean lenient_boxed?",
    ),
    "setting inside a setting": (
        "env: {nemo_gym: {x: {resources_servers: {multichallenge: {judge_responses_create_params: {top_p: 2}}}}}}",
        "x.yaml: env.nemo_gym.x.resources_servers.multichallenge.judge_responses_create_params.top_p: got 2, expected "
        "a number > 0 and <= 1; meaning: nucleus sampling; 1 = off",
    ),
    "reference without a name": (
        "env: {nemo_gym: {x: {responses_api_agents: {simple_agent: {resources_server: {type: resources_servers}}}}}}",
        "x.yaml: env.nemo_gym.x.responses_api_agents.simple_agent.resources_server.name: this key has no value; set "
        "it to a non-empty text",
    ),
    "instance of two servers": (
        "env: {nemo_gym: {x: {resources_servers: {mcqa: {}, calendar: {}}}}}",
        'x.yaml: env.nemo_gym.x.resources_servers: got ["calendar", "mcqa"], expected one type of server; write an '
        "instance with one server, as configs/environments has them",
    ),
    "judge that is not there": (
        "env: {nemo_gym: {x: {resources_servers: {inverse_if: {judge_model_server: {name: policy_modle}}}}}}",
        "x.yaml: env.nemo_gym.x.resources_servers.inverse_if.judge_model_server: no server is called policy_modle; "
        "did you mean policy_model?",
    ),
    "nodes without a judge": (
        "env: {nemo_gym: {num_gpu_nodes: 2}}",
        "x.yaml: env.nemo_gym.num_gpu_nodes: got 2, expected 0: this stage starts no judge; lower it: the other "
        "nodes would stand idle",
    ),
    "repository agents without images": (
        "grpo: {overlong_filtering: true}\nenv: {nemo_gym: {swe: {responses_api_agents: {swe_agents: {}}}}}",
        "grpo_base.yaml: sif_dir: got null, expected a directory of .sif files, or ???; each task runs in its image; "
        "write ??? here and set SIF_DIR at launch",
    ),
    "text for a number": (
        "grpo: {num_prompts_per_step: many}",
        'x.yaml: grpo.num_prompts_per_step: got "many", expected an integer >= 1; '
        "meaning: prompts (groups) in one step: P",
    ),
    "fraction for an integer": (
        "grpo: {num_generations_per_prompt: 8.5}",
        "x.yaml: grpo.num_generations_per_prompt: got 8.5, expected an integer >= 1; "
        "meaning: rollouts of one prompt, the group size: G",
    ),
    "truth value for a number": (
        "grpo: {seed: true}",
        "x.yaml: grpo.seed: got true, expected an integer >= 0 and <= 2147483647; "
        "meaning: seed of data order, sampling and initialisation",
    ),
    "number for a truth value": (
        "data: {shuffle: 1}",
        "x.yaml: data.shuffle: got 1, expected true or false; "
        "meaning: shuffle rows once per epoch with grpo.seed; false = file order, which the curriculum needs",
    ),
    "value for a block": (
        "cluster: 4",
        "x.yaml: cluster: got 4, expected a block of keys; "
        "meaning: Nodes that train and generate; judges come on top.",
    ),
    "null where there must be a value": (
        "policy: {precision: null}",
        "x.yaml: policy.precision: got null, expected one of bfloat16, float16, float32; "
        "meaning: dtype of weights and activations",
    ),
    "number for a list item": (
        "env: {nemo_gym: {thinking_tags: [1]}}",
        "x.yaml: env.nemo_gym.thinking_tags: got 1, expected a non-empty list of texts; "
        "meaning: text that marks a turn as malformed thinking",
    ),
    "empty list": (
        "env: {nemo_gym: {thinking_tags: []}}",
        "x.yaml: env.nemo_gym.thinking_tags: got [], expected a non-empty list of texts; "
        "meaning: text that marks a turn as malformed thinking",
    ),
    "below the range": (
        "policy: {megatron_cfg: {optimizer: {lr: -1.0e-6}}}",
        "x.yaml: policy.megatron_cfg.optimizer.lr: got -1e-06, expected a number > 0 and <= 1; "
        "meaning: learning rate after warm-up",
    ),
    "above the range": (
        "policy: {generation: {vllm_cfg: {gpu_memory_utilization: 80}}}",
        "x.yaml: policy.generation.vllm_cfg.gpu_memory_utilization: got 80, expected a number > 0 and < 1; "
        "meaning: share of GPU memory an engine takes",
    ),
    "no choice": (
        "loss_fn: {truncated_importance_sampling_type: ice-pop}",
        'x.yaml: loss_fn.truncated_importance_sampling_type: got "ice-pop", expected one of tis, icepop, '
        "seq-mask-tis, null; did you mean icepop?",
    ),
    "only one choice": (
        "policy: {generation: {colocated: {enabled: true}}}",
        "x.yaml: policy.generation.colocated.enabled: got true, expected false; "
        "meaning: engines share GPUs with training; asynchronous training needs them apart",
    ),
    "text of the wrong form": (
        'checkpointing: {checkpoint_must_save_by: "3:45"}',
        'x.yaml: checkpointing.checkpoint_must_save_by: got "3:45", expected a text like '
        "^[0-9]{2}:[0-9]{2}:[0-9]{2}:[0-9]{2}$ or null; "
        "meaning: save and stop after this long, DD:HH:MM:SS since the job started; null = no limit",
    ),
    "duplicate key": (
        "grpo:\n  seed: 1\n  val_period: 5\n  seed: 2\n",
        "x.yaml:5: grpo.seed: this key stands here a second time, first on line 3; delete one of them",
    ),
    "number without a dot": (
        "policy: {megatron_cfg: {optimizer: {lr: 3e-6}}}",
        "x.yaml: policy.megatron_cfg.optimizer.lr: got 3e-6, which YAML reads as text, expected a number with a dot; "
        "write 3.0e-6",
    ),
    "time without quotes": (
        "checkpointing: {checkpoint_must_save_by: 4:00:00}",
        "x.yaml: checkpointing.checkpoint_must_save_by: got 4:00:00, which YAML reads as 14400, "
        'expected a decimal number; write 14400, or quote it: "4:00:00"',
    ),
    "octal": (
        "grpo: {seed: 0755}",
        "x.yaml: grpo.seed: got 0755, which YAML reads as 493, expected a decimal number; "
        'write 493, or quote it: "0755"',
    ),
    "yes for true": (
        "data: {shuffle: yes}",
        "x.yaml: data.shuffle: got yes, which YAML reads as true, expected true or false; "
        'write true, or quote it: "yes"',
    ),
    "no in a text": (
        "logger: {wandb: {project: no}}",
        "x.yaml: logger.wandb.project: got no, which YAML reads as false, expected true or false; "
        'write false, or quote it: "no"',
    ),
    "infinity": (
        "grpo: {advantage_clip_high: .inf}",
        "x.yaml: grpo.advantage_clip_high: got .inf, expected a finite number; use null where no bound is meant",
    ),
    "date": (
        "logger: {wandb: {name: 2026-01-02}}",
        "x.yaml: logger.wandb.name: got 2026-01-02, which YAML reads as a timestamp, expected a plain value; "
        'quote it: "2026-01-02"',
    ),
    "syntax": (
        "grpo: [",
        "x.yaml:3: this is not YAML (did not find expected node content); correct the syntax on or above this line",
    ),
    "text that looks like a number": (
        "policy: {model_name: 3.10}",
        "x.yaml: policy.model_name: got 3.1, expected a non-empty text; "
        "meaning: Hugging Face directory of the start weights; the launcher sets it from MODEL_PATH",
    ),
    "reference to nothing": (
        "grpo: {seed: '${grpo.sed}'}",
        'x.yaml: grpo.seed: "${grpo.sed}" cannot be resolved (Interpolation key \'grpo.sed\' not found); correct it',
    ),
    "malformed reference": (
        "grpo: {seed: '${grpo.val_period'}",
        'x.yaml: grpo.seed: "${grpo.val_period" cannot be resolved (no viable alternative at input '
        "'${grpo.val_period'); correct it",
    ),
    "wrong value by reference, reported where it was made": (
        "policy: {precision: '${grpo.seed}'}",
        "x.yaml: policy.precision: got 42, expected one of bfloat16, float16, float32; "
        "meaning: dtype of weights and activations",
    ),
    "deleting what is not there": (
        "policy: {generation: {vllm_kwargs: {~max_num_seq: null}}}",
        "x.yaml: ~policy.generation.vllm_kwargs.max_num_seq: there is no such key to delete; choose from: "
        "max_num_seqs, max_num_batched_tokens, block_size, kv_cache_memory_bytes",
    ),
    "deleting what must be there": (
        "grpo: {~seed: null}",
        "x.yaml: grpo.seed: this key has no value; set it to an integer >= 0 and <= 2147483647",
    ),
    "list for one value": (
        "policy: {precision: [bfloat16, float32]}",
        'x.yaml: policy.precision: got ["bfloat16", "float32"], expected one of bfloat16, float16, float32; '
        "meaning: dtype of weights and activations",
    ),
    "text for a list": (
        "env: {nemo_gym: {config_paths: served.yaml}}",
        'x.yaml: env.nemo_gym.config_paths: got "served.yaml", expected a list of texts; '
        "meaning: YAML files of server instances, relative to configs/, merged in order under this block",
    ),
    "unknown word in a list": (
        "policy: {megatron_cfg: {peft: {target_modules: [linear_qkv, q_proj]}}}",
        'x.yaml: policy.megatron_cfg.peft.target_modules: got "q_proj", expected a list of linear_qkv, linear_proj, '
        "in_proj, out_proj, linear_fc1, linear_fc2; meaning: linear layers with adapters, by Megatron's names; the "
        "package peft reads no out_proj of a hybrid model",
    ),
    "quoted number": (
        'grpo: {val_period: "10"}',
        'x.yaml: grpo.val_period: got "10", expected an integer >= -1; '
        "meaning: steps between validations; 0 or -1 = none",
    ),
    "quoted truth value": (
        'checkpointing: {enabled: "true"}',
        'x.yaml: checkpointing.enabled: got "true", expected true or false; meaning: save checkpoints',
    ),
    "empty text": (
        'policy: {model_name: ""}',
        'x.yaml: policy.model_name: got "", expected a non-empty text; '
        "meaning: Hugging Face directory of the start weights; the launcher sets it from MODEL_PATH",
    ),
    "port out of range": (
        "policy: {generation: {port_range_high: 70000}}",
        "x.yaml: policy.generation.port_range_high: got 70000, expected an integer >= 1024 and <= 8999; "
        "meaning: end of the range of ports, exclusive",
    ),
    "probability out of range": (
        "policy: {generation: {top_p: 1.5}}",
        "x.yaml: policy.generation.top_p: got 1.5, expected a number > 0 and <= 1; "
        "meaning: nucleus sampling of training rollouts; 1 = off",
    ),
    "deadline of zero": (
        "deadlines: {refit: 0}",
        "x.yaml: deadlines.refit: got 0, expected a number > 0; meaning: seconds for one weight push",
    ),
    "key that NeMo RL has renamed": (
        "grpo: {num_val_generations_per_prompt: 2}",
        "x.yaml: grpo.num_val_generations_per_prompt: there is no such key; it is now "
        "grpo.val_num_generations_per_prompt",
    ),
    "block of another backend": (
        "policy: {dtensor_cfg: {enabled: false}}",
        "x.yaml: policy.dtensor_cfg: there is no such key; this recipe trains with Megatron-core only; delete it",
    ),
    "block of another logger": (
        "logger: {mlflow_enabled: true}",
        "x.yaml: logger.mlflow_enabled: there is no such key; MLflow is not supported; delete it",
    ),
    "sexagesimal number": (
        "grpo: {max_num_steps: 1:30}",
        "x.yaml: grpo.max_num_steps: got 1:30, which YAML reads as 90, expected a decimal number; "
        'write 90, or quote it: "1:30"',
    ),
    "hexadecimal number": (
        "grpo: {seed: 0x2A}",
        "x.yaml: grpo.seed: got 0x2A, which YAML reads as 42, expected a decimal number; "
        'write 42, or quote it: "0x2A"',
    ),
    "off for false": (
        "checkpointing: {enabled: off}",
        "x.yaml: checkpointing.enabled: got off, which YAML reads as false, expected true or false; "
        'write false, or quote it: "off"',
    ),
    "not a number": (
        "policy: {max_grad_norm: .nan}",
        "x.yaml: policy.max_grad_norm: got .nan, expected a finite number; use null where no bound is meant",
    ),
    "sum that does not match": (
        "policy: {train_global_batch_size: 256}",
        "x.yaml: policy.train_global_batch_size: got 256, expected grpo.num_prompts_per_step * "
        "grpo.num_generations_per_prompt = 16 * 8 = 128; force_on_policy_ratio needs exactly one optimizer step per "
        "batch; delete this key",
    ),
    "mismatch threshold that no rollout meets": (
        "grpo: {seq_logprob_error_threshold: 0.5}",
        "x.yaml: grpo.seq_logprob_error_threshold: got 0.5, expected a number >= 1 or null; meaning: drop a rollout "
        "whose mean exp(abs(engine - trainer log-prob)) exceeds this; null = off",
    ),
    "metric of a validation that never runs": (
        "grpo: {val_at_start: false, val_at_end: false}\ncheckpointing: {metric_name: val:accuracy}",
        "x.yaml: checkpointing.metric_name: got val:accuracy, expected null or train:NAME; no validation would ever "
        "run; set grpo.val_period or grpo.val_at_end, or use null or a train: metric",
    ),
    "effort shaping half on": (
        "env: {nemo_gym: {effort_levels: {low_weight: 0.2}}}",
        'grpo_base.yaml: env.nemo_gym.effort_levels.low_string: is "", which is off, although '
        "env.nemo_gym.effort_levels.low_weight is set; set both or neither",
    ),
    "cohort of another size": (
        "env: {nemo_gym: {g: {resources_servers: {genrm_compare: {num_rollouts_per_prompt: 16}}}}}",
        "x.yaml: env.nemo_gym.g.resources_servers.genrm_compare.num_rollouts_per_prompt: got 16, expected "
        "grpo.num_generations_per_prompt = 8; compare whole groups: delete this key",
    ),
    "repository agents without a decision": (
        "sif_dir: images\nenv: {nemo_gym: {swe: {responses_api_agents: {swe_agents: {}}}}}",
        "grpo_base.yaml: grpo.overlong_filtering: a stage with agents on repositories must set this key itself; "
        "say whether tasks that hit the context limit train, since many do there; the published value is true",
    ),
    "instance file that is not there": (
        "env: {nemo_gym: {config_paths: [/no/such.yaml]}}",
        "/no/such.yaml: this file cannot be read (No such file or directory); check the path",
    ),
}  # fmt: skip
