"""Keys of config.json and mamba_config.json on which no logit depends, by who writes them.

A reader asks for the keys that matter, and `CheckedJson.refuse_unread` refuses every other one that
is not listed here. So a key belongs here only if the model's function is the same whatever its
value: how weights are initialised, how an answer is drawn, what a training does, where a file is
from. A layout's set is what `_LAYOUTS` of checkpoint_configs.py names beside its reader.
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
