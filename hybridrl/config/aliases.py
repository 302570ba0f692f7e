"""What other libraries (TRL, verl, OpenRLHF, NeMo-RL) call settings, and how they are called here.

Names are theirs without their groups: `lr` stands for `actor.optim.lr`, too. With dots they are
looked for first: `rollout.n`.
"""

from __future__ import annotations

from typing import NamedTuple


class Alias(NamedTuple):
    """Attributes:
    settings: What it is called here; none: it is not there.
    note: How to convert the value, or what to do instead. A whole sentence.
    """

    settings: tuple[str, ...] = ()
    note: str = ""


def _is(*settings: str, note: str = "") -> Alias:
    return Alias(settings, note)


_PROMPTS = "It counts prompts here, each with rollout.samples_per_prompt samples."
_UPDATES = "Here it is how many updates a step is cut into: samples of a step / mini-batch size."
_TOKENS = "Micro-batches are counted in tokens here, prompts included, of any number of samples."
_ONCE = "Samples are learned from once here; there are no further epochs over a step."
_STEPS = "Training is counted in steps: epochs x rows / data.prompts_per_step."

ALIASES: dict[str, Alias] = {
    # the optimizer
    "lr": _is("actor.optimizer.learning_rate"),
    "learning_rate": _is("actor.optimizer.learning_rate"),
    "critic_learning_rate": _is("models.critic.optimizer.learning_rate"),
    "critic.optim.lr": _is("models.critic.optimizer.learning_rate"),
    "lr_scheduler_type": _is("actor.optimizer.schedule"),
    "lr_warmup_steps": _is("actor.optimizer.warmup_steps"),
    "lr_warmup_steps_ratio": _is(
        "actor.optimizer.warmup_steps", note="It is a number of steps: ratio x trainer.steps."
    ),
    "warmup_ratio": _is(
        "actor.optimizer.warmup_steps", note="It is a number of steps: ratio x trainer.steps."
    ),
    "warmup_steps": _is("actor.optimizer.warmup_steps"),
    "adam_beta1": _is("actor.optimizer.betas", note="Both stand there: [0.9, 0.95]."),
    "adam_beta2": _is("actor.optimizer.betas", note="Both stand there: [0.9, 0.95]."),
    "max_norm": _is("actor.optimizer.max_grad_norm"),
    "grad_clip": _is("actor.optimizer.max_grad_norm"),
    "gradient_clipping": _is("actor.optimizer.max_grad_norm"),
    # the objective
    "adv_estimator": _is("algorithm.advantage", note="algorithm=<name> sets all of an algorithm."),
    "advantage_estimator": _is(
        "algorithm.advantage", note="algorithm=<name> sets all of an algorithm."
    ),
    "loss_type": _is("algorithm.policy_loss", "algorithm.aggregation", "preference.loss"),
    "loss_mode": _is("algorithm.policy_loss"),
    "loss_agg_mode": _is("algorithm.aggregation"),
    "kl_coef": _is("algorithm.kl_coefficient"),
    "kl_loss_coef": _is("algorithm.kl_coefficient"),
    "init_kl_coef": _is("algorithm.kl_coefficient"),
    "kl_ctrl.kl_coef": _is("algorithm.kl_coefficient", note="And algorithm.kl_in_reward=true."),
    "use_kl_loss": _is("algorithm.kl_coefficient", note="Any but 0 switches it on."),
    "use_kl_in_reward": _is("algorithm.kl_in_reward"),
    "kl_penalty": _is("algorithm.kl_estimator"),
    "kl_loss_type": _is("algorithm.kl_estimator"),
    "target_kl": _is("algorithm.kl_target"),
    "beta": _is(
        "algorithm.kl_coefficient", "preference.beta", note="The second one with algorithm=dpo."
    ),
    "epsilon": _is("algorithm.clip_low", "algorithm.clip_high"),
    "epsilon_high": _is("algorithm.clip_high"),
    "clip_ratio": _is("algorithm.clip_low", "algorithm.clip_high"),
    "clip_ratio_low": _is("algorithm.clip_low"),
    "clip_ratio_high": _is("algorithm.clip_high"),
    "clip_ratio_c": _is("algorithm.dual_clip"),
    "delta": _is("algorithm.dual_clip"),
    "cliprange": _is("algorithm.clip_low", "algorithm.clip_high"),
    "eps_clip": _is("algorithm.clip_low", "algorithm.clip_high"),
    "cliprange_value": _is("critic.value_clip"),
    "value_clip": _is("critic.value_clip"),
    "entropy_coeff": _is("algorithm.entropy_coefficient"),
    "ent_coef": _is("algorithm.entropy_coefficient"),
    "entropy_coef": _is("algorithm.entropy_coefficient"),
    "entropy_loss_coef": _is("algorithm.entropy_coefficient"),
    "lambd": _is("algorithm.lam"),
    "gae_lambda": _is("algorithm.lam"),
    "norm_adv_by_std_in_grpo": _is("algorithm.advantage_scale", note="none instead of false."),
    "importance_sampling_level": _is(
        "algorithm.policy_loss", note="gspo (algorithm=gspo) instead of sequence."
    ),
    "mask_truncated_completions": Alias(
        note="There is none; algorithm.overlong_buffer lowers the score of what nears the limit."
    ),
    "sync_ref_model": Alias(note="There is none: the reference is the model as it began."),
    "rpo_alpha": _is("preference.nll_coefficient"),
    "scale_rewards": _is("algorithm.advantage_scale", note="none instead of false."),
    "filter_groups": _is("algorithm.dynamic_sampling"),
    "filter_groups.enable": _is("algorithm.dynamic_sampling"),
    "dynamic_filtering": _is("algorithm.dynamic_sampling"),
    "overlong_buffer.len": _is("algorithm.overlong_buffer"),
    "tis_imp_ratio_cap": _is(
        "algorithm.correction_high", note="With algorithm.correction=truncate."
    ),
    "vllm_importance_sampling_correction": _is(
        "algorithm.correction", note="truncate or mask; none instead of false."
    ),
    "vllm_importance_sampling_mode": _is("algorithm.correction", "algorithm.correction_level"),
    "vllm_importance_sampling_clip_max": _is(
        "algorithm.correction_high", note="With algorithm.correction=truncate or mask."
    ),
    "vllm_importance_sampling_clip_min": _is(
        "algorithm.correction_low", note="With algorithm.correction=mask."
    ),
    "vllm_importance_sampling_cap": _is(
        "algorithm.correction_high", note="With algorithm.correction=truncate."
    ),
    # generation
    "num_generations": _is("rollout.samples_per_prompt"),
    "n_samples_per_prompt": _is("rollout.samples_per_prompt"),
    "num_generations_per_prompt": _is("rollout.samples_per_prompt"),
    "rollout.n": _is("rollout.samples_per_prompt"),
    "group_size": _is("rollout.samples_per_prompt"),
    "max_completion_length": _is("rollout.max_tokens"),
    "max_new_tokens": _is("rollout.max_tokens"),
    "max_response_length": _is("rollout.max_tokens"),
    "generate_max_len": _is("rollout.max_tokens"),
    "response_length": _is("rollout.max_tokens"),
    "gpu_memory_utilization": _is("rollout.memory_share"),
    "vllm_gpu_memory_utilization": _is("rollout.memory_share"),
    "vllm_mem_util": _is("rollout.memory_share"),
    "tensor_model_parallel_size": _is("rollout.parallel.tp", "actor.parallel.tp"),
    "tensor_parallel_size": _is("rollout.parallel.tp", "actor.parallel.tp"),
    "vllm_tensor_parallel_size": _is("rollout.parallel.tp"),
    "max_num_seqs": _is("rollout.max_sequences"),
    "max_num_batched_tokens": _is("rollout.engine_options.max_num_batched_tokens"),
    "enforce_eager": _is("rollout.cuda_graphs", note="The other way round: false."),
    "vllm_mode": _is(
        "placement", note="flattening instead of colocate, separation instead of server."
    ),
    "use_vllm": _is("rollout", note="rollout=vllm or rollout=transformers."),
    "do_sample": Alias(note="Samples are always drawn in training; evaluation is greedy."),
    "repetition_penalty": Alias(
        note="There is none: samples would not come from the policy that is trained."
    ),
    "min_p": Alias(note="There is none: samples would not come from the policy that is trained."),
    "stop_strings": _is("rollout.stop"),
    "multi_turn": _is("rollout.episode", note="It names a class of yours, with its tools."),
    # sizes
    "train_batch_size": _is("data.prompts_per_step", note=_PROMPTS),
    "rollout_batch_size": _is("data.prompts_per_step", note=_PROMPTS),
    "num_prompts_per_step": _is("data.prompts_per_step"),
    "batch_size": _is("data.prompts_per_step", note=_PROMPTS),
    "per_device_train_batch_size": _is("actor.tokens_per_microbatch", note=_TOKENS),
    "gradient_accumulation_steps": _is("actor.tokens_per_microbatch", note=_TOKENS),
    "ppo_micro_batch_size_per_gpu": _is("actor.tokens_per_microbatch", note=_TOKENS),
    "micro_train_batch_size": _is("actor.tokens_per_microbatch", note=_TOKENS),
    "ppo_max_token_len_per_gpu": _is("actor.tokens_per_microbatch"),
    "generation_batch_size": _is("data.prompts_per_step", note=_PROMPTS),
    "steps_per_generation": _is(
        "actor.updates_per_step", note="steps_per_generation / gradient_accumulation_steps."
    ),
    "ppo_mini_batch_size": _is("actor.updates_per_step", note=_UPDATES),
    "num_mini_batches": _is("actor.updates_per_step"),
    "train_global_batch_size": _is("actor.updates_per_step", note=_UPDATES),
    "ppo_epochs": Alias(note=_ONCE),
    "num_iterations": Alias(note=_ONCE),
    "num_ppo_epochs": Alias(note=_ONCE),
    "num_train_epochs": _is("trainer.steps", note=_STEPS),
    "total_epochs": _is("trainer.steps", note=_STEPS),
    "num_episodes": _is("trainer.steps", note=_STEPS),
    "max_steps": _is("trainer.steps"),
    "max_num_steps": _is("trainer.steps"),
    "total_training_steps": _is("trainer.steps"),
    "max_prompt_length": _is("data.max_prompt_tokens"),
    "prompt_max_len": _is("data.max_prompt_tokens"),
    "max_length": _is("data.max_prompt_tokens", "data.max_response_tokens"),
    # models and data
    "actor_rollout_ref.model.path": _is("model.path"),
    "critic.model.path": _is("models.critic.path"),
    "model_name": _is("model.path"),
    "model_name_or_path": _is("model.path"),
    "pretrain": _is("model.path"),
    "torch_dtype": _is("model.dtype"),
    "bf16": _is("model.dtype", note="model.dtype=bfloat16."),
    "fp16": _is("model.dtype", note="float16 is for generation only; take bfloat16."),
    "attn_implementation": Alias(note="Attention is packed, and chosen by the devices."),
    "use_remove_padding": Alias(note="There is never any padding."),
    "packing": Alias(note="Samples are always packed."),
    "trust_remote_code": Alias(note="Models with code of their own are not loaded."),
    "enable_gradient_checkpointing": _is("actor.gradient_checkpointing"),
    "activation_checkpointing": _is("actor.gradient_checkpointing"),
    "lora_rank": _is("actor.lora.rank"),
    "peft_config": _is("actor.lora.rank", "actor.lora.alpha", "actor.lora.targets"),
    "lora_r": _is("actor.lora.rank"),
    "lora_alpha": _is("actor.lora.alpha"),
    "lora_target_modules": _is("actor.lora.targets"),
    "target_modules": _is("actor.lora.targets"),
    "param_offload": _is("actor.offload_parameters", "actor.offload_between_calls"),
    "optimizer_offload": _is("actor.offload_optimizer"),
    "adam_offload": _is("actor.offload_optimizer"),
    "ulysses_sequence_parallel_size": _is("actor.parallel.ulysses"),
    "context_parallel_size": _is("actor.parallel.ring", "actor.parallel.ulysses"),
    "ring_attn_size": _is("actor.parallel.ring"),
    "pipeline_model_parallel_size": _is("actor.parallel.pp"),
    "pipeline_parallel_size": _is("actor.parallel.pp"),
    "train_files": _is("data.path", note="With data=jsonl."),
    "prompt_data": _is("data.path", note="With data=jsonl."),
    "dataset_name": _is("data.path", note="With data=jsonl."),
    "val_files": _is("data.eval_path"),
    "eval_dataset": _is("data.eval_path"),
    "prompt_key": _is("data.prompt_column"),
    "input_key": _is("data.prompt_column"),
    "label_key": _is("data.answer_column"),
    "apply_chat_template": _is("data.chat"),
    "apply_chat_template_kwargs": _is("data.chat_template_options"),
    "chat_template_kwargs": _is("data.chat_template_options"),
    "enable_thinking": _is("data.chat_template_options.enable_thinking"),
    "filter_overlong_prompts": _is("data.too_long", note="data.too_long=drop."),
    "reward_funcs": _is("reward.function"),
    "reward_fn": _is("reward.function"),
    "custom_reward_function": _is("reward.function", note="path/to/file.py:name."),
    "custom_reward_function.path": _is("reward.function", note="path/to/file.py:name."),
    "reward_weights": _is("reward.weights"),
    "teacher_model_name_or_path": _is("models.teacher.path", note="With algorithm=distillation."),
    "lmbda": Alias(
        note="algorithm=distillation learns from the student's samples (1), and "
        "algorithm=offline_distillation from given responses (0)."
    ),
    "reward_pretrain": _is("reward.model"),
    "reward_model_path": _is("reward.model"),
    "reward_model.model.path": _is("reward.model"),
    "reward_model.model_path": _is("reward.model"),
    # runs
    "save_freq": _is("checkpoint.every"),
    "save_steps": _is("checkpoint.every"),
    "save_every": _is("checkpoint.every"),
    "save_interval": _is("checkpoint.every"),
    "save_period": _is("checkpoint.every"),
    "save_total_limit": _is("checkpoint.keep_last"),
    "max_ckpt_num": _is("checkpoint.keep_last"),
    "max_actor_ckpt_to_keep": _is("checkpoint.keep_last"),
    "keep_top_k": _is("checkpoint.keep_last", "checkpoint.best"),
    "default_local_dir": _is("run.directory", "checkpoint.folder"),
    "checkpoint_dir": _is("checkpoint.folder"),
    "ckpt_path": _is("checkpoint.folder"),
    "output_dir": _is("run.directory"),
    "save_path": _is("run.directory"),
    "resume": _is("resume", note="resume=<folder of a run>, or resume=auto."),
    "resume_mode": _is("resume", note="resume=<folder of a run>, or resume=auto."),
    "resume_from_path": _is("resume"),
    "resume_from_checkpoint": _is("resume"),
    "load_checkpoint": _is("resume"),
    "test_freq": _is("eval.every"),
    "eval_steps": _is("eval.every"),
    "val_period": _is("eval.every"),
    "val_before_train": Alias(note="The model is always evaluated before the first step."),
    "report_to": _is("metrics"),
    "trainer.logger": _is("metrics"),
    "use_wandb": _is("metrics", note="metrics=wandb."),
    "experiment_name": _is("run.name"),
    "run_name": _is("run.name"),
    "exp_name": _is("run.name"),
    "project_name": _is("run.name", note="There is no project; wandb reads WANDB_PROJECT."),
    "wandb_project": Alias(note="There is none; wandb reads the variable WANDB_PROJECT."),
    "log_completions": _is("observe.show_every", "observe.samples_every"),
    "logging_steps": Alias(note="The figures of every step are written."),
    "seed": _is("run.seed"),
    "n_gpus_per_node": _is("num_devices", note="Of all nodes together."),
    "nnodes": _is("num_devices", note="Of all nodes together."),
    "num_gpus": _is("num_devices"),
    "colocate_all_models": _is("placement", note="placement=flattening."),
    "colocated": _is("placement", note="placement=flattening, or placement=separation."),
    "async_train": _is("placement.staleness", note="With placement=separation."),
    "max_staleness": _is("placement.staleness", note="With placement=separation."),
}
"""By their names, in the order of the reference page."""


def meant(key: str) -> str:
    """What to write in place of a key of another library, as sentences; empty if it is none that is
    known. Its last words count, the most that are known together."""
    parts = key.split(".")
    for first in range(len(parts)):
        name = ".".join(parts[first:])
        if name in ALIASES:
            settings, note = ALIASES[name]
            called = f"It is called {' or '.join(f'`{setting}`' for setting in settings)} here."
            return " ".join(filter(None, [called if settings else "", note]))
    return ""
