"""Payloads that the doctor runs in child processes: ``python -m flashrt_ros.doctor.probes NAME``.

Each prints one JSON object as its last line. torch, triton and rclpy are imported here only,
because a wedged kernel or a broken library must not take the doctor with it.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import importlib
import importlib.metadata
import json
import os
from pathlib import Path
import re
import sys
import threading
import time
from typing import Any

from flashrt_ros.doctor.findings import OPTIONAL

PROBES: dict[str, Callable[[], dict[str, Any]]] = {}


def probe(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Register a payload under its name."""
    PROBES[function.__name__] = function
    return function


def _mapped(*patterns: str) -> dict[str, list[str]]:
    """Shared libraries of this process by pattern, from /proc/self/maps."""
    text = Path('/proc/self/maps').read_text()
    paths = sorted(set(re.findall(r'(/\S+\.so[^\s]*)', text)))
    return {p: [path for path in paths if p in os.path.basename(path)] for p in patterns}


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


@probe
def versions() -> dict[str, Any]:
    """Versions by metadata alone: nothing heavy is imported."""
    names = ('torch', 'triton', 'numpy', 'opencv-python-headless', 'opencv-python', 'safetensors',
             'transformers', 'cuda-bindings', 'setuptools')  # fmt: skip
    return {name: found for name in names if (found := _version(name))}


@probe
def packages() -> dict[str, Any]:
    """Versions of the packages that only some uses need, '' for one that is missing."""
    return {name: _version(name) or '' for name in OPTIONAL}


@probe
def torch() -> dict[str, Any]:
    """The build of torch and the devices it sees."""
    torch = importlib.import_module('torch')
    answer: dict[str, Any] = {
        'version': torch.__version__,
        'cuda': torch.version.cuda,
        'file': os.path.dirname(torch.__file__),
        'arch_list': [],
        'devices': [],
    }
    if torch.version.cuda and torch.cuda.is_available():
        answer['arch_list'] = torch.cuda.get_arch_list()
        for index in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(index)
            answer['devices'].append(
                {
                    'name': p.name,
                    'capability': [p.major, p.minor],
                    'memory_gb': round(p.total_memory / 1e9, 1),
                    'processors': p.multi_processor_count,
                    'integrated': bool(getattr(p, 'is_integrated', False)),
                }
            )
    elif torch.version.cuda:
        try:
            torch.cuda.init()
        except Exception as err:
            answer['cuda_error'] = str(err).splitlines()[0][:200]
    return answer


@probe
def gpu_code() -> dict[str, Any]:
    """Run one kernel of each family on the GPU and compare with the CPU."""
    torch = importlib.import_module('torch')
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    a, b, image, weight = rand(256, 256), rand(256, 256), rand(1, 3, 32, 32), rand(8, 3, 3, 3)
    q = rand(1, 2, 64, 64)
    attention = torch.nn.functional.scaled_dot_product_attention
    cases: dict[str, Callable[[str], Any]] = {
        'matmul bf16': lambda d: a.to(d).bfloat16() @ b.to(d).bfloat16(),
        'prod': lambda d: (a[:4].to(d) / 2 + 1).prod(dim=1),
        'attention': lambda d: attention(*[q.to(d).bfloat16()] * 3),
        'convolution': lambda d: torch.nn.functional.conv2d(image.to(d), weight.to(d)),
    }
    results: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            want = case('cpu').double()
            got = case('cuda').cpu().double()
            results[name] = float((got - want).abs().max() / want.abs().max().clamp(min=1e-9))
        except Exception as err:
            results[name] = str(err).splitlines()[0][:200]
    return {'results': results, 'libraries': _mapped('libcublasLt', 'libcudnn.so', 'libcudart')}


@probe
def triton() -> dict[str, Any]:
    """Compile and run one Triton kernel and compare."""
    torch = importlib.import_module('torch')
    triton = importlib.import_module('triton')
    kernel = importlib.import_module('flashrt_ros.doctor.triton_kernel')
    x = torch.arange(4096, device='cuda', dtype=torch.float32)
    start = time.perf_counter()
    out = kernel.scale_add(x, 2.0, 1.0)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {
        'version': triton.__version__,
        'equal': bool(torch.equal(out, x * 2.0 + 1.0)),
        'compile_s': round(seconds, 2),
    }


@probe
def graphs() -> dict[str, Any]:
    """Capture in thread-local mode, replay 100 times, compare, time."""
    torch = importlib.import_module('torch')
    weight = torch.randn(512, 512, device='cuda')
    x, out = torch.ones(1, 512, device='cuda'), torch.empty(1, 512, device='cuda')

    def body() -> None:
        hidden = x
        for _ in range(8):
            hidden = torch.tanh(hidden @ weight * 0.05)
        out.copy_(hidden)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    stream.synchronize()
    want, address = out.clone(), out.data_ptr()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode='thread_local'):
        body()
    times, equal = [], True
    for step in range(100):
        if step % 25 == 0:
            out.zero_()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
        equal = equal and (step % 25 != 0 or bool(torch.equal(out, want)))
    times.sort()
    return {
        'equal': equal,
        'address_stable': out.data_ptr() == address,
        'p50_us': round(times[50], 1),
        'p99_us': round(times[98], 1),
    }


@probe
def gpu_memory() -> dict[str, Any]:
    """Device attributes that decide the tier plan, and copy rates."""
    torch = importlib.import_module('torch')
    torch.cuda.init()
    answer: dict[str, Any] = {'attributes': {}, 'copy_gb_per_s': {}}
    with contextlib.suppress(Exception):
        runtime = importlib.import_module('cuda.bindings.runtime')
        attribute = runtime.cudaDeviceAttr
        wanted = {
            'integrated': attribute.cudaDevAttrIntegrated,
            'pageable_memory_access': attribute.cudaDevAttrPageableMemoryAccess,
            'uses_host_page_tables': attribute.cudaDevAttrPageableMemoryAccessUsesHostPageTables,
            'concurrent_managed_access': attribute.cudaDevAttrConcurrentManagedAccess,
            'host_register_supported': attribute.cudaDevAttrHostRegisterSupported,
        }
        for name, code in wanted.items():
            error, value = runtime.cudaDeviceGetAttribute(code, 0)
            if int(error) == 0:
                answer['attributes'][name] = int(value)
    size = 64 << 20
    device = torch.empty(size, dtype=torch.uint8, device='cuda')
    other = torch.empty_like(device)
    host = torch.empty(size, dtype=torch.uint8)
    try:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        answer['pinned'] = bool(host.is_pinned())
    except RuntimeError as err:
        answer['pinned'] = False
        answer['pinned_error'] = str(err).splitlines()[0][:200]
    pairs = {'d2d': (other, device), 'h2d': (device, host), 'd2h': (host, device)}
    for name, (to, source) in pairs.items():
        to.copy_(source)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(8):
            to.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        answer['copy_gb_per_s'][name] = round(8 * size / begin.elapsed_time(end) / 1e6, 1)
    free, total = torch.cuda.mem_get_info()
    answer['free_gb'], answer['total_gb'] = round(free / 1e9, 2), round(total / 1e9, 2)
    return answer


@probe
def formats() -> dict[str, Any]:
    """Which number formats compute on this GPU."""
    torch = importlib.import_module('torch')
    capability = list(torch.cuda.get_device_capability())
    answer: dict[str, Any] = {'capability': capability, 'bf16': torch.cuda.is_bf16_supported()}
    try:
        a = torch.randn(64, 64, device='cuda').to(torch.float8_e4m3fn)
        b = torch.randn(64, 64, device='cuda').to(torch.float8_e4m3fn)
        one = torch.ones((), device='cuda')
        got = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        want = a.float() @ b.float().t()
        error = (got.float() - want).abs().max() / want.abs().max()
        answer['fp8'] = bool(error < 0.02)
    except Exception as err:
        answer['fp8'] = False
        answer['fp8_error'] = str(err).splitlines()[0][:160]
    return answer


@probe
def ros() -> dict[str, Any]:
    """What ROS 2 this interpreter imports, and what it brings into the process."""
    answer: dict[str, Any] = {'numpy': _version('numpy'), 'distro': os.environ.get('ROS_DISTRO')}
    import rclpy

    answer['rclpy'] = os.path.dirname(rclpy.__file__)
    with contextlib.suppress(Exception):
        from rclpy.utilities import get_rmw_implementation_identifier

        answer['rmw'] = get_rmw_implementation_identifier()
    for module, key in (('flashrt_ros.msg', 'interfaces'), ('flashrt_ros.srv', 'services')):
        try:
            importlib.import_module(module)
            answer[key] = True
        except ImportError as err:
            answer[key] = str(err)[:200]
    with contextlib.suppress(ImportError):
        import cv2

        answer['cv2'] = cv2.__version__
    answer['opencv_libraries'] = _mapped('libopencv_core')['libopencv_core']
    return answer


@probe
def dds() -> dict[str, Any]:
    """Send 40 best-effort images of two sizes between two processes and count what arrives."""
    from rclpy.executors import SingleThreadedExecutor
    from rclpy.node import Node
    from rclpy.qos import qos_profile_sensor_data
    from sensor_msgs.msg import Image

    from flashrt_ros.processes import ProcessGroup
    from flashrt_ros.qos import use_large_message_profile

    use_large_message_profile()
    answer: dict[str, Any] = {'rmw': None, 'sent': 40, 'received': {}}
    with ProcessGroup(stop_timeout_s=3.0) as group:
        context = group.context()
        node = Node('doctor_receiver', context=context)
        executor = SingleThreadedExecutor(context=context)
        executor.add_node(node)
        counts: dict[str, set[str]] = {'224x224': set(), '640x480': set()}

        def receive(message: Image) -> None:
            counts[f'{message.width}x{message.height}'].add(message.header.frame_id)

        node.create_subscription(Image, 'doctor_images', receive, qos_profile_sensor_data)
        sender = group.start('flashrt_ros.doctor.probes', name='sender', args=['dds_sender'])
        sender.expected_end = True
        deadline = time.monotonic() + 14.0
        while time.monotonic() < deadline:
            executor.spin_once(timeout_sec=0.05)
            if not sender.running:
                break
        for _ in range(10):
            executor.spin_once(timeout_sec=0.02)
        answer['received'] = {size: len(seen) for size, seen in counts.items()}
        if sender.exit_code not in (0, None):
            answer['error'] = sender.tail(1).strip()
        executor.shutdown()
        node.destroy_node()
        context.shutdown()
    return answer


@probe
def dds_sender() -> dict[str, Any]:
    """Second process of ``dds``."""
    import rclpy
    from rclpy.node import Node
    from rclpy.qos import qos_profile_sensor_data
    from sensor_msgs.msg import Image

    from flashrt_ros.qos import use_large_message_profile

    use_large_message_profile()
    rclpy.init()
    node = Node('doctor_sender')
    publisher = node.create_publisher(Image, 'doctor_images', qos_profile_sensor_data)
    deadline = time.monotonic() + 8.0
    while publisher.get_subscription_count() < 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    pause = threading.Event()
    pause.wait(0.3)
    for width, height in ((224, 224), (640, 480)):
        message = Image(width=width, height=height, encoding='rgb8', step=3 * width)
        message.data = bytes(3 * width * height)
        for index in range(40):
            message.header.frame_id = str(index)
            publisher.publish(message)
            pause.wait(0.02)
    pause.wait(0.2)
    node.destroy_node()
    rclpy.shutdown()
    return {'sent': 40}


@probe
def realtime() -> dict[str, Any]:
    """Try SCHED_FIFO in a thread and measure how late an absolute sleep wakes, 400 times 5 ms."""
    answer: dict[str, Any] = {}

    def measure() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(40))
            answer['fifo'] = True
        except OSError as err:
            answer['fifo'] = False
            answer['fifo_error'] = err.strerror
        late = []
        due = time.monotonic()
        for _ in range(400):
            due += 0.005
            time.sleep(max(0.0, due - time.monotonic()))
            late.append((time.monotonic() - due) * 1e6)
        late.sort()
        answer['wake_p50_us'], answer['wake_p99_us'] = round(late[200]), round(late[395])

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    return answer


def main(argv: list[str] | None = None) -> int:
    """Run one probe and print its answer."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] not in PROBES:
        print(f'give one of {sorted(PROBES)}', file=sys.stderr)
        return 2
    print(json.dumps(PROBES[arguments[0]]()))
    sys.stdout.flush()
    return 0


if __name__ == '__main__':
    sys.exit(main())
