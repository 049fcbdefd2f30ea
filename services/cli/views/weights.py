"""Text output of the commands `millrace weights`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from services.cli.views.jobs import print_rows
from services.common.spec.learner import BackendName

if TYPE_CHECKING:
    from services.learner.conversion.report import Report
    from services.learner.conversion.request import Converted

_KINDS = {"checkpoint": "checkpoint", "hugging_face": "Hugging Face directory"}
_SIZES = {
    "tensor_parallel_size": "TP", "pipeline_parallel_size": "PP", "data_parallel_size": "DP", "context_parallel_size": "CP",
    "expert_parallel_size": "EP",
}  # fmt: skip


def print_report(console: Console, report: Report, *, tensors: bool) -> None:
    """What a directory holds, then its problems; with `tensors` every tensor."""
    shape = report.shape
    rows: list[tuple[str, object]] = [
        ("path", report.path),
        ("kind", _KINDS[report.kind] + (", weights only" if report.weights_only else "")),
        ("architecture", report.architecture or "not known"),
        ("layers", shape.get("num_layers", "not known")),
        ("shape", ", ".join(f"{key} {value}" for key, value in shape.items() if key != "num_layers")),
        ("dtype", report.dtype or "not known"),
        ("parameters", f"{report.parameters:,}"),
        ("tensors", f"{len(report.tensors):,}"),
        ("files", f"{report.files:,}, {report.bytes:,} bytes"),
    ]
    if report.kind == "checkpoint":
        rows += _checkpoint_rows(report)
    print_rows(console, rows)
    for tensor in report.tensors if tensors else ():
        line = f"{tensor.role or '-':<9}  {tensor.name}  {tensor.shape}  {tensor.dtype}  {tensor.file}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for problem in report.problems:
        console.print(f"[red]problem[/red] {escape(problem)}", soft_wrap=True)


def _checkpoint_rows(report: Report) -> list[tuple[str, object]]:
    sizes = " × ".join(f"{name} {report.layout[key]}" for key, name in _SIZES.items() if key in report.layout)
    backend = report.layout.get("backend", BackendName.MEGATRON.value)
    distributed = ", distributed optimizer" if report.layout.get("use_distributed_optimizer") else ""
    versions = report.versions
    verified = {True: "yes", False: "no", None: "not asked for"}[report.verified]
    roles = [
        f"{name}: {role.parameters:,} parameters" + (", optimizer" if role.optimizer else "")
        for name, role in report.roles.items()
    ]
    other = "yes" if versions.get("other_layouts") else "weights only: of a release whose optimizer has no other layout"
    return [
        ("job", report.job or "none"),
        ("step", "not known" if report.step is None else report.step),
        ("backend", backend),
        ("layout", sizes + distributed),
        ("loads in other layouts", other),
        ("roles", "; ".join(roles)),
        (
            "versions",
            ", ".join(
                f"{name} {value}" for name, value in versions.items() if name != "other_layouts" and value is not None
            ),
        ),
        ("verifies", verified),
    ]


def print_converted(console: Console, converted: Converted) -> None:
    """What was written."""
    what = f"{converted.architecture}, {converted.parameters:,} parameters in {converted.tensors:,} tensors of {converted.dtype}"
    console.print(f"{what}, {converted.bytes:,} bytes", markup=False, soft_wrap=True)
    console.print(converted.path, markup=False, soft_wrap=True)
