"""Element types of tensors: their names in torch (used on the wire, too) and in safetensors files, and their sizes.

Source of the safetensors names: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

SAFETENSORS = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16",
    "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""torch name → safetensors name."""

TORCH = {safetensors: torch for torch, safetensors in SAFETENSORS.items()}
"""safetensors name → torch name."""

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1,
}  # fmt: skip
"""torch name → bytes of one element."""

WEIGHTS = ("float32", "bfloat16", "float16")
"""torch names of the element types that a policy's weights may have on the wire."""
