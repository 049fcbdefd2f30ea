"""How fast weights travel over the loopback interface: full fetch and deltas, against memcpy and bare gRPC in the same run.

    python benchmarks/weight_sync.py [--repeats 5]

The learner's side runs in a process of its own. Snapshot: the tensors of a 135-million-parameter Llama in bf16 (270 MB).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import numpy as np

from services.common.config.settings import Settings
from services.common.weight_sync.server import WeightServer
from services.common.weight_sync.staging import Stage, default_stage_directory
from services.common.weights import delta
from services.common.weights.channel import CHUNK_BYTES, CLIENT_OPTIONS, SERVER_OPTIONS
from services.common.weights.snapshot import Snapshot, UInt8Array
from services.rollout.weights.client import WeightReceiver

MIB = 1 << 20
CHANGED = (0.01, 0.02, 0.03)
JOB = "benchmark"


def shapes() -> dict[str, tuple[int, ...]]:
    """Hidden 576, 30 layers, 9/3 heads of 64, feed-forward 1536, vocabulary 49,152, tied embeddings."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (49152, 576)}
    layer = {
        "self_attn.q_proj": (576, 576),
        "self_attn.k_proj": (192, 576),
        "self_attn.v_proj": (192, 576),
        "self_attn.o_proj": (576, 576),
        "mlp.gate_proj": (1536, 576),
        "mlp.up_proj": (1536, 576),
        "mlp.down_proj": (576, 1536),
        "input_layernorm": (576,),
        "post_attention_layernorm": (576,),
    }
    for index in range(30):
        found |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (576,)}


def snapshots() -> Iterator[Snapshot]:
    """Version 0, then one version per entry of CHANGED in which that share of the elements moved by one unit in the last place."""
    rng = np.random.default_rng(0)
    arrays = {
        name: ((rng.standard_normal(shape, np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16)
        for name, shape in shapes().items()
    }
    for n, share in enumerate((0.0, *CHANGED)):
        for values in arrays.values():
            flat = values.reshape(-1)
            moved = rng.random(flat.size, np.float32) < share
            flat[moved] += rng.choice(np.array([1, 0xFFFF], np.uint16), int(moved.sum()))
        yield Snapshot.build(
            1,
            n,
            {name: ("bfloat16", values.shape, values.reshape(-1).view(np.uint8)) for name, values in arrays.items()},
        )


def serve() -> None:
    """The learner's side: publishes every version, serves bare chunks beside it, ends when its input ends."""
    publisher = WeightServer(JOB, "127.0.0.1", 0, None, keep=1 + len(CHANGED))
    built = list(snapshots())
    for snapshot in built:
        publisher.publish(snapshot)
    whole = b"".join(bytes(data) for data in built[0].data)
    pieces = [whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES)]
    bare = grpc.server(ThreadPoolExecutor(2), options=SERVER_OPTIONS)
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(
        lambda _request, _context: iter(pieces)
    )
    bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bytes", {"Stream": method}),))
    port = bare.add_insecure_port("127.0.0.1:0")
    bare.start()
    print(publisher.address, f"127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    bare.stop(0).wait(5)
    publisher.stop(1)


def timed(repeats: int, action: Callable[[], object]) -> float:
    """Median seconds, after one run that does not count."""
    action()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def full_fetch(address: str, stage: Stage) -> None:
    """A receiver that holds nothing: fetch, verify, stage."""
    receiver = WeightReceiver(address, JOB, "benchmark", stage)
    receiver.fetch(1, 0)
    receiver.close()


def bare_stream(address: str) -> None:
    """The same bytes as gRPC moves them, neither checked nor kept."""
    with grpc.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        stream: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/bare.Bytes/Stream")
        for _ in stream(b"", timeout=60):
            pass


def bare_rate(repeats: int) -> float:
    """Bytes/s of the bare stream, from a server in a process of its own."""
    with learner_side() as addresses:
        size = sum(np.prod(shape) * 2 for shape in shapes().values())
        return float(size) / timed(repeats, lambda: bare_stream(addresses[1]))


@contextmanager
def learner_side() -> Iterator[list[str]]:
    """Addresses of the weights' server and of the bare one, in a process of their own."""
    command = [sys.executable, __file__, "--serve"]
    learner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield learner.stdout.readline().split() if learner.stdout else []
    finally:
        learner.communicate()


def report_full(addresses: list[str], stage: Stage, plain: UInt8Array, repeats: int) -> None:
    """Prints MiB/s of memcpy, bare gRPC and the full fetch."""
    target = np.empty_like(plain)
    size = plain.nbytes / MIB
    memcpy = timed(repeats, lambda: np.copyto(target, plain))
    bare = timed(repeats, lambda: bare_stream(addresses[1]))
    cpu = time.process_time()
    full = timed(repeats, lambda: full_fetch(addresses[0], stage))
    cpu = (time.process_time() - cpu) / (repeats + 1)
    print(f"memcpy                         {size / memcpy:8.0f} MiB/s")
    print(f"bare gRPC stream, 1 MiB chunks {size / bare:8.0f} MiB/s")
    ratios = f"{memcpy / full:.2f} of memcpy, {bare / full:.2f} of bare gRPC"
    print(
        f"full fetch + verify + stage    {size / full:8.0f} MiB/s   {ratios}   ({full:.2f} s, receiver's CPU {cpu:.2f} s)"
    )


def report_deltas(address: str, stage: Stage, repeats: int) -> None:
    """Prints size and times of the deltas."""
    receiver = WeightReceiver(address, JOB, "benchmark", stage)
    built = list(snapshots())
    receiver.fetch(1, 0)
    for n, share in enumerate(CHANGED, start=1):
        pairs = list(zip(built[n].data, built[n - 1].data, strict=True))
        encode = timed(repeats, lambda pairs=pairs: [delta.encode(data, base) for data, base in pairs])  # type: ignore[misc]
        first = receiver.fetch(1, n)
        print(
            f"delta, {share:.0%} of the elements changed: {first.wire_bytes / MIB:6.2f} MiB on the wire "
            f"({first.wire_bytes / first.total_bytes:.2%}), encode {encode:.2f} s, "
            f"fetch + decode + verify + stage {first.fetch_s:.2f} s (the first, with encoding)"
        )
    receiver.close()
    again, cpu = [], 0.0
    for _ in range(repeats):
        receiver = WeightReceiver(address, JOB, "benchmark", stage)
        receiver.fetch(1, 1)
        cpu -= time.process_time()
        again.append(receiver.fetch(1, 2).fetch_s)
        cpu += time.process_time()
        receiver.close()
    times = f"{statistics.median(again):.2f} s, receiver's CPU {cpu / repeats:.2f} s"
    print(f"delta, {CHANGED[1]:.0%} changed, already encoded: fetch + decode + verify + stage {times}")


def main() -> None:
    """Starts the learner's side and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs per figure; the median is printed")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}, Python {platform.python_version()}, grpcio {grpc.__version__}")
    with tempfile.TemporaryDirectory() as home:
        shared_memory = Settings().shared_memory
        stage = Stage(default_stage_directory(f"benchmark-{os.getpid()}", Path(home), 1 << 30, shared_memory))
        with closing(stage), learner_side() as addresses:
            first = next(snapshots())
            plain = np.concatenate(first.data)
            print(
                f"snapshot: {len(first.tensors)} tensors, {plain.nbytes / MIB:.0f} MiB; staged in {stage.directory.parent}"
            )
            rebuild = {
                spec.name: (spec.dtype, spec.shape, data) for spec, data in zip(first.tensors, first.data, strict=True)
            }
            build = timed(arguments.repeats, lambda: Snapshot.build(1, 0, rebuild))
            print(f"snapshot for publishing (copy + hash)  {build * 1000:.0f} ms")
            report_full(addresses, stage, plain, arguments.repeats)
            report_deltas(addresses[0], stage, arguments.repeats)


if __name__ == "__main__":
    main()
