"""Checks of torch, CUDA, Triton, graphs, copies and number formats; each runs in a probe child."""

from __future__ import annotations

import os

from flashrt_ros.doctor.findings import fail
from flashrt_ros.doctor.findings import Finding
from flashrt_ros.doctor.findings import ok
from flashrt_ros.doctor.findings import Patient
from flashrt_ros.doctor.findings import SKIPPED
from flashrt_ros.doctor.findings import warn
from flashrt_ros.doctor.machine import version_tuple


def torch_build(p: Patient) -> Finding:
    """Is it a torch with CUDA where there is a GPU, and the one of the venv."""
    answer = p.probe('torch', 25.0)
    if 'error' in answer:
        return fail(f'torch does not load: {answer["error"]}', p.board['install'])
    version, cuda, folder = answer['version'], answer['cuda'], answer['file']
    found = f'torch {version}, CUDA {cuda or "none"}'
    prefix = p.machine.interpreter.prefix
    if p.machine.interpreter.in_venv and not folder.startswith(prefix) and 'nvidia' not in folder:
        return fail(
            f'{found} from {folder}, outside the venv',
            'export PYTHONNOUSERSITE=1; sudo apt remove python3-torch; ' + p.board['install'],
        )
    if not p.gpu_present:
        return ok(f'{found}; no GPU to use')
    # pip takes the build that is there for the one that is asked for.
    install = p.board['install']
    anew = f'{install.partition(" install ")[0]} uninstall -y torch; {install}'
    if cuda is None:
        return fail(f'{found}: a CPU build on a machine with a GPU', anew)
    if version_tuple(cuda)[0] < p.board['torch_cuda_major']:
        return fail(
            f'{found}: a CUDA {version_tuple(cuda)[0]} build holds no code for this board',
            anew,
        )
    if version_tuple(version) < tuple(p.board['torch_min']):
        wanted = '.'.join(map(str, p.board['torch_min']))
        return warn(f'{found}, older than {wanted}', p.board['install'])
    return ok(found)


def gpu_code(p: Patient) -> Finding:
    """Run one kernel of each family and compare with the CPU; warnings of torch do not count."""
    if not p.gpu_present:
        return warn(
            'no NVIDIA GPU: policies run on the CPU',
            'nothing to do for the demo (device:=cpu); with a GPU in the machine: nvidia-smi',
        )
    torch = p.probe('torch', 25.0)
    if not p.gpu_usable:
        reason = torch.get('cuda_error') or torch.get('error') or 'torch sees no CUDA device'
        return fail(reason, 'nvidia-smi   # then: ' + p.board['install'])
    device = torch['devices'][0]
    major, minor = p.capability
    name = f'{device["name"]}, sm_{major}{minor}, {device["memory_gb"]:g} GB'
    answer = p.probe('gpu_code', 25.0)
    if 'error' in answer:
        return fail(f'{name}: {answer["error"]}', 'sudo dmesg | tail   # then: reboot')
    bad: dict[str, list[str]] = {}
    for case, result in answer['results'].items():
        if isinstance(result, str) or result > 0.03:
            why = result if isinstance(result, str) else 'differs from the CPU'
            bad.setdefault(why, []).append(case)
    if bad:
        text = '; '.join(f'{", ".join(cases)}: {why}' for why, cases in bad.items())
        return fail(f'{name}: {text}', p.board['install'])
    return ok(f'{name}: {", ".join(answer["results"])} agree with the CPU')


def one_cuda(p: Patient) -> Finding:
    """Each CUDA library once in the process, and not by way of LD_LIBRARY_PATH."""
    if not p.gpu_usable:
        return SKIPPED
    libraries = p.probe('gpu_code', 25.0).get('libraries', {})
    twice = [name for name, paths in libraries.items() if len({_stem(x) for x in paths}) > 1]
    if twice:
        return fail(
            f'loaded twice: {", ".join(twice)} ({"; ".join(libraries[twice[0]])})',
            'unset LD_LIBRARY_PATH',
        )
    path = p.machine.env.get('LD_LIBRARY_PATH', '')
    system = [part for part in path.split(os.pathsep) if '/cuda' in part]
    if system:
        return warn(
            f'LD_LIBRARY_PATH names a system CUDA: {system[0]}',
            'LD_LIBRARY_PATH=$(echo $LD_LIBRARY_PATH | tr : "\\n" | grep -v cuda | paste -sd:)',
        )
    return ok('each CUDA library loaded once')


def _stem(path: str) -> str:
    folder, name = os.path.split(path)
    return f'{folder}/{name.split(".so")[0]}'


def triton(p: Patient) -> Finding:
    """Compile and run a kernel; without it the plain torch paths are taken."""
    if not p.gpu_usable:
        return SKIPPED
    answer = p.probe('triton', 30.0)
    version = answer.get('version') or p.probe('versions', 10.0).get('triton')
    if 'error' not in answer and answer['equal']:
        return ok(f'Triton {version}, compiled in {answer["compile_s"]:g} s, result equal')
    cause = answer.get('error', 'result differs')
    if version and version_tuple(version) < (3, 7) and p.capability[0] >= 10:
        return warn(
            f'Triton {version} cannot assemble sm_{p.capability[0]}{p.capability[1]}: {cause}',
            p.board['install'] + '   # or TRITON_PTXAS_BLACKWELL_PATH=<CUDA 13 ptxas>',
        )
    return warn(f'Triton {version}: {cause}; plain torch paths are used', p.board['install'])


def graphs(p: Patient) -> Finding:
    """Capture and replay, the base of everything here."""
    if not p.gpu_usable:
        return SKIPPED
    answer = p.probe('graphs', 20.0)
    if 'error' in answer:
        return fail(f'capture failed: {answer["error"]}', 'nvidia-smi   # end other GPU users')
    found = f'100 replays, p50 {answer["p50_us"]:g} us, p99 {answer["p99_us"]:g} us'
    if not (answer['equal'] and answer['address_stable']):
        return fail(f'{found}, results differ', p.board['install'])
    if answer['p99_us'] > 3 * answer['p50_us']:
        return warn(f'{found}: unsteady', 'nvidia-smi   # end other GPU users, lock the clocks')
    return ok(found)


def copies(p: Patient) -> Finding:
    """Pinned memory, copy rates, and the tier plan that follows."""
    if not p.gpu_usable:
        return SKIPPED
    answer = p.probe('gpu_memory', 20.0)
    if 'error' in answer:
        return warn(f'not measured: {answer["error"]}', 'nvidia-smi')
    rates = ', '.join(f'{k} {v:g}' for k, v in answer['copy_gb_per_s'].items())
    unified = bool(answer['attributes'].get('integrated', p.board['unified_memory']))
    plan = 'one tier (unified memory) and disk' if unified else 'tiers gpu, host and disk'
    found = f'{rates} GB/s, {"pinned" if answer["pinned"] else "not pinned"}; {plan}'
    peak = p.board['memory_gb_per_s']
    if peak and answer['copy_gb_per_s']['d2d'] < 0.3 * peak:
        return warn(f'{found}: below 0.3 of {peak} GB/s', 'sudo jetson_clocks; nvidia-smi')
    if not answer['pinned']:
        return warn(found, 'ulimit -l unlimited')
    return ok(found)


def formats(p: Patient) -> Finding:
    """Number formats this GPU computes in; the others are dequantised."""
    if not p.gpu_usable:
        return SKIPPED
    answer = p.probe('formats', 20.0)
    if 'error' in answer:
        return warn(f'not probed: {answer["error"]}', 'nvidia-smi')
    major, minor = answer['capability']
    fp4 = (major, minor) >= (10, 0)
    found = (
        f'bf16 {_yes(answer["bf16"])}, fp8 {_yes(answer["fp8"])}, fp4 {_yes(fp4)}, '
        'int4 and nvfp4 weights by dequantisation'
    )
    if (major, minor) < (8, 0):
        return warn(f'{found}: older than Ampere', 'use device:=cpu, or a GPU of sm_80 and up')
    if not answer['fp8'] and (major, minor) >= (8, 9):
        return warn(f'{found} ({answer.get("fp8_error", "differs")})', p.board['install'])
    return ok(found)


def _yes(value: bool) -> str:
    return 'yes' if value else 'no'


def neighbours(p: Patient) -> Finding:
    """Other users of the GPU, and MIG."""
    if not p.gpu_present:
        return SKIPPED
    mig = p.machine.command('nvidia-smi', '--query-gpu=mig.mode.current', '--format=csv,noheader')
    if mig and 'Enabled' in mig:
        return warn('MIG is on: the policy sees a part of the GPU', 'sudo nvidia-smi -mig 0')
    text = p.machine.command(
        'nvidia-smi', '--query-compute-apps=pid,process_name', '--format=csv,noheader'
    )
    if text is None:
        return ok('nvidia-smi not available; MIG and other users not checked')
    users = [line.strip() for line in text.splitlines() if line.strip()]
    if users:
        return warn(f'{len(users)} other GPU processes, e.g. {users[0]}', 'nvidia-smi')
    return ok('no other GPU process, MIG off')
