"""The memory ledger against start-up logs of real engines: every integer must match."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from lab.errors import InfeasibleError, UsageError
from lab.methods import METHODS, get_method
from lab.profiles.system import load_system
from lab.shapes import load_shape
from lab.trees import DraftTree
from lab.units import GIB
from simulator.ledger import Ledger, build_ledger
from simulator.memory import (
    PoolLayout,
    kv_cache_tokens,
    kv_cache_tokens_before_0_20,
    max_concurrency,
    max_concurrency_running_scratch,
    pool_layout,
)
from simulator.settings import EngineSettings

LOGS = Path(__file__).parents[1] / "golden" / "kv_cache_logs.csv"


def layout(model: str, tp: int = 1, kv: str = "bfloat16", drafts: int = 0, align: bool = True) -> PoolLayout:
    method = get_method("storeall" if drafts else "recurrent")
    shape = load_shape(model)
    return pool_layout(shape, tp, kv, "float32", method, DraftTree.chain(drafts), prefix_caching=align)


def ledger(
    model: str,
    gpu: str | None = "h200",
    tree: str | int = 0,
    method: str = "storeall",
    tp: int = 1,
    **settings: object,
) -> Ledger:
    draft_tree = (
        DraftTree.chain(tree) if isinstance(tree, int) else DraftTree.from_widths([int(w) for w in tree.split(",")])
    )
    return build_ledger(
        load_shape(model), gpu, tp, EngineSettings.model_validate(settings), get_method(method), draft_tree
    )


@pytest.mark.parametrize(
    (
        "model",
        "drafts",
        "align",
        "block",
        "padding_percent",
        "group",
        "block_bytes",
        "blocks",
        "per_request",
        "concurrency",
        "tokens",
    ),
    [
        ("Qwen3.5-35B-A3B", 0, True, 1056, 0.76, 10, 21_626_880, 2978, 38, 78.37, 2_567_976),
        ("Qwen3.5-35B-A3B", 3, True, 1072, 0.00, 11, 24_150_016, 2667, 46, 57.98, 1_899_831),
        ("Qwen3.5-27B", 3, True, 800, 0.25, 17, 55_705_600, 1156, 56, 20.64, 676_425),
        ("Qwen3.5-27B", 0, False, 784, 0.13, 16, 51_380_224, 1253, 45, 27.84, 912_406),
    ],
)
def test_worked_examples_of_a_60_gib_pool(
    model: str,
    drafts: int,
    align: bool,
    block: int,
    padding_percent: float,
    group: int,
    block_bytes: int,
    blocks: int,
    per_request: int,
    concurrency: float,
    tokens: int,
) -> None:
    result = ledger(
        model, None, drafts, enable_prefix_caching=align, kv_cache_memory_bytes=60 * GIB, max_model_len=32768
    )
    assert result.layout.block_size_tokens == block
    assert round(100 * result.layout.padding_fraction, 2) == padding_percent
    assert result.layout.group_size == group
    assert result.layout.bytes_per_block == block_bytes
    assert result.num_gpu_blocks == blocks
    assert result.blocks_per_request == per_request
    assert round(result.max_concurrency, 2) == concurrency
    assert result.kv_cache_tokens == tokens


@pytest.mark.parametrize(
    (
        "model",
        "tp",
        "kv",
        "drafts",
        "align",
        "max_model_len",
        "blocks",
        "per_request",
        "tokens",
        "concurrency",
    ),
    [
        # mitchross/talos-argocd-proxmox pull 1995: Qwen3.8-27B-FP8, two RTX 3090
        ("Qwen3.5-27B", 2, "fp8", 0, True, 131_072, 208, 90, 302_921, 2.31),
        # noonghunna/club-3090 issues 612 and 652: Qwen3.6-35B-A3B NVFP4, RTX 5090
        ("Qwen3.6-35B-A3B", 1, "fp8", 0, True, 131_072, 299, 69, 567_978, 4.33),
        ("Qwen3.6-35B-A3B", 1, "fp8", 0, True, 131_072, 300, 69, 569_878, 4.35),
        # vllm-project/vllm issue 55580: Qwen3.8-27B INT4, two starts of one command
        ("Qwen3.5-27B", 2, "fp8", 0, True, 163_840, 124, 111, 183_028, 1.12),
        ("Qwen3.5-27B", 2, "fp8", 0, True, 163_840, 130, 111, 191_884, 1.17),
    ],
)
def test_golden_start_up_logs(
    model: str,
    tp: int,
    kv: str,
    drafts: int,
    align: bool,
    max_model_len: int,
    blocks: int,
    per_request: int,
    tokens: int,
    concurrency: float,
) -> None:
    result = layout(model, tp, kv, drafts, align)
    assert result.blocks_per_request(max_model_len) == per_request
    assert kv_cache_tokens(blocks, per_request, max_model_len) == tokens
    assert round(float(max_concurrency(blocks, per_request)), 2) == concurrency


def test_golden_log_with_the_older_token_count() -> None:
    # vllm-project/vllm issue 40691: Qwen3.5-27B on one H20, vLLM 0.19.0, no prefix cache
    result = layout("Qwen3.5-27B", align=False)
    assert (result.block_size_tokens, result.blocks_per_request(32_768)) == (784, 45)
    assert kv_cache_tokens_before_0_20(1487, result.attention_groups + result.linear_groups, 784) == 290_864
    assert round(float(max_concurrency(1487, 45)), 2) == 33.04


def test_golden_log_with_scratch_per_running_request() -> None:
    # vllm-project/vllm pull 57261: 873 blocks, 45 per request, three groups, three drafts, max_num_seqs 8
    assert round(float(max_concurrency(873, 45)), 2) == 19.40
    assert kv_cache_tokens(873, 45, 32_768) == 635_699
    proposed = max_concurrency_running_scratch(873, 45, max_num_seqs=8, linear_groups=3, drafts=3)
    assert round(float(proposed), 2) == 22.25
    assert int(proposed * 32_768) == 729_088


def test_golden_block_sizes_by_drafts() -> None:
    # 27B, two ranks, fp8 KV, fp32 state, 0 to 3 drafts
    assert [layout("Qwen3.5-27B", 2, "fp8", k).block_size_tokens for k in range(4)] == [
        1568,
        1584,
        1600,
        1600,
    ]


@pytest.mark.parametrize(
    ("model", "fp32", "bf16"),
    [
        ("Qwen3.5-35B-A3B", 1056, 544),
        ("Qwen3.5-27B", 784, 400),
        ("Qwen3.5-122B-A10B", 2096, 1072),
        ("Qwen3.5-397B-A17B", 2096, 1072),
        ("Qwen3-Next-80B-A3B-Instruct", 1056, 544),
    ],
)
def test_block_sizes_by_model_and_state_dtype(model: str, fp32: int, bf16: int) -> None:
    for dtype, block in (("float32", fp32), ("bfloat16", bf16)):
        result = pool_layout(load_shape(model), 1, "bfloat16", dtype, get_method("recurrent"), DraftTree.chain(0))
        assert result.block_size_tokens == block


def usable_logs() -> list[dict[str, str]]:
    """Rows that give tokens, max_model_len and all settings, as the engine printed them.

    Left out: block sizes alone, shapes that are not public, figures that the author computed or rounded (k006, k023,
    k043), and k003, an unnamed build of May 2026 whose count no rule of a known version gives.
    """
    with LOGS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    left_out = {"k003", "k006", "k010", "k023", "k038", "k043"}
    return [row for row in rows if row["kv_tokens"] and row["max_model_len"] and row["id"] not in left_out]


SHAPE_OF = {"Qwen3.8-27B": "Qwen3.6-27B", "Qwen-AgentWorld-35B-A3B": "Qwen3.6-35B-A3B"}


def test_eight_logs_are_usable() -> None:
    assert len(usable_logs()) == 8


@pytest.mark.parametrize("row", usable_logs(), ids=lambda row: row["id"])
def test_logged_kv_tokens_and_concurrency(row: dict[str, str]) -> None:
    drafts = int(row["spec_k"] or 0)
    max_model_len = int(row["max_model_len"])
    result = layout(SHAPE_OF.get(row["model"], row["model"]), int(row["tp"]), "fp8", drafts)
    per_request = result.blocks_per_request(max_model_len)
    blocks = -(-int(row["kv_tokens"]) * per_request // max_model_len)
    assert kv_cache_tokens(blocks, per_request, max_model_len) == int(row["kv_tokens"])
    assert round(float(max_concurrency(blocks, per_request)), 2) == float(row["max_concurrency_x"])
    if row["avail_kv_gib_per_gpu"]:
        available = float(row["avail_kv_gib_per_gpu"])
        assert (
            (available - 0.005) * GIB // result.bytes_per_block
            <= blocks
            <= (available + 0.005) * GIB / result.bytes_per_block
        )


@pytest.mark.parametrize("gpu", ["h200", "b200", "h100"])
@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("tp", [2, 4])
def test_inv_7_lines_add_up_to_the_whole_memory(gpu: str, method: str, tp: int) -> None:
    tree = 0 if METHODS[method].topology == "decode" else 3
    for settings in ({}, {"num_gpu_blocks_override": 300}, {"kv_cache_memory_bytes": 9 * GIB + 12345}):
        result = ledger("Qwen3.5-35B-A3B", gpu, tree, method, tp, max_num_seqs=64, **settings)
        assert sum(result.lines.values()) == load_system(gpu).memory_capacity_bytes
        assert min(result.lines.values()) >= 0


def test_a_measured_block_count_overrides_the_estimate_and_says_so() -> None:
    assert ledger("Qwen3.5-35B-A3B").gpu_blocks_source == "estimated"
    result = ledger("Qwen3.5-35B-A3B", None, num_gpu_blocks_override=2000)
    assert (result.num_gpu_blocks, result.gpu_blocks_source) == (2000, "override")


def test_methods_with_one_state_hold_one_block_per_group_and_their_records_aside() -> None:
    storeall = ledger("Qwen3.5-35B-A3B", tree="2,2,2")
    treelog = ledger("Qwen3.5-35B-A3B", tree="2,2,2", method="treelog")
    assert storeall.layout.state_blocks_per_request == 3 * 15
    assert treelog.layout.state_blocks_per_request == 3
    assert storeall.lines["method_scratch"] == 0
    assert treelog.lines["method_scratch"] == 256 * 30 * (16 + 15) * 20_608


def test_refusals_give_the_number_that_works() -> None:
    result = ledger("Qwen3.5-27B", tree=3, method="treelog", max_num_seqs=1)
    viable = result.max_viable_num_seqs
    at_limit = ledger("Qwen3.5-27B", tree=3, method="treelog", max_num_seqs=viable)
    at_limit.check_num_seqs(viable)
    with pytest.raises(InfeasibleError):
        ledger("Qwen3.5-27B", tree=3, method="treelog", max_num_seqs=viable + 1).check_num_seqs(viable + 1)
    with pytest.raises(
        InfeasibleError, match=rf"max_num_seqs \(4000\) exceeds .* largest viable max_num_seqs is {viable}"
    ):
        result.check_num_seqs(4000)


def test_a_length_that_does_not_fit_names_the_largest_that_does() -> None:
    result = ledger("Qwen3.5-35B-A3B", None, num_gpu_blocks_override=20, max_model_len=32_768)
    with pytest.raises(InfeasibleError, match="largest max_model_len that fits is 16896"):
        result.check_fits()
    ledger("Qwen3.5-35B-A3B", None, num_gpu_blocks_override=20, max_model_len=16_896).check_fits()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ledger("Qwen3.5-397B-A17B"),
            "does not fit on h200 .* raise gpu_memory_utilization or tensor",
        ),
        (lambda: ledger("Qwen3.5-35B-A3B", None), "name a gpu, or give num_gpu_blocks_override"),
        (lambda: ledger("Qwen3.5-35B-A3B", num_gpu_blocks_override=9000), "give fewer blocks or bytes"),
        (lambda: ledger("Qwen3.5-35B-A3B", tp=3), "tensor_parallel_size 3 does not divide"),
        (lambda: ledger("Qwen3.5-35B-A3B", tree="2,2", method="replayssm"), "verifies chains only"),
        (lambda: ledger("Qwen3.5-35B-A3B", "h20"), "gpu is 'h20'; allowed are h200, b200, h100"),
    ],
)
def test_impossible_requests_are_one_clear_sentence(call: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()  # type: ignore[operator]
