"""Keys of config.json and mamba_config.json on which no logit depends, by who writes them.

A reader asks for the keys that matter, and `CheckedJson.refuse_unread` refuses every other one that
is not listed here. So a key belongs here only if the model's function is the same whatever its
value: how weights are initialised, how an answer is drawn, what a training does, where a file is
from. A layout's set is what its `Layout` (layouts/, families/) names beside its reader.
"""

from __future__ import annotations


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


# What any config of transformers 4 or 5 may have, the defaults of its `generate` included.
TRANSFORMERS = _keys("""
    _name_or_path name_or_path _commit_hash transformers_version architectures dtype torch_dtype
    attn_implementation _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled
    output_hidden_states output_attentions return_dict use_return_dict torchscript use_bfloat16
    tf_legacy_loss pruned_heads chunk_size_feed_forward is_decoder cross_attention_hidden_size
    add_cross_attention tie_encoder_decoder finetuning_task task_specific_params problem_type
    id2label label2id num_labels tokenizer_class prefix sep_token_id decoder_start_token_id
    use_cache initializer_range gradient_checkpointing transformers.js_config
    unsloth_fixed unsloth_version
    max_length max_new_tokens min_length min_new_tokens do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_logits output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens
""")

# pretraining_tp cuts products into slices; max_sequence_length is an old max_position_embeddings.
LLAMA = TRANSFORMERS | _keys("""
    attention_dropout pretraining_tp max_sequence_length is_llama_config
""")

# The last line is written by older versions, and was never read.
MAMBA2 = TRANSFORMERS | _keys("""
    residual_in_fp32
    time_step_rank time_step_min time_step_max time_step_floor
    rms_norm norm_before_gate intermediate_size time_step_init_scheme time_step_scale
""")

# attn_cfg describes layers that attn_layer_idx would have to name.
STATE_SPACES = _keys("attn_cfg residual_in_fp32 fused_add_norm initializer_cfg")

MAMBA_CONFIG = _keys("resid_dropout")

# Keyword arguments of mamba-ssm's mixers: initialisation, and which kernel runs.
MIXER = _keys("""
    A_init_range D_init conv_init dt_min dt_max dt_init_floor dt_init dt_rank dt_scale
    use_fast_path use_mem_eff_path layer_idx device dtype
""")

# What every family's config has: training only, or how many logits `generate` asks for.
_FAMILY = TRANSFORMERS | _keys("attention_dropout num_logits_to_keep")

BAMBA = _FAMILY | _keys("z_loss_coefficient")

GRANITE_MOE_HYBRID = _FAMILY | _keys("""
    router_aux_loss_coef init_method
    intermediate_size num_experts_per_tok
""")

# Its Mamba layers' dimensions say what expand would; the number of shared experts is in their
# width; num_nextn_predict_layers and the like describe weights that decoding does without; there
# are no positions. Published ones name code of their own (auto_map), from before transformers had
# the family; it is not run, as transformers runs it for nobody who does not trust it.
NEMOTRON_H = _FAMILY | _keys("""
    auto_map time_step_rank rope_theta partial_rotary_factor
    expand mamba_proj_bias mamba_ssm_cache_dtype use_mamba_kernels residual_in_fp32 hidden_dropout
    rescale_prenorm_residual time_step_limit time_step_max time_step_floor
    n_shared_experts moe_shared_expert_overlap output_router_logits
    num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern
    n_routed_experts num_experts_per_tok moe_intermediate_size moe_latent_size
    moe_shared_expert_intermediate_size n_group topk_group norm_topk_prob routed_scaling_factor
""")

FALCON_H1 = _FAMILY | _keys("mlp_expansion_factor mamba_expand")

# Names of older versions for what other keys say.
LFM2 = _FAMILY | _keys("""
    block_dim block_norm_eps block_mlp_init_scale block_out_init_scale block_use_xavier_init
    conv_dim conv_dim_out conv_use_xavier_init use_pos_enc num_heads theta
""")

# Published ones have a time_step_limit, which was never read.
ZAMBA2 = _FAMILY | _keys("""
    time_step_limit time_step_max time_step_floor use_mamba_kernels use_mem_eff_path use_conv_bias
    kv_channels num_query_groups
""")

# Of positions that have several sections, all equal for text.
MROPE = _keys("mrope_section mrope_interleaved")

QWEN3_NEXT = _FAMILY | _keys("""
    router_aux_loss_coef output_router_logits
    num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size
""")

# The data type of states, which ours have whatever it says; weights that decoding does without;
# what a checkpoint that also sees has beside its `text_config`.
QWEN3_5 = _FAMILY | _keys("""
    router_aux_loss_coef output_router_logits mlp_only_layers mamba_ssm_dtype
    mtp_num_hidden_layers mtp_use_dedicated_embeddings
    vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id
""")
