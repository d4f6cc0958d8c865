"""The two architectures by name: what the programs around a model need to know of each."""
from dataclasses import dataclass
from types import ModuleType
from typing import Callable

import encoding
import encoding_v31
import model_v3
import model_v4
import model_v41

QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
COMMON = dict(hidden_act="silu", attention_bias=False, attention_dropout=0.0, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
              initializer_range=0.02, torch_dtype="bfloat16", use_cache=True, num_nextn_predict_layers=1, n_shared_experts=1,
              norm_topk_prob=True, topk_method="noaux_tc")
IN_ROPE_SCALING = {"rope_factor": "factor", "rope_original": "original_max_position_embeddings", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
                   "mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}


@dataclass
class Family:
    name: str
    config: type
    shapes: Callable
    init: Callable
    model: type
    encoding: ModuleType | encoding.Encoding  # render and parse
    chat_template: str | None  # of tokenizer_config.json; V4 has none
    architecture: str
    model_type: str
    extra: dict            # keys of config.json that no field of the config says
    nested: bool = False   # the model's keys stand in text_config

    def to_json(self, c, max_len: int) -> dict:
        """The config.json of the published checkpoints."""
        j = {} if self.nested else {"architectures": [self.architecture], "model_type": self.model_type}
        fields = {k: getattr(c, k) for k in c.__dataclass_fields__}
        j.update({k: v for k, v in fields.items() if k not in IN_ROPE_SCALING})
        j.update(COMMON, max_position_embeddings=max_len, rope_scaling={"type": "yarn", **{to: fields[k] for k, to in IN_ROPE_SCALING.items() if k in fields}})
        j.update(self.extra, num_key_value_heads=j["num_attention_heads"] if self.name == "v3" else 1)
        return self.nest(j) if self.nested else j

    def nest(self, text: dict) -> dict:
        """Keys of the whole file, and under text_config those of the model."""
        top = {k: text.pop(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "quantization_config", "torch_dtype")}
        return {"architectures": [self.architecture], "model_type": self.model_type, "dtype": top.pop("torch_dtype"), **top,
                "text_config": {"model_type": self.model_type + "_text", **text}}

    def from_json(self, j: dict):
        """Of the flat form; of V4 also the one with layer_types and rope_parameters."""
        j = {**j, **j.get("text_config", {})}
        known = {k: j[k] for k in self.config.__dataclass_fields__ if k in j}
        scaling = j.get("rope_scaling")
        if "compress_rates" in j:
            rate = {"sliding_attention": 0, **j["compress_rates"]}
            scaling = j["rope_parameters"]["compress"]
            known.update(compress_ratios=[rate[t] for t in j["layer_types"]] + [0], num_hash_layers=j["mlp_layer_types"].count("hash_moe"),
                         rope_theta=j["rope_parameters"]["main"]["rope_theta"])
        known.update({k: scaling[of] for k, of in IN_ROPE_SCALING.items() if of in scaling and k in self.config.__dataclass_fields__})
        return self.config(**known)


FAMILIES = {
    "v3": Family("v3", model_v3.V3Config, model_v3.shapes, model_v3.init, model_v3.V3, encoding_v31, encoding_v31.TEMPLATE, "DeepseekV3ForCausalLM", "deepseek_v3",
                 dict(scoring_func="sigmoid", moe_layer_freq=1, ep_size=1, pretraining_tp=1, quantization_config=QUANTIZATION)),
    "v4": Family("v4", model_v4.V4Config, model_v4.shapes, model_v4.init, model_v4.V4, encoding.V4, None, "DeepseekV4ForCausalLM", "deepseek_v4",
                 dict(scoring_func="sqrtsoftplus", expert_dtype="fp4", quantization_config={**QUANTIZATION, "scale_fmt": "ue8m0"})),
    "v41": Family("v41", model_v41.V41Config, model_v41.shapes, model_v41.init, model_v41.V41, encoding.V41, None, "DeepseekV41ForCausalLM", "deepseek_v41",
                  dict(scoring_func="sqrtsoftplus", first_k_dense_replace=0, pad_token_id=2, image_token_id=4069, num_nextn_predict_layers=0,
                       quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0",
                                            "expert_dtype": "fp4"}), nested=True),
}


def family_of(config_json: dict) -> Family:
    return next(f for f in FAMILIES.values() if f.model_type == config_json["model_type"])
