"""Measured times of GPU operators, by shape and number of rows.

`OperatorTables` answers with the shipped tables of one GPU: matrix products, experts, attention, Gated
DeltaNet kernels, all-reduce, and a formula for element-wise kernels. All times are microseconds of one call
on one rank. A look-up takes arrays and returns a `Lookup`: times and a mask of what lies outside the measured
points. A shape that the tables do not hold raises `UncoveredShapeError`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from lab.data import read_csv
from lab.errors import InfeasibleError, UsageError
from lab.profiles.grids import Curve, Floats, Grid, Lookup, mixed
from lab.profiles.system import GPU_NAMES, GpuSystem, check_gpu, load_system

if TYPE_CHECKING:
    import polars as pl

__all__ = ["GPU_NAMES", "GpuSystem", "OperatorTables", "UncoveredShapeError", "load_system", "load_tables"]

#: Columns (n) and depths (k) at which matrix products were measured; a value between two of them is
#: interpolated.
GEMM_GRID = (
    *(32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240),
    *(12288, 16384, 51200, 65536),
)
#: fp8_block128 scales blocks of 128 x 128 weights; narrower matrices stay bf16.
FP8_BLOCK = 128
GEMM_DTYPES = ("bf16", "fp8_tensor", "fp8_block128")
ROUTINGS = ("power_law_1.2", "power_law_1.01", "balanced")
GDN_OPS = ("conv_update", "conv_prefill", "recurrent_decode", "chunk_prefill")

#: Experts (hidden, expert width, top-k, experts) that were not measured, and the measured ones they are
#: estimated from.
MOE_ESTIMATED = {(2048, 512, 10, 512): (2048, 512, 8, 256)}
#: The part of an expert layer's time that does not grow with the bytes of its experts, in that estimate.
MOE_FLOOR_US = 20.0


class UncoveredShapeError(InfeasibleError):
    """No operator table holds this shape; the message says what is covered."""


class OperatorTables:
    """The shipped operator tables of one GPU type; each file is read when it is first needed."""

    def __init__(self, gpu: str) -> None:
        self.gpu = check_gpu(gpu)
        self.system = load_system(self.gpu)

    # Matrix products ----------------------------------------------------------------------------------------

    def gemm(self, dtype: str, n: int, k: int, m: ArrayLike) -> Lookup:
        """`C[m, n] = A[m, k] B[k, n]`, activation quantisation included; linear in m, n and k.

        n below 32 costs as much as 32; n above 65,536 (output heads) is charged in proportion. `fp8_block128`
        with n or k below 128 is priced as bf16.
        """
        return self._gemm_curve(dtype, n, k).at(m)

    def _gemm_curve(self, dtype: str, n: int, k: int) -> Curve:
        if dtype not in GEMM_DTYPES:
            raise UsageError(f"weight_dtype is '{dtype}'; allowed are {', '.join(GEMM_DTYPES)}")
        if dtype == "fp8_block128" and min(n, k) < FP8_BLOCK:
            dtype = "bf16"
        widest = GEMM_GRID[-1]
        if n > widest:
            curve = self._gemm_curve(dtype, widest, k)
            return Curve(curve.points, curve.latency_us * (n / widest))
        (n_low, n_high, n_weight), (k_low, k_high, k_weight) = _neighbours(n), _neighbours(k)
        try:
            low = mixed(self._gemms[dtype, n_low, k_low], self._gemms[dtype, n_high, k_low], n_weight)
            high = mixed(self._gemms[dtype, n_low, k_high], self._gemms[dtype, n_high, k_high], n_weight)
        except KeyError as missing:
            held = sorted(
                {width for kind, width, depth in self._gemms if kind == dtype and depth == missing.args[0][2]}
            )
            raise UncoveredShapeError(
                f"a {dtype} matrix product with n = {n}, k = {k}; "
                f"at k = {missing.args[0][2]} n is measured at {', '.join(map(str, held)) or 'no value'}"
            ) from None
        return mixed(low, high, k_weight)

    @cached_property
    def _gemms(self) -> dict[tuple[Any, ...], Curve]:
        curves = _curves(self._read("gemm.csv.gz"), ["dtype", "n", "k"], "m_tokens")
        spiky = ("fp8_block128", "fp8_tensor") if self.gpu == "b200" else ("fp8_block128",)
        return {key: curve.despiked() if key[0] in spiky else curve for key, curve in curves.items()}

    # Experts ------------------------------------------------------------------------------------------------

    def moe(
        self,
        dtype: str,
        hidden: int,
        expert_inter: int,
        topk: int,
        num_experts: int,
        tp: int,
        m: ArrayLike,
        routing: str = ROUTINGS[0],
    ) -> Lookup:
        """Routed experts of one layer for m tokens: top-k, permutation, both grouped products, weighted sum.

        Every rank holds a slice of every expert. `power_law_*` routing is skewed; `balanced` touches as many
        experts as possible. Linear in m. Experts in `MOE_ESTIMATED` follow from measured ones with the same
        width: equal share of touched experts at twice the bytes, or 10/8 of the work per token, whichever
        takes longer.
        """
        tokens = np.asarray(m, dtype=np.float64)
        experts = (hidden, expert_inter, topk, num_experts)
        if experts in MOE_ESTIMATED:
            like = MOE_ESTIMATED[experts]
            expert_ratio, work_ratio = experts[3] / like[3], experts[2] / like[2]
            curve = self._moe_curve(dtype, like, tp, routing)
            spread = curve.at(tokens * work_ratio / expert_ratio)
            work = curve.at(tokens * work_ratio)
            bytes_us = expert_ratio * (spread.latency_us - MOE_FLOOR_US) + MOE_FLOOR_US
            return Lookup(np.maximum(bytes_us, work.latency_us), work.extrapolated)
        return self._moe_curve(dtype, experts, tp, routing).at(tokens)

    def _moe_curve(self, dtype: str, experts: tuple[int, int, int, int], tp: int, routing: str) -> Curve:
        if routing not in ROUTINGS:
            raise UsageError(f"routing is '{routing}'; allowed are {', '.join(ROUTINGS)}")
        curve = self._experts.get((dtype, *experts, tp, routing))
        if curve is None:
            held = sorted({(kind, size) for kind, *rest, size, _ in self._experts if tuple(rest) == experts})
            covered = (
                ", ".join(f"{kind} over {size}" for kind, size in held)
                if held
                else "hidden/width/top-k/experts " + ", ".join(sorted({_slashed(key[1:5]) for key in self._experts}))
            )
            raise UncoveredShapeError(
                f"{dtype} experts {_slashed(experts)} (hidden/width/top-k/experts) over {tp} ranks; "
                f"covered are {covered}"
            )
        return curve

    @cached_property
    def _experts(self) -> dict[tuple[Any, ...], Curve]:
        frame = self._read("moe.csv.gz")
        frame = frame.filter(frame["moe_ep"] == 1)
        keys = ["dtype", "hidden", "expert_inter", "topk", "num_experts", "moe_tp", "routing"]
        return _curves(frame, keys, "m_tokens")

    # Attention ----------------------------------------------------------------------------------------------

    def attention_decode(
        self, q_heads: int, kv_heads: int, head_dim: int, kv_dtype: str, batch: ArrayLike, kv_len: ArrayLike
    ) -> Lookup:
        """Attention of one layer, one token per request; `kv_len` counts the current one. Linear in both."""
        return self.decode_grid(q_heads, kv_heads, head_dim, kv_dtype).at(batch, kv_len)

    def attention_prefill(
        self, q_heads: int, kv_heads: int, head_dim: int, kv_dtype: str, batch: ArrayLike, q_len: ArrayLike
    ) -> Lookup:
        """Attention of one layer, whole prompts of `q_len` tokens; its square root is linear in `q_len`."""
        return self._attention(self._prefill, q_heads, kv_heads, head_dim, kv_dtype).at(batch, q_len)

    def decode_grid(self, q_heads: int, kv_heads: int, head_dim: int, kv_dtype: str) -> Grid:
        """The measured batches and lengths behind `attention_decode`."""
        return self._attention(self._decode, q_heads, kv_heads, head_dim, kv_dtype)

    def _attention(
        self, grids: dict[tuple[Any, ...], Grid], q_heads: int, kv_heads: int, head_dim: int, kv_dtype: str
    ) -> Grid:
        grid = grids.get((q_heads, kv_heads, head_dim, kv_dtype))
        if grid is None:
            held = sorted({key[:3] for key in grids})
            raise UncoveredShapeError(
                f"{kv_dtype} attention, {q_heads} query and {kv_heads} KV heads of {head_dim} per rank; "
                f"covered are {', '.join(f'{q}/{kv} of {width}' for q, kv, width in held)}"
            )
        return grid

    @cached_property
    def _decode(self) -> dict[tuple[Any, ...], Grid]:
        keys = ["q_heads", "kv_heads", "head_dim", "kv_dtype"]
        return _grids(self._read("attention_decode.csv.gz"), keys, "kv_len_tokens", 1)

    @cached_property
    def _prefill(self) -> dict[tuple[Any, ...], Grid]:
        frame = self._read("attention_prefill.csv.gz")
        keys = ["q_heads", "kv_heads", "head_dim", "kv_dtype"]
        return _grids(frame.filter(frame["math_dtype"] == "bf16"), keys, "q_len_tokens", 2)

    # Gated DeltaNet -----------------------------------------------------------------------------------------

    @property
    def gdn_heads(self) -> tuple[tuple[int, int], ...]:
        """Measured (key heads, value heads) of one rank, all of width 128."""
        return tuple(sorted({key[1:] for key in self._gdn}))

    def nearest_gdn_heads(self, key_heads: int, value_heads: int) -> tuple[int, int]:
        """The measured heads whose state is nearest in bytes (in ratio), then nearest in key heads."""
        return min(
            self.gdn_heads,
            key=lambda held: (abs(np.log(held[1] / value_heads)), abs(np.log(held[0] / key_heads)), held),
        )

    def gdn(self, op: str, key_heads: int, value_heads: int, batch: ArrayLike, seq_len: ArrayLike = 1) -> Lookup:
        """One of `GDN_OPS` for `batch` requests of `seq_len` tokens each, fp32 state; linear in both."""
        grid = self._gdn.get((op, key_heads, value_heads))
        if grid is None:
            raise UncoveredShapeError(
                f"{op} with {key_heads} key and {value_heads} value heads per rank; "
                f"covered are {', '.join(f'{key}/{value}' for key, value in self.gdn_heads)}"
            )
        return grid.at(batch, seq_len)

    def gdn_batches(self, op: str, key_heads: int, value_heads: int) -> Floats:
        """Measured batch sizes of a Gated DeltaNet operator."""
        return self._gdn[op, key_heads, value_heads].batches

    @cached_property
    def _gdn(self) -> dict[tuple[Any, ...], Grid]:
        return _grids(self._read("gdn.csv.gz"), ["op", "key_heads", "value_heads"], "seq_len_tokens", 1)

    # Collectives and small kernels --------------------------------------------------------------------------

    def all_reduce(self, num_gpus: int, message_bytes: ArrayLike) -> Lookup:
        """All-reduce of `message_bytes` on each rank, custom kernel inside a CUDA graph; 0 on one GPU."""
        nbytes = np.asarray(message_bytes, dtype=np.float64)
        if num_gpus == 1:
            return Lookup(np.zeros_like(nbytes), np.zeros(nbytes.shape, dtype=np.bool_))
        curve = self._collectives.get(num_gpus)
        if curve is None:
            raise UncoveredShapeError(f"all-reduce over {num_gpus} GPUs; covered are 1, {_listed(self._collectives)}")
        return curve.at(nbytes)

    @cached_property
    def _collectives(self) -> dict[int, Curve]:
        frame = self._read("allreduce.csv")
        chosen = (frame["launch"] == "cuda_graph") & (frame["op"] == "all_reduce") & (frame["library"] == "custom")
        return {key[0]: curve for key, curve in _curves(frame.filter(chosen), ["num_gpus"], "message_bytes").items()}

    def elementwise(self, nbytes: ArrayLike) -> Floats:
        """A memory-bound kernel: `bytes / (0.8 * bandwidth) + 3 us` (a formula, not a measurement)."""
        rate = self.system.elementwise_bandwidth_factor * self.system.memory_bandwidth_bytes_per_s
        return np.asarray(nbytes, dtype=np.float64) * (1e6 / rate) + self.system.elementwise_constant_us

    def _read(self, name: str) -> pl.DataFrame:
        """A table of this GPU; where a point was measured on several engines the vLLM row is kept."""
        frame = read_csv("ops", f"{self.gpu}_sxm", name)
        engine = "source" if "source" in frame.columns else "engine"
        point = [column for column in frame.columns if column not in (engine, "kernel", *_VALUES)]
        return frame.sort(engine, descending=True, maintain_order=True).unique(point, keep="first", maintain_order=True)


_VALUES = ("latency_us", "latency_min_us", "latency_max_us", "repeats")


@cache
def load_tables(gpu: str) -> OperatorTables:
    """The operator tables of `h200`, `b200` or `h100`, shared by the process; `UsageError` otherwise."""
    return OperatorTables(gpu)


def _neighbours(width: int) -> tuple[int, int, float]:
    """Grid columns around a width and the weight of the upper one; narrower widths count as the first."""
    width = max(width, GEMM_GRID[0])
    if width in GEMM_GRID:
        return width, width, 0.0
    if width > GEMM_GRID[-1]:
        raise UncoveredShapeError(f"a matrix product of depth k = {width}; the deepest one measured is {GEMM_GRID[-1]}")
    low = max(column for column in GEMM_GRID if column < width)
    high = min(column for column in GEMM_GRID if column > width)
    return low, high, (width - low) / (high - low)


def _curves(frame: pl.DataFrame, keys: list[str], x: str) -> dict[tuple[Any, ...], Curve]:
    """One curve per combination of `keys`."""
    groups = frame.sort(*keys, x).partition_by(keys, as_dict=True)
    return {
        key: Curve(part[x].to_numpy().astype(np.float64), part["latency_us"].to_numpy().astype(np.float64))
        for key, part in groups.items()
    }


def _grids(frame: pl.DataFrame, keys: list[str], length: str, power: int) -> dict[tuple[Any, ...], Grid]:
    """One grid of batch by `length` per combination of `keys`."""
    return {
        key: Grid.from_points(part["batch"].to_list(), part[length].to_list(), part["latency_us"].to_list(), power)
        for key, part in frame.partition_by(keys, as_dict=True).items()
    }


def _listed(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in sorted(values))


def _slashed(values: Iterable[int]) -> str:
    return "/".join(str(value) for value in values)
