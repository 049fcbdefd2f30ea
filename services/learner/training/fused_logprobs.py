"""Log-probs and entropies on CUDA, by two kernels that read the logits as they are; of the vocabulary's size they write the gradient only.

    forward    logits [R, V] ─► largest, Σ eˣ, Σ eˣ·x, target's x, with x = logit / temperature − largest: [R] each
    backward   logits, and these ─► gradient [R, V], in the logits' dtype

A row is read by one program in one order: its sums are the same bits every time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

_BLOCK = 4096
_WARPS = 8

Figures = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Largest, Σ eˣ, Σ eˣ·x, and the target's x, float32 [R] each."""


def row_figures(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> Figures:
    """The figures of each row. `targets`: int64 [R]; the figure of one that is −1, in another rank's slice, is 0."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, width = logits.shape
    peak, total, weighted, chosen = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _read_rows[(rows,)](
            logits, targets, peak, total, weighted, chosen, logits.stride(0), width, temperature, BLOCK=_BLOCK, num_warps=_WARPS
        )  # fmt: skip
    return peak, total, weighted, chosen


def gradient_of(
    logits: torch.Tensor, targets: torch.Tensor, peak: torch.Tensor, total: torch.Tensor, entropy: torch.Tensor,
    grad: torch.Tensor, entropy_grad: torch.Tensor, temperature: float,
) -> torch.Tensor:  # fmt: skip
    """[R, V], of the log-probs' gradient and the entropies': see `logprobs`, with [R] each."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, width = logits.shape
    gradient = torch.empty(rows, width, dtype=logits.dtype, device=logits.device)
    if rows:
        _write_rows[(rows,)](
            logits, targets, peak, total, entropy, grad.contiguous(), entropy_grad.contiguous(), gradient, logits.stride(0), width,
            temperature, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return gradient


@triton.jit  # type: ignore[untyped-decorator]
def _read_rows(  # type: ignore[no-untyped-def]  # noqa: ANN202
    logits, targets, peak, total, weighted, chosen, stride, width, temperature, BLOCK: tl.constexpr  # noqa: ANN001, N803
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    most = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, width, BLOCK):
        place = first + tl.arange(0, BLOCK)
        x = tl.load(start + place, mask=place < width, other=-float("inf")).to(tl.float32) / temperature
        most = tl.maximum(most, x)
    largest = tl.max(most, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        place = first + tl.arange(0, BLOCK)
        x = tl.load(start + place, mask=place < width, other=-float("inf")).to(tl.float32) / temperature - largest
        weight = tl.exp(x)
        sums += weight
        products += tl.where(weight > 0.0, weight * x, 0.0)  # 0 · −∞ is the term of an impossible token
    target = tl.load(targets + row)
    x = tl.load(start + target, mask=target >= 0, other=0.0).to(tl.float32) / temperature
    tl.store(peak + row, largest)
    tl.store(total + row, tl.sum(sums, 0))
    tl.store(weighted + row, tl.sum(products, 0))
    tl.store(chosen + row, tl.where(target >= 0, x - largest, 0.0))


@triton.jit  # type: ignore[untyped-decorator]
def _write_rows(  # type: ignore[no-untyped-def]  # noqa: ANN202
    logits, targets, peak, total, entropy, grad, entropy_grad, gradient, stride, width, temperature, BLOCK: tl.constexpr  # noqa: ANN001, N803
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    largest, log_total = tl.load(peak + row), tl.log(tl.load(total + row))
    target, whole = tl.load(targets + row), tl.load(entropy + row)
    scale, entropy_scale = tl.load(grad + row) / temperature, tl.load(entropy_grad + row) / temperature
    for first in range(0, width, BLOCK):
        place = first + tl.arange(0, BLOCK)
        x = tl.load(start + place, mask=place < width, other=-float("inf")).to(tl.float32) / temperature
        logprob = x - largest - log_total
        share = tl.exp(logprob)
        of_entropy = tl.where(share > 0.0, entropy_scale * share * (logprob + whole), 0.0)
        found = tl.where(place == target, scale, 0.0) - scale * share - of_entropy
        tl.store(gradient + row * width + place, found.to(gradient.dtype.element_ty), mask=place < width)


class FusedTokenLogprobs(torch.autograd.Function):
    """`logprobs.token_logprobs` in these kernels."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  torch's own type of it is private
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        first: int,
        reduce: Any,  # noqa: ANN401
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`first`: id of the slice's first token; `reduce`: gives the largest values, or the sums, over the ranks."""
        local = targets - first
        local = torch.where((local >= 0) & (local < logits.shape[-1]), local, -1)
        own, total, weighted, target = row_figures(logits, local, temperature)
        peak = reduce(own.clone(), largest=True)
        below = own - peak  # 0 where no other rank has a larger logit
        total, weighted = total * below.exp(), (weighted + total * below) * below.exp()
        target = torch.where(local >= 0, target + below, 0.0)
        total, weighted, target = reduce(torch.stack([total, weighted, target]), largest=False)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, local, peak, total, entropy)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return target - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: torch.Tensor,
        entropy_grad: torch.Tensor,
    ) -> tuple[torch.Tensor, None, None, None, None, None]:
        """`logprobs` has the formula."""
        entropy_grad = entropy_grad if ctx.entropy_gradient else torch.zeros_like(grad)
        logits, local, peak, total, entropy = ctx.saved_tensors
        gradient = gradient_of(logits, local, peak, total, entropy, grad, entropy_grad, ctx.temperature)
        return gradient, None, None, None, None, None
