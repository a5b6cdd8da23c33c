"""Model shapes: what a Hugging Face `config.json` says about bytes, of linear-attention hybrids and plain transformers.

A `ModelShape` knows its layers, its heads and its widths, and from them the bytes of weights, of KV cache per token, of
recurrent state and of convolution state, per data type and tensor-parallel rank. Nothing here is measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.data import data_path, model_names
from lab.errors import UsageError
from lab.units import DTYPE_BYTES

LINEAR = "linear_attention"
FULL = "full_attention"

_MODEL_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid")
#: Transformers without recurrent layers: they have a ledger and can be replayed, but no operator tables.
_PLAIN_MODEL_TYPES = ("qwen3", "qwen3_moe", "llama")
_LARGEST = 10**7
_MOST_LAYERS = 10_000
_STATE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Layers, heads and widths of one hybrid model (whole model; divide by the tensor-parallel size with the methods).

    `kv_lora_rank` and `qk_rope_head_dim` are non-zero for multi-head latent attention, whose cache is one latent row
    per token. `num_experts` is 0 for a dense model, the linear fields are 0 for one without recurrent layers.
    `vector_gate` marks Kimi's delta rule: a gate per key channel.
    """

    name: str
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    vocab_size: int
    max_position_embeddings: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    first_dense_layers: int
    tie_word_embeddings: bool
    attn_output_gate: bool
    mamba_ssm_dtype: str
    mtp_num_hidden_layers: int
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    vector_gate: bool = False

    @property
    def num_linear_layers(self) -> int:
        return self.layer_types.count(LINEAR)

    @property
    def num_full_layers(self) -> int:
        return self.layer_types.count(FULL)

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution of one layer: q, k and v packed."""
        return (
            2 * self.linear_num_key_heads * self.linear_key_head_dim
            + self.linear_num_value_heads * self.linear_value_head_dim
        )

    def check_tensor_parallel(self, tp: int) -> None:
        """Raise `UsageError` unless `tp` divides every head count (KV heads may be replicated)."""
        if tp < 1:
            raise UsageError(f"tensor_parallel_size is {tp}; it must be a positive integer")
        for field in ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"):
            heads = getattr(self, field)
            if heads % tp:
                allowed = [n for n in (1, 2, 4, 8, 16, 32, 64) if self._divisible(n)]
                raise UsageError(
                    f"tensor_parallel_size {tp} does not divide {field} = {heads} of {self.name}; "
                    f"allowed are {', '.join(map(str, allowed))}"
                )

    def _divisible(self, tp: int) -> bool:
        heads = (self.num_attention_heads, self.linear_num_key_heads, self.linear_num_value_heads)
        return all(count % tp == 0 for count in heads)

    # Bytes ------------------------------------------------------------------------------------------------------

    def kv_bytes_per_token_layer(self, kv_dtype: str, tp: int = 1) -> int:
        """Bytes of KV cache that one token needs in one full-attention layer of one rank."""
        width = DTYPE_BYTES[kv_dtype]
        if self.kv_lora_rank:
            return int((self.kv_lora_rank + self.qk_rope_head_dim) * width)
        return int(2 * max(1, self.num_key_value_heads // tp) * self.head_dim * width)

    def state_bytes_layer(self, state_dtype: str, tp: int = 1) -> int:
        """Bytes of one recurrent state `[HV, V, K]` of one layer and request on one rank."""
        elements = self.linear_num_value_heads * self.linear_value_head_dim * self.linear_key_head_dim // tp
        return int(elements * DTYPE_BYTES[state_dtype])

    def conv_row_bytes_layer(self, tp: int = 1) -> int:
        """Bytes of one pre-convolution row (bf16) of one layer on one rank."""
        return self.conv_channels // tp * 2

    def conv_bytes_layer(self, tp: int = 1, extra_rows: int = 0) -> int:
        """Bytes of the convolution history (width - 1 rows, bf16) plus `extra_rows` speculative rows."""
        return self.conv_row_bytes_layer(tp) * (self.linear_conv_kernel_dim - 1 + extra_rows)

    def parameters(self) -> int:
        """Parameters of the language model without the multi-token-prediction layer and any vision tower."""
        return self._quantisable() + self._unquantised()

    def active_parameters(self) -> int:
        """Parameters one token passes through, embeddings included."""
        idle_experts = self.num_experts - self.num_experts_per_tok
        sparse_layers = len(self.layer_types) - self.first_dense_layers
        return self.parameters() - sparse_layers * idle_experts * self._expert() * bool(self.num_experts)

    @property
    def drafting_layers(self) -> int:
        """Layers that draft: the model's multi-token-prediction layers, or one of its own widths if it names none."""
        return max(self.mtp_num_hidden_layers, 1)

    def drafting_parameters(self) -> int:
        """Parameters of the drafting layers (embedding and output head are shared with the model)."""
        layer = self._attention() + self._mlp_quantisable() + self._mlp_unquantised() + 4 * self.hidden_size
        return 2 * self.hidden_size**2 + self.drafting_layers * layer

    def weight_bytes(self, weight_dtype: str, tp: int = 1) -> int:
        """Bytes of weights on one rank.

        With an 8-bit or 4-bit `weight_dtype` the projections and experts shrink and the router, the gate projections,
        the norms, the embedding and the output head stay bf16 (the usual exclusions of quantised checkpoints).
        """
        quantised = self._quantisable() * DTYPE_BYTES[_weight_storage(weight_dtype)]
        return round((quantised + 2 * self._unquantised()) / tp)

    def drafting_weight_bytes(self, weight_dtype: str, tp: int = 1) -> int:
        """Bytes of the drafting layers on one rank; their input projection stays bf16."""
        fusion = 2 * self.hidden_size**2
        rest = (self.drafting_parameters() - fusion) * DTYPE_BYTES[_weight_storage(weight_dtype)]
        return round((2 * fusion + rest) / tp)

    # Parameter counts per part ---------------------------------------------------------------------------------

    def _expert(self) -> int:
        return 3 * self.hidden_size * self.moe_intermediate_size

    def _mlp_quantisable(self) -> int:
        if self.is_moe:
            shared = 3 * self.hidden_size * self.shared_expert_intermediate_size
            return self.num_experts * self._expert() + shared
        return 3 * self.hidden_size * self.intermediate_size

    def _mlp_unquantised(self) -> int:
        return self.hidden_size * (self.num_experts + 1) if self.is_moe else 0

    def _attention(self) -> int:
        if self.kv_lora_rank:
            query = self.hidden_size * self.num_attention_heads * (self.head_dim + self.qk_rope_head_dim)
            compressed = self.hidden_size * (self.kv_lora_rank + self.qk_rope_head_dim)
            keys_values = self.kv_lora_rank * self.num_attention_heads * 2 * self.head_dim
            output = self.num_attention_heads * self.head_dim * self.hidden_size
            return query + compressed + keys_values + output
        query = self.num_attention_heads * self.head_dim * (2 if self.attn_output_gate else 1)
        keys_values = 2 * self.num_key_value_heads * self.head_dim
        output = self.num_attention_heads * self.head_dim
        return self.hidden_size * (query + keys_values + output) + 2 * self.head_dim

    def _linear_attention(self) -> int:
        value_width = self.linear_num_value_heads * self.linear_value_head_dim
        if self.vector_gate:
            low_rank = 2 * (self.hidden_size * self.linear_key_head_dim + self.linear_key_head_dim * value_width)
            return self.hidden_size * (self.conv_channels + value_width) + low_rank
        return self.hidden_size * (self.conv_channels + 2 * value_width)

    def _quantisable(self) -> int:
        total = self.num_linear_layers * self._linear_attention() + self.num_full_layers * self._attention()
        dense = self.first_dense_layers
        total += (len(self.layer_types) - dense) * self._mlp_quantisable()
        return total + dense * 3 * self.hidden_size * self.intermediate_size

    def _unquantised(self) -> int:
        per_linear = 2 * self.hidden_size * self.linear_num_value_heads  # the b and a projections
        per_linear += self.conv_channels * self.linear_conv_kernel_dim
        per_linear += 2 * self.linear_num_value_heads + self.linear_value_head_dim
        norms = (2 * len(self.layer_types) + 1) * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        routers = (len(self.layer_types) - self.first_dense_layers) * self._mlp_unquantised()
        return self.num_linear_layers * per_linear + norms + embeddings + routers


def _weight_storage(weight_dtype: str) -> str:
    """Storage type of quantised weights, by the names of the operator tables."""
    names = {"bf16": "bfloat16", "fp8_tensor": "fp8", "fp8_block128": "fp8", "nvfp4": "nvfp4"}
    if weight_dtype not in names:
        raise UsageError(f"weight_dtype is '{weight_dtype}'; allowed are {', '.join(names)}")
    return names[weight_dtype]


def load_shape(model: str) -> ModelShape:
    """Shape of a shipped model (any letter case) or of the `config.json` at a path.

    Raises `UsageError` when the name is unknown, the file cannot be read, or a field is missing or impossible.
    """
    shipped = {name.lower(): name for name in model_names()}
    if model.lower() in shipped:
        name = shipped[model.lower()]
        path: Path = data_path("models", f"{name}.json")
    else:
        path = Path(model)
        if path.is_dir():
            path = path / "config.json"
        name = path.parent.name if path.name == "config.json" else path.stem
        if len(model) > 4096 or not path.is_file():
            raise UsageError(
                f"model '{model[:200]}' is neither a shipped shape nor a config.json; shipped are "
                f"{', '.join(model_names())}"
            )
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path.name} of model '{model}' as JSON: {error}") from error
    return parse_config(raw, name or "model")


def parse_config(raw: Any, name: str) -> ModelShape:
    """`ModelShape` from the decoded content of a Hugging Face `config.json` (a nested `text_config` is followed).

    Raises `UsageError` with the field, its value and what is allowed.
    """
    if not isinstance(raw, Mapping):
        raise UsageError(f"config of {name} must be a JSON object, not {type(raw).__name__}")
    if isinstance(raw.get("text_config"), Mapping):
        raw = raw["text_config"]
    config = _Config(raw, name)
    if raw.get("model_type") == "kimi_linear":
        return _parse_kimi(config)
    heads = config.count("num_attention_heads")
    hidden = config.count("hidden_size")
    experts = config.count("num_experts", 0)
    plain = 0 if raw.get("model_type") in _PLAIN_MODEL_TYPES else None
    gated = plain is None and str(raw.get("model_type", "")).startswith("qwen3")
    key_heads = config.count("linear_num_key_heads", plain)
    value_heads = config.count("linear_num_value_heads", plain)
    if key_heads and value_heads % key_heads:
        raise UsageError(
            f"{name}: linear_num_value_heads = {value_heads} must be a multiple of linear_num_key_heads = {key_heads}"
        )
    chosen = config.count("num_experts_per_tok", None if experts else 0)
    if chosen > experts:
        raise UsageError(f"{name}: num_experts_per_tok = {chosen} is more than num_experts = {experts}")
    return ModelShape(
        name=name,
        hidden_size=hidden,
        layer_types=config.layer_types(),
        num_attention_heads=heads,
        num_key_value_heads=config.count("num_key_value_heads"),
        head_dim=config.whole("head_dim", raw.get("head_dim", hidden // heads)),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=config.count("linear_key_head_dim", plain),
        linear_value_head_dim=config.count("linear_value_head_dim", plain),
        linear_conv_kernel_dim=config.whole("linear_conv_kernel_dim", raw.get("linear_conv_kernel_dim", 4)),
        vocab_size=config.count("vocab_size"),
        max_position_embeddings=config.count("max_position_embeddings", 262144),
        intermediate_size=config.count("intermediate_size", 0 if experts else None),
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=config.count("moe_intermediate_size", None if experts else 0),
        shared_expert_intermediate_size=config.count("shared_expert_intermediate_size", 0),
        first_dense_layers=0,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attn_output_gate=bool(raw.get("attn_output_gate", gated)),
        mamba_ssm_dtype=config.state_dtype(),
        mtp_num_hidden_layers=config.count("mtp_num_hidden_layers", 0),
    )


def _parse_kimi(config: _Config) -> ModelShape:
    """Kimi-Linear: Kimi Delta Attention (vector gate) beside multi-head latent attention."""
    raw = config.raw
    linear = raw.get("linear_attn_config") if isinstance(raw.get("linear_attn_config"), Mapping) else {}
    assert isinstance(linear, Mapping)
    heads = config.whole("num_heads", linear.get("num_heads") or raw.get("linear_num_heads"))
    width = config.whole("head_dim", linear.get("head_dim") or raw.get("linear_head_dim"))
    layers = config.count("num_hidden_layers")
    full = linear.get("full_attn_layers")
    if full is None:
        types = config.layer_types()
    else:
        if not isinstance(full, list) or not full or not all(isinstance(i, int) and 1 <= i <= layers for i in full):
            raise UsageError(f"{config.name}: full_attn_layers must list layers from 1 to num_hidden_layers = {layers}")
        types = tuple(FULL if i + 1 in full else LINEAR for i in range(layers))
    experts = config.count("num_experts", None) if "num_experts" in raw else config.count("num_local_experts")
    expert_width = config.count("moe_intermediate_size")
    return ModelShape(
        name=config.name,
        hidden_size=config.count("hidden_size"),
        layer_types=types,
        num_attention_heads=config.count("num_attention_heads"),
        num_key_value_heads=config.count("num_key_value_heads"),
        head_dim=config.count("v_head_dim"),
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        linear_conv_kernel_dim=config.whole(
            "linear_conv_kernel_dim", linear.get("short_conv_kernel_size") or raw.get("linear_conv_kernel_dim", 4)
        ),
        vocab_size=config.count("vocab_size"),
        max_position_embeddings=config.count("max_position_embeddings", 1048576),
        intermediate_size=config.count("intermediate_size"),
        num_experts=experts,
        num_experts_per_tok=config.whole(
            "num_experts_per_tok", raw.get("num_experts_per_tok") or raw.get("num_experts_per_token", 8)
        ),
        moe_intermediate_size=expert_width,
        shared_expert_intermediate_size=expert_width * config.count("num_shared_experts", 1),
        first_dense_layers=min(config.count("first_k_dense_replace", 1), layers),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attn_output_gate=False,
        mamba_ssm_dtype=config.state_dtype(),
        mtp_num_hidden_layers=config.count("num_nextn_predict_layers", 0),
        kv_lora_rank=config.count("kv_lora_rank"),
        qk_rope_head_dim=config.count("qk_rope_head_dim"),
        vector_gate=True,
    )


class _Config:
    """Checked access to the keys of one configuration."""

    def __init__(self, raw: Mapping[str, Any], name: str) -> None:
        self.raw = raw
        self.name = name

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number >= 0 (>= 1 where there is no default)."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                model_type = self.raw.get("model_type", "not given")
                raise UsageError(
                    f"{self.name}: config has no '{key}' (model_type {model_type}); a hybrid of the kinds "
                    f"{', '.join(_MODEL_TYPES)} is needed"
                )
            return default
        return self.whole(key, value, 1 if default is None else 0)

    def whole(self, key: str, value: Any, least: int = 1) -> int:
        """A value that must be a whole number from `least` to `_LARGEST`."""
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
            shown = repr(value)[:60] if not isinstance(value, int) or value.bit_length() < 200 else "a huge number"
            raise UsageError(f"{self.name}: {key} = {shown}; a whole number from {least} to {_LARGEST} is needed")
        return value

    def layer_types(self) -> tuple[str, ...]:
        """The kind of every layer, from `layer_types` or from `full_attention_interval`."""
        layers = self.count("num_hidden_layers")
        if layers > _MOST_LAYERS:
            raise UsageError(f"{self.name}: num_hidden_layers = {layers}; at most {_MOST_LAYERS} are supported")
        types = self.raw.get("layer_types")
        kind = self.raw.get("model_type")
        plain = kind in _PLAIN_MODEL_TYPES
        if types is None and plain:
            types = [FULL] * layers
        if types is None:
            interval = self.count("full_attention_interval")
            types = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)]
        if not isinstance(types, list) or any(kind not in (LINEAR, FULL) for kind in types) or len(types) != layers:
            raise UsageError(
                f"{self.name}: layer_types must list {layers} entries (num_hidden_layers), each '{LINEAR}' or '{FULL}'"
            )
        if plain and LINEAR in types:
            raise UsageError(f"{self.name}: layer_types holds '{LINEAR}', which model_type {kind} does not have")
        if not plain and (LINEAR not in types or FULL not in types):
            raise UsageError(
                f"{self.name}: layer_types or full_attention_interval give one kind of layer only; a hybrid has both"
            )
        return tuple(types)

    def state_dtype(self) -> str:
        value = self.raw.get("mamba_ssm_dtype", "float32")
        if value not in _STATE_DTYPES:
            raise UsageError(f"{self.name}: mamba_ssm_dtype = {value!r}; allowed are {', '.join(_STATE_DTYPES)}")
        return str(value)
