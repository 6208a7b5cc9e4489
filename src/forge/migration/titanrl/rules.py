"""The table of TitanRL's `Controller.Config`."""

from __future__ import annotations

from forge.migration.models import dtype_name
from forge.migration.rules import always, as_float, differs, joint, lacking, lacks, maps, positive
from forge.migration.titanrl import loop_values, trainer_values
from forge.migration.titanrl.loop_values import LOOP, TRAINER
from forge.migration.titanrl.trainer_values import PARALLEL, RATES, SAVING

RULES = [
    joint("model_spec hf_assets_path", "model.path model.preset model.head_precision", trainer_values.model),
    joint(f"{LOOP}.num_training_steps", "training.max_steps", loop_values.run_length),
    joint(
        f"{LOOP}.num_prompts_per_train_step {LOOP}.num_samples_per_prompt",
        "rollout.batch_groups rollout.group_size",
        loop_values.batch,
    ),
    joint(f"{LOOP}.target_offpolicy_steps {LOOP}.window_fraction", "rollout.staleness", loop_values.staleness),
    joint(f"{LOOP}.training_sample_builder.drop_zero_std_reward_groups", "rollout.no_signal", loop_values.signal),
    joint(
        f"{LOOP}.batcher.batch.local_batch_size {LOOP}.batcher.batch.seq_len",
        "training.max_seq_len training.microbatch_tokens",
        loop_values.rows,
    ),
    lacks(f"{LOOP}.batcher.per_sample_pad_multiple", "rows are packed, not padded"),
    lacks(f"{LOOP}.group_buffer", "rollout.staleness and rollout.max_in_flight bound the buffer"),
    joint(
        f"{LOOP}.validation.num_samples",
        "evaluation.max_prompts evaluation.at_start evaluation.at_end",
        loop_values.validation,
    ),
    joint(
        "rollouter.train_dataset rollouter.train_dataset.repo_id rollouter.train_dataset.split",
        "prompts.sources",
        loop_values.data,
    ),
    joint(
        "rollouter rollouter.rubric rollouter.rubric.reward_fns rollouter.rubric.error_reward",
        "rewards.functions rewards.on_error",
        loop_values.rewards,
    ),
    lacks("rollouter.rubric.truncation_reward", "rollout.mask_truncated leaves truncated completions out of the loss"),
    joint(
        "rollouter.message_env rollouter.token_env.max_num_turns",
        "",
        loop_values.environment,
    ),
    lacks(
        "rollouter.token_env rollouter.token_env.max_rollout_tokens",
        "training.max_seq_len bounds prompt and completion",
    ),
    lacks("rollouter.token_env.step_timeout_s", "episode.limits bounds turns, tokens and time"),
    joint(
        "rollouter.advantage rollouter.advantage.should_std_normalize",
        "algorithm.advantage.scale algorithm.advantage.std_ddof algorithm.advantage.epsilon",
        loop_values.advantage,
    ),
    lacks("rollouter.*", "a rollouter is Python: prompts and rewards, or an episode of your own"),
    lacks(
        "renderer.*", "the chat template is the tokenizer's own, or generator.chat_template; thinking is switched in it"
    ),
    lacks(
        "rollout_recorder.*", "every completion is written to rollouts/ with its tokens and logprobs: record.rollouts"
    ),
    maps("compile.enable", "training.compile"),
    lacks(
        "compile.backend compile.components compile.enable_async_tensor_parallel",
        "layers are compiled with torch.compile's defaults",
    ),
    joint(
        "trainer.optimizer trainer.optimizer.param_groups trainer.optimizer.implementation",
        "training.learning_rate training.weight_decay training.beta1 training.beta2 training.adam_eps "
        "training.optimizer_dtype",
        trainer_values.optimizer,
    ),
    lacks(
        "trainer.optimizer.optimizer_factory_kwargs_by_name",
        "training.optimizer_args are those of an optimizer of your own",
    ),
    joint(
        f"{RATES}.decay_ratio {RATES}.decay_type {RATES}.min_lr_factor",
        "training.schedule training.min_lr_ratio training.decay_ratio",
        trainer_values.schedule,
    ),
    joint(f"{RATES}.warmup_steps", "training.warmup_steps", trainer_values.warmup),
    lacks(f"{RATES}.total_steps", "the schedule covers all steps of the run"),
    joint(
        f"{TRAINER}.loss {TRAINER}.loss.clip_eps {TRAINER}.loss.ratio_clip_low {TRAINER}.loss.ratio_clip_high "
        f"{TRAINER}.loss.loss_fn {TRAINER}.loss.loss_fn.clip_eps {TRAINER}.loss.loss_fn.ratio_clip_low "
        f"{TRAINER}.loss.loss_fn.ratio_clip_high",
        "algorithm.preset algorithm.loss.kind algorithm.loss.average algorithm.loss.proximal algorithm.loss.clip_low "
        "algorithm.loss.clip_high",
        loop_values.loss,
    ),
    lacks(f"{TRAINER}.loss.num_chunks", "the output layer always works in chunks: training.head_chunk_tokens"),
    lacks(f"{TRAINER}.loss.loss_fn.global_vocab_size", "there is nothing to choose"),
    differs("trainer.training.max_norm", "training.max_grad_norm", "the same norm; 0 is none", positive),
    joint(
        "trainer.training.dtype trainer.training.mixed_precision_param",
        "distributed.precision",
        trainer_values.precision,
    ),
    lacks("trainer.training.mixed_precision_reduce", "gradients are always reduced in float32"),
    joint("trainer.training.enable_cpu_offload", "", trainer_values.offload),
    lacks(
        "trainer.training.local_batch_size trainer.training.global_batch_size trainer.training.seq_len "
        "trainer.training.steps",
        "the RL loop does not read it: rollout.batch_groups, training.max_seq_len and max_steps",
    ),
    lacks(
        "trainer.training.disable_cuda_graphs trainer.training.gc_freq trainer.training.gc_debug",
        "there is nothing to choose",
    ),
    joint(
        f"{PARALLEL}.data_parallel_shard_degree {PARALLEL}.data_parallel_replicate_degree "
        f"{PARALLEL}.tensor_parallel_degree {PARALLEL}.pipeline_parallel_degree {PARALLEL}.expert_parallel_degree "
        f"{PARALLEL}.context_parallel_degree {PARALLEL}.enable_sequence_parallel",
        "distributed.shard distributed.replicate distributed.tensor distributed.pipeline distributed.expert "
        "distributed.sequence_parallel",
        trainer_values.layout,
    ),
    maps(f"{PARALLEL}.pipeline_parallel_schedule", "distributed.pipeline_schedule"),
    lacks(f"{PARALLEL}.*", "the degrees of distributed decide the rest"),
    joint(f"{TRAINER}.ac_config", "training.activation_checkpointing", trainer_values.recompute),
    lacks(f"{TRAINER}.ac_config.*", "recomputation has no further options"),
    differs("trainer.debug.seed", "run.seed", "one seed for everything", lambda value: value or 0),
    lacks(
        "trainer.debug.* generator.debug.*",
        "on a CPU trainer and generator agree bit for bit; on a GPU train/mismatch shows the difference",
    ),
    lacks(
        "trainer.comm.* trainer.override.* generator.override.*",
        "timeouts are those of the workers; kernels are chosen by the device",
    ),
    lacks("trainer.dump_folder", "a run has one folder"),
    joint(
        f"{SAVING}.enable {SAVING}.interval {SAVING}.keep_latest_k {SAVING}.async_mode",
        "checkpointing.save_interval checkpointing.save_interval_s checkpointing.keep checkpointing.asynchronous "
        "checkpointing.resume",
        trainer_values.saving,
    ),
    lacks(f"{SAVING}.*", "a run starts from model.path; a checkpoint holds everything to resume"),
    joint(
        "num_generators generator.parallelism.data_parallel_degree generator.parallelism.tensor_parallel_degree "
        "generator.gpu_memory_limit",
        "generator.engine placement generator.num_replicas generator.tensor_parallel generator.gpu_memory_share",
        trainer_values.generators,
    ),
    lacks("generator.parallelism.*", "generator.engine_args takes the rest of vLLM's arguments"),
    maps("generator.sampling.temperature", "generator.sampling.temperature", as_float),
    maps("generator.sampling.top_p", "generator.sampling.top_p", as_float),
    maps("generator.sampling.max_tokens", "generator.sampling.max_tokens"),
    lacks(
        "generator.sampling.seed generator.sampling.stop_token_ids",
        "seeds derive from run.seed; the tokenizer's own end tokens end a completion",
    ),
    maps("generator.model_dtype", "generator.precision", dtype_name),
    maps("generator.max_num_batched_tokens", "generator.prefill_chunk_tokens"),
    maps("generator.cudagraph.enable", "generator.cuda_graphs"),
    lacks(
        "generator.cudagraph.mode generator.cudagraph.capture_sizes",
        "generator.engine_args takes vLLM's compilation_config",
    ),
    lacks("generator.checkpoint.*", "generators load model.path, and then versions of the trainer"),
    lacks(
        "generator.intra_generator_router.*",
        "requests go to the replica with the least load; an episode stays with one",
    ),
    lacks(
        "generator.max_engine_steps_between_decisions", "generator.max_batch and max_queue bound what is in progress"
    ),
    joint(
        "generator_router.hot_swap generator.reset_running_requests_on_weight_sync "
        "generator.reset_prefix_cache_on_weight_sync",
        "generator.update.mode",
        trainer_values.update,
    ),
    lacks("generator_router.*", "requests go to the replica with the least load; an episode stays with one"),
    maps("metrics.enable_wandb", "metrics.wandb"),
    maps("metrics.enable_tensorboard", "metrics.tensorboard"),
    maps("metrics.wandb_project", "metrics.project"),
    lacks(
        "metrics.console_log_keys_train metrics.console_log_keys_validation",
        "the console shows a line per step; metrics.jsonl has everything",
    ),
    always({"metrics.log_interval": 1}, "TitanRL prints every step"),
    joint(
        "dump_folder",
        "run.output_dir run.name",
        trainer_values.folder,
        verdict="differs",
        note="a run writes to run.output_dir/run.name; the final weights are in checkpoints/hf there",
    ),
    joint(
        "statements",
        "",
        lambda config: (
            lacking("statements that are not followed: look whether they change the configuration")
            if config.is_given("statements")
            else None
        ),
    ),
    lacks("module config", "the function that it names is in a Python file: import that file, then these flags apply"),
]
