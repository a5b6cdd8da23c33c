"""Model shapes: parsing, bytes, and the figures that public sources give for them."""

from __future__ import annotations

import json

import pytest

from lab.data import data_path, model_names
from lab.errors import UsageError
from lab.shapes import FULL, LINEAR, load_shape, parse_config
from lab.units import MIB

# layers GDN, layers full, state MiB fp32, KV bytes per token bf16, conv MiB: the engines' public model pages.
FIGURES = {
    "Qwen3.5-35B-A3B": (30, 10, 60, 20_480, 1.41),
    "Qwen3.5-27B": (48, 16, 144, 65_536, 2.81),
    "Qwen3.5-122B-A10B": (36, 12, 144, 24_576, 2.53),
    "Qwen3.5-397B-A17B": (45, 15, 180, 30_720, 3.16),
    "Qwen3.5-9B": (24, 8, 48, 32_768, 1.13),
    "Qwen3-Next-80B-A3B-Instruct": (36, 12, 72, 24_576, 1.69),
    "Kimi-Linear-48B-A3B": (20, 7, 40, 8_064, 1.41),
}
# Billions of parameters without drafting layer and vision tower.
PARAMETERS = {
    "Olmo-Hybrid-7B": 7.43,
    "Qwen3-Next-80B-A3B-Instruct": 79.67,
    "Qwen3.5-0.8B": 0.75,
    "Qwen3.5-122B-A10B": 122.11,
    "Qwen3.5-27B": 26.89,
    "Qwen3.5-35B-A3B": 34.66,
    "Qwen3.5-397B-A17B": 396.34,
    "Qwen3.5-4B": 4.2,
    "Qwen3.5-9B": 8.95,
}


@pytest.mark.parametrize("name", FIGURES)
def test_layers_state_and_kv_match_the_published_figures(name: str) -> None:
    linear, full, state_mib, kv_bytes, conv_mib = FIGURES[name]
    shape = load_shape(name)
    assert (shape.num_linear_layers, shape.num_full_layers) == (linear, full)
    assert linear * shape.state_bytes_layer("float32") == state_mib * MIB
    assert full * shape.kv_bytes_per_token_layer("bfloat16") == kv_bytes
    assert linear * shape.conv_bytes_layer() / MIB == pytest.approx(conv_mib, abs=0.006)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count_matches_the_model_card(name: str) -> None:
    assert load_shape(name).parameters() / 1e9 == pytest.approx(PARAMETERS[name], abs=0.012)


def test_active_parameters_of_the_397b() -> None:
    assert load_shape("Qwen3.5-397B-A17B").active_parameters() / 1e9 == pytest.approx(17.2, rel=0.02)


def test_names_are_found_in_any_letter_case() -> None:
    assert load_shape("qwen3.5-35b-a3b") == load_shape("Qwen3.5-35B-A3B")


def test_every_shipped_model_loads() -> None:
    assert len(model_names()) == 14
    for name in model_names():
        assert load_shape(name).name == name


def test_a_nested_text_config_and_an_interval_give_the_same_shape(tmp_path: object) -> None:
    raw = json.loads(data_path("models", "Qwen3.5-35B-A3B.json").read_text())
    flat = parse_config(raw, "m")
    raw.pop("layer_types")
    assert parse_config({"text_config": raw, "model_type": "qwen3_5_moe"}, "m") == flat
    assert flat.layer_types[:4] == (LINEAR, LINEAR, LINEAR, FULL)


def test_kimi_reads_the_layer_list_of_its_own_config() -> None:
    raw = json.loads(data_path("models", "Kimi-Linear-48B-A3B.json").read_text())
    raw.pop("layer_types")
    raw["linear_attn_config"] = {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "num_heads": 32,
        "head_dim": 128,
    }
    assert parse_config(raw, "Kimi-Linear-48B-A3B").layer_types == load_shape("Kimi-Linear-48B-A3B").layer_types


def test_weights_shrink_with_quantisation_but_embeddings_do_not() -> None:
    shape = load_shape("Qwen3.5-35B-A3B")
    bf16, fp8 = shape.weight_bytes("bf16"), shape.weight_bytes("fp8_block128")
    embeddings = 2 * 2 * shape.vocab_size * shape.hidden_size
    assert bf16 == 2 * shape.parameters()
    assert embeddings + (bf16 - embeddings) / 2 < fp8 < bf16
    assert shape.weight_bytes("bf16", tp=2) == bf16 // 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_key_heads": None}, "config has no 'linear_num_key_heads'"),
        ({"hidden_size": -5}, "hidden_size = -5"),
        ({"hidden_size": "big"}, "hidden_size = 'big'"),
        ({"linear_num_value_heads": 30}, "must be a multiple of linear_num_key_heads"),
        ({"layer_types": ["linear_attention"] * 40}, "one kind of layer only"),
        ({"layer_types": ["mamba"] * 40}, "layer_types must list 40 entries"),
        ({"mamba_ssm_dtype": "float8"}, "mamba_ssm_dtype = 'float8'; allowed are float32"),
    ],
)
def test_a_bad_config_is_refused_by_field(change: dict[str, object], message: str) -> None:
    raw = json.loads(data_path("models", "Qwen3.5-35B-A3B.json").read_text()) | change
    with pytest.raises(UsageError, match=message):
        parse_config(raw, "m")


def test_unknown_models_and_tensor_parallel_sizes_name_what_is_allowed() -> None:
    with pytest.raises(UsageError, match=r"shipped are .*Qwen3\.5-35B-A3B"):
        load_shape("Qwen9")
    with pytest.raises(
        UsageError, match=r"tensor_parallel_size 3 does not divide num_attention_heads = 16.*1, 2, 4, 8"
    ):
        load_shape("Qwen3.5-35B-A3B").check_tensor_parallel(3)
