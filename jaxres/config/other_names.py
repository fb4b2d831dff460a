"""Names of settings in other trainers -> ours, for the message on an unknown key.

From the documentation of Hugging Face's Trainer, Lightning, nanoGPT, torchtitan, Levanter, MaxText.
"""

from __future__ import annotations

_KEYS = {
    "optimizer.learning_rate": "lr max_lr base_lr peak_lr learning_rate",
    "optimizer.schedule.warmup_fraction": "warmup warmup_ratio",
    "optimizer.schedule.warmup_steps": "warmup_steps num_warmup_steps warmup_iters lr_warmup_steps",
    "optimizer.clip_norm": "max_grad_norm grad_clip gradient_clip_val clip_grad_norm "
    "gradient_clipping max_norm",
    "optimizer.b1": "beta1 adam_beta1 adam_b1",
    "optimizer.b2": "beta2 adam_beta2 adam_b2",
    "optimizer.eps": "epsilon adam_epsilon adam_eps",
    "train.steps": "max_steps num_steps total_steps num_train_steps max_iters iterations "
    "training_steps",
    "train.global_batch_size": "batch_size train_batch_size per_device_train_batch_size "
    "per_device_batch_size micro_batch_size local_batch_size",
    "train.microbatches": "gradient_accumulation gradient_accumulation_steps grad_accum "
    "accumulate_grad_batches grad_accum_steps num_microbatches",
    "checkpoint.save_every_steps": "save_steps save_interval checkpoint_interval save_every "
    "checkpoint_period checkpoint_every every_n_train_steps",
    "checkpoint.keep.last": "save_total_limit save_top_k max_to_keep keep_latest_k",
    "evaluation.every_steps": "eval_steps eval_interval eval_every val_check_interval "
    "steps_per_eval",
    "telemetry.log_every_seconds": "logging_steps log_interval log_every log_freq "
    "log_every_n_steps",
    "run.dir": "output_dir out_dir save_dir workdir default_root_dir base_output_directory",
    "data.seq_len": "block_size max_seq_len max_seq_length context_length sequence_length "
    "max_target_length",
    "data.source.path": "dataset dataset_path data_path data_dir train_file train_files",
    "model.d_model": "hidden_size n_embd dim emb_dim embed_dim hidden_dim",
    "model.num_layers": "n_layer n_layers num_hidden_layers num_decoder_layers layers",
    "model.num_heads": "n_head n_heads num_attention_heads num_query_heads",
    "model.num_kv_heads": "n_kv_head n_kv_heads num_key_value_heads",
    "model.compute_dtype": "dtype precision bf16 fp16 mixed_precision",
    "model.remat": "gradient_checkpointing activation_checkpointing activation_checkpoint "
    "remat_policy",
    "model.scan_layers": "scan_over_layers unroll_layers",
    "mesh.tensor": "tensor_parallel tensor_parallelism tensor_parallel_degree tp tp_size",
    "mesh.fsdp": "ici_fsdp_parallelism data_parallel_shard_degree sharding_strategy",
}
OTHER_NAMES = {name: key for key, names in _KEYS.items() for name in names.split()}
"""Name in another trainer -> our key."""

NOTES = {
    "train.global_batch_size": "the rows of a step over all devices",
    "optimizer.schedule.warmup_fraction": "a share of the steps",
    "telemetry.log_every_seconds": "seconds, not steps",
    "train.microbatches": "train.global_batch_size stays the rows of a step",
}
"""Our key -> its difference from the key of other trainers."""

_COUNTS_EPOCHS = "epochs num_epochs num_train_epochs max_epochs"
_RESUMES = "resume resume_from_checkpoint resume_from ckpt_path load_checkpoint"
_EXPERTS = "moe num_experts num_local_experts n_routed_experts expert ep expert_parallel"
_AXES = "pipeline pp pipeline_parallel pipeline_parallel_degree cp context context_parallel"
ADVICE = {
    name: text
    for names, text in (
        (
            _COUNTS_EPOCHS,
            "a run is train.steps long; `jaxres data inspect CONFIG.yaml` says how many an epoch "
            "takes",
        ),
        (_RESUMES, "the same command in the same run.dir resumes a run"),
        (_EXPERTS, "a mixture of experts needs a model of your own (model.kind: custom)"),
        (_AXES, "a mesh has the axes data, fsdp and tensor"),
    )
    for name in names.split()
}
"""Name in another trainer -> advice, where no key has its meaning."""


def hint(name: str) -> str:
    """Returns a hint with jaxres's name of another trainer's setting; empty: unknown.

    >>> hint("grad_clip")
    '; here it is optimizer.clip_norm'
    """
    if name in ADVICE:
        return f"; {ADVICE[name]}"
    key = OTHER_NAMES.get(name)
    if key is None:
        return ""
    note = f" ({NOTES[key]})" if key in NOTES else ""
    return f"; here it is {key}{note}"
