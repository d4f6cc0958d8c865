"""The two architectures by name: what the programs around a model need to know of each."""
from dataclasses import dataclass
from types import ModuleType
from typing import Callable

import encoding
import encoding_v31
import model_v3
import model_v4

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
    encoding: ModuleType   # render and parse
    chat_template: str | None  # of tokenizer_config.json; V4 has none
    architecture: str
    model_type: str
    extra: dict            # keys of config.json that no field of the config says

    def to_json(self, c, max_len: int) -> dict:
        """The flat config.json of the published checkpoints."""
        j = {"architectures": [self.architecture], "model_type": self.model_type}
        fields = {k: getattr(c, k) for k in c.__dataclass_fields__}
        j.update({k: v for k, v in fields.items() if k not in IN_ROPE_SCALING})
        j.update(COMMON, max_position_embeddings=max_len, rope_scaling={"type": "yarn", **{to: fields[k] for k, to in IN_ROPE_SCALING.items() if k in fields}})
        j.update(self.extra, num_key_value_heads=j["num_attention_heads"] if self.name == "v3" else 1)
        return j

    def from_json(self, j: dict):
        """Of the flat form; of V4 also the nested one (layer_types, rope_parameters)."""
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
    "v4": Family("v4", model_v4.V4Config, model_v4.shapes, model_v4.init, model_v4.V4, encoding, None, "DeepseekV4ForCausalLM", "deepseek_v4",
                 dict(scoring_func="sqrtsoftplus", expert_dtype="fp4", quantization_config={**QUANTIZATION, "scale_fmt": "ue8m0"})),
}


def family_of(config_json: dict) -> Family:
    return next(f for f in FAMILIES.values() if f.model_type == config_json["model_type"])
