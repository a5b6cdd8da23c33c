"""Units and number types shared by the whole package: bytes, bits per element, rounding helpers."""

from __future__ import annotations

GIB = 1 << 30
MIB = 1 << 20

#: Bytes of one element of a storage type, by the names the engines use.
DTYPE_BYTES: dict[str, float] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "nvfp4": 0.5625,  # 4-bit values plus one fp8 scale per 16 of them
}


def ceil_div(numerator: int, denominator: int) -> int:
    """Smallest integer not below `numerator / denominator`, for a positive `denominator`."""
    return -(-numerator // denominator)


def gib(nbytes: float) -> str:
    """A byte count as text in GiB with two decimals."""
    return f"{nbytes / GIB:.2f} GiB"
