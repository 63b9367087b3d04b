"""Checks of board, interpreter, clocks, memory, container, real time and disk: no GPU, no ROS."""

from __future__ import annotations

from flashrt_ros.doctor.findings import fail
from flashrt_ros.doctor.findings import Finding
from flashrt_ros.doctor.findings import ok
from flashrt_ros.doctor.findings import OPTIONAL
from flashrt_ros.doctor.findings import Patient
from flashrt_ros.doctor.findings import warn

VENV_REMEDY = '/usr/bin/python3 -m venv --system-site-packages ~/flashrt_venv'
DOCKER_LINE = (
    'docker run --runtime=nvidia --network host --ipc=host --cap-add SYS_NICE '
    '--ulimit memlock=-1 --ulimit rtprio=99 ...'
)


def board(p: Patient) -> Finding:
    """Board and software release."""
    release = p.machine.read('/etc/os-release') or ''
    names = [line.split('=', 1)[1].strip('"') for line in release.splitlines()
             if line.startswith('PRETTY_NAME=')]  # fmt: skip
    model = (p.machine.read('/proc/device-tree/model') or '').strip() or p.board['title']
    found = ', '.join([model, *names])
    limits = p.board.get('l4t')
    if limits is None:
        return ok(found)
    l4t = p.l4t()
    if l4t is None:
        return warn(
            f'{found}, no /etc/nv_tegra_release',
            'in a container: -v /etc/nv_tegra_release:/etc/nv_tegra_release',
        )
    found += f', L4T R{l4t[0]}.{l4t[1]}'
    if l4t[0] >= limits['good']:
        return ok(found)
    if l4t[0] >= limits['usable']:
        return warn(
            f'{found} (JetPack 7.0/7.1)',
            "update to JetPack 7.2, or stay with: pip install 'torch>=2.12,<2.15'",
        )
    return fail(
        f'{found}: JetPack 6 carries ROS 2 Humble and Python 3.10',
        'flash JetPack 7.2 (sdkmanager), or run the Jazzy container: ' + DOCKER_LINE,
    )


def interpreter(p: Patient) -> Finding:
    """Python version, virtual environment and where it came from."""
    python = p.machine.interpreter
    version = '.'.join(map(str, python.version))
    found = f'Python {version}, {python.executable}'
    wanted = tuple(p.board['python'])
    foreign = p.machine.env.get('CONDA_PREFIX') or '/.pyenv/' in python.base_prefix
    if foreign and p.board['system_python']:
        return fail(f'{found}: conda or pyenv, which ROS debs do not fit', VENV_REMEDY)
    if p.board['system_python'] and python.version[:2] != wanted:
        return fail(f'{found}, but Jazzy here needs {wanted[0]}.{wanted[1]}', VENV_REMEDY)
    if python.version[:2] < wanted:
        return fail(f'{found}, older than {wanted[0]}.{wanted[1]}', 'make clean && make demo')
    if p.board['system_python'] and not python.base_prefix.startswith('/usr'):
        return fail(f'{found}: not the system Python', VENV_REMEDY)
    if not python.in_venv:
        remedy = VENV_REMEDY if p.board['system_python'] else 'python3 -m venv .venv'
        return warn(f'{found}, no virtual environment', remedy)
    return ok(f'{found}, venv')


def clocks(p: Patient) -> Finding:
    """Power mode and locked clocks (Jetson), governor (elsewhere)."""
    governor = (
        p.machine.read('/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor') or ''
    ).strip()
    if not p.board['power_modes']:
        if not governor:
            return ok('CPU governor not exposed (virtual machine)')
        if governor == 'powersave':
            return warn(f'CPU governor {governor}', 'sudo cpupower frequency-set -g performance')
        return ok(f'CPU governor {governor}')
    remedy = 'sudo nvpmodel -m 0 && sudo jetson_clocks   # again after each boot'
    mode = (p.machine.command('nvpmodel', '-q') or '').strip().replace('\n', ' ')
    entries = p.machine.listing('/sys/class/devfreq')
    gpu = [name for name in entries if name.startswith('gpu-gpc') or name.endswith('gpu')]
    low, high = (
        ((p.machine.read(f'/sys/class/devfreq/{gpu[0]}/{key}_freq') or '').strip() if gpu else '')
        for key in ('min', 'max')
    )
    found = f'{mode or "power mode unknown"}, GPU {_mhz(low)}..{_mhz(high)} MHz'
    if governor:
        found += f', CPU {governor}'
    if not mode or 'MAXN' not in mode:
        return warn(found, remedy)
    if not low or low != high:
        return warn(f'{found}: clocks not locked', remedy)
    return ok(f'{found}: locked')


def _mhz(text: str) -> str:
    return f'{int(text) / 1e6:.0f}' if text.isdigit() else '?'


def memory(p: Patient) -> Finding:
    """Memory left for models and capsules; page cache counts as free, unlike in cudaMemGetInfo."""
    info = p.meminfo_gb()
    if 'MemAvailable' not in info:
        return warn('/proc/meminfo is not readable', 'mount /proc')
    available, free = info['MemAvailable'], info.get('MemFree', 0.0)
    swap = info.get('SwapTotal', 0.0) - info.get('SwapFree', 0.0)
    found = f'{available:.1f} GB available of {info.get("MemTotal", 0.0):.1f}, {free:.1f} free'
    if p.needs.memory_gb > 0.85 * available:
        return fail(
            f'{found}; {p.needs.memory_gb:g} GB are planned',
            'close other programs, use 4-bit weights, or smaller capsule budgets',
        )
    if p.board['unified_memory'] and free < p.needs.memory_gb < available:
        return warn(
            f'{found}: page cache hides memory from CUDA',
            "sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'",
        )
    if swap > 0.5:
        return warn(f'{found}, {swap:.1f} GB swapped out', 'sudo swapoff -a && sudo swapon -a')
    return ok(found)


def container(p: Patient) -> Finding:
    """Whether this is a container, and one that reaches GPU and shared memory."""
    cgroup = p.machine.read('/proc/1/cgroup') or ''
    inside = p.machine.exists('/.dockerenv') or any(w in cgroup for w in ('docker', 'containerd'))
    shm = p.machine.numbers().get('shm_gb', 0.0)
    found = f'{"container" if inside else "no container"}, /dev/shm {shm:.2f} GB'
    if inside and p.board['unified_memory'] and not p.gpu_present:
        return fail(f'{found}, no GPU device nodes', DOCKER_LINE)
    if shm < 0.25:
        return warn(f'{found}: too small for images over shared memory', DOCKER_LINE)
    return ok(found)


def real_time(p: Patient) -> Finding:
    """Whether the step thread may be SCHED_FIFO, and how late a sleep wakes. Never a FAIL."""
    kernel = (p.machine.read('/proc/version') or '').split(' (')[0].replace('Linux version ', '')
    answer = p.probe('realtime', 10.0)
    if 'error' in answer:
        return warn(f'kernel {kernel}; {answer["error"]}', 'run the doctor on an idle machine')
    fifo = 'SCHED_FIFO permitted' if answer['fifo'] else 'SCHED_FIFO refused'
    found = (
        f'kernel {kernel}, {fifo}, wake-up late by {answer["wake_p50_us"]} us p50, '
        f'{answer["wake_p99_us"]} us p99'
    )
    limits = (
        'echo "$USER - rtprio 90" | sudo tee /etc/security/limits.d/flashrt.conf   '
        '# then log in again; in a systemd unit: LimitRTPRIO=90'
    )
    if not answer['fifo']:
        return warn(found, limits)
    if answer['wake_p99_us'] > 1000:
        return warn(found, 'stop other load, or set CPUAffinity for the node (systemd unit)')
    return ok(found)


def disk(p: Patient) -> Finding:
    """Room for weights and capsules."""
    free = p.machine.numbers().get('disk_free_gb', 0.0)
    found = f'{free:.1f} GB free in HOME'
    mounts = p.machine.read('/proc/mounts') or ''
    root = [line.split()[0] for line in mounts.splitlines() if line.split()[1:2] == ['/']]
    if root:
        found += f', / on {root[-1]}'
    if free < p.needs.disk_gb:
        return warn(f'{found}, {p.needs.disk_gb:g} GB are planned', 'df -h ~ && du -xsh ~/.cache')
    if root and 'mmcblk' in root[-1]:
        return warn(f'{found} (SD or eMMC)', 'put models and capsules on NVMe: capsule_directory')
    return ok(found)


def packages(p: Patient) -> Finding:
    """Packages that only some uses need: what is missing, and what does not work without it."""
    answer = p.probe('packages', 10.0)
    if 'error' in answer:
        return ok(f'skipped: {answer["error"]}')
    found = [f'{name} {answer[name]}' for name in OPTIONAL if answer.get(name)]
    missing = [name for name in OPTIONAL if not answer.get(name)]
    if not missing:
        return ok(', '.join(found))
    without = '; '.join(f'no {name}: not for {OPTIONAL[name]}' for name in missing)
    pip = p.board['install'].partition(' install ')[0]
    keep = ' -c ~/ws/src/flashrt_ros/constraints-jazzy.txt' if p.board['system_python'] else ''
    return warn(', '.join([*found, without]), f'{pip} install{keep} {" ".join(missing)}')
