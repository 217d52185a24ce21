"""What can be wrong with a server or a launch: each a change of what is well, and what the doctor must say of it."""

from __future__ import annotations

import dataclasses

from deploy.nodes import GIB, Recorded, hccn, ip_tool, launched, npu_smi
from vllm_ascend_dsv41.deploy.doctor.host import Output
from vllm_ascend_dsv41.deploy.doctor.report import Status
from vllm_ascend_dsv41.deploy.doctor.target import Target
from vllm_ascend_dsv41.deploy.launch import command


def of_recipe(recipe: str, change):
    """Remember whose server is changed."""
    change.recipe = recipe
    return change


def option(name: str, value: str | bool | None, rank: int = 0, recipe: str = "a3x2"):
    """The recipe's launch with one option changed, added or, with None, left out."""

    def change(node: Recorded) -> Target:
        target = launched(recipe, rank)
        options = {**target.options, name: value}
        return dataclasses.replace(target, options={k: v for k, v in options.items() if v is not None})

    return of_recipe(recipe, change)


def variable(name: str, value: str, rank: int = 0, recipe: str = "a3x2"):
    """The recipe's launch with one variable changed, or, with "", unset."""
    return of_recipe(recipe, lambda node: launched(recipe, rank, **{name: value}))


def machine(change, rank: int = 0, recipe: str = "a3x2"):
    """Another machine, by a function that changes the healthy one."""

    def make(node: Recorded) -> Target:
        change(node)
        return launched(recipe, rank)

    return of_recipe(recipe, make)


def without_devices(*numbers: int):
    return lambda node: node.empty.difference_update({f"/dev/davinci{n}" for n in numbers})


def tool(name: str, answer):
    return lambda node: node.tools.__setitem__(name, answer)


def hccn_says(what: str, device: int, said: str, a3: bool = True):
    return tool("hccn_tool", hccn(a3, 1, {(device, what): said}))


SHM_512_USED = lambda node: node.rooms.__setitem__("/dev/shm", (15 * GIB, 14 * GIB))  # noqa: E731
TCP = "  sl  local_address rem_address   st\n   0: 00000000:{:04X} 00000000:0000 0A 0\n"
DOMINO = {"memory-plan", "host-memory"}  # what a changed topology changes, too

#: number in spec/aisbench-and-launch.md 3.3 (or the word that says where it is from), check, its status, what is said,
#: what is done, how it comes about
# fmt: off
FAULTS = [
    ('1', 'start-rank', Status.FAIL, 'start-rank 0 without --headless', 'leave it out on node 0', option('data-parallel-start-rank', '0')),
    ('1', 'start-rank', Status.FAIL, 'without --data-parallel-start-rank', 'first data-parallel rank', lambda node: dataclasses.replace(launched('a3x2', 0), options={**{k: v for k, v in launched('a3x2', 1).options.items() if k != 'data-parallel-start-rank'}}, node=launched('a3x2', 0).node)),
    ('2', 'interface', Status.FAIL, 'no interface eth9', 'set NIC_NAME', lambda node: dataclasses.replace(launched(HCCL_SOCKET_IFNAME='enp67s0f5'), node=dataclasses.replace(launched().node, nic='eth9'))),
    ('2', 'interface', Status.FAIL, 'has 10.9.9.9', 'set LOCAL_IP', machine(tool('ip', ip_tool('enp67s0f5', '10.9.9.9')))),
    ('2', 'interface', Status.FAIL, 'is down', 'another interface', machine(lambda node: node.files.__setitem__('/sys/class/net/enp67s0f5/operstate', 'down\n'))),
    ('2', 'route', Status.FAIL, 'by docker0 from 172.17.0.1', 'NODE0_IP must be', machine(tool('ip', ip_tool('enp67s0f5', '10.0.0.2', 'docker0', '172.17.0.1')), rank=1)),
    ('2', 'interface-names', Status.WARN, 'fits enp189s0f0, enp67s0f5', 'an equals sign', variable('HCCL_SOCKET_IFNAME', 'enp')),
    ('2', 'interface-names', Status.FAIL, "is no interface's beginning", 'NIC_NAME', variable('HCCL_SOCKET_IFNAME', 'bond')),
    ('3', 'placeholders', Status.FAIL, '<NODE0_IP>', 'fill in', variable('HCCL_IF_IP', '<NODE0_IP>')),
    ('3', 'ranks', Status.FAIL, 'node 1 starts at rank 0', 'set NODE_RANK', option('data-parallel-start-rank', '0', rank=1)),
    ('3', 'ranks', Status.FAIL, 'ranks 4 to 5 of 4', 'same --data-parallel-size', option('data-parallel-start-rank', '4', rank=1)),
    ('4', 'ports', Status.FAIL, '127.0.0.1:8000 (--port): [Errno 98]', 'end what listens there', machine(lambda node: node.ports.__setitem__(('127.0.0.1', 8000), '[Errno 98] Address already in use'))),
    ('4', 'ports', Status.FAIL, '10.0.0.1:13399', 'choose another port', machine(lambda node: node.ports.__setitem__(('10.0.0.1', 13399), '[Errno 98] Address already in use'))),
    ('5', 'hccl-ports', Status.FAIL, 'listened on: 60003', 'HCCL_IF_BASE_PORT', machine(lambda node: node.files.__setitem__('/proc/net/tcp6', TCP.format(60003)))),
    ('5', 'hccl-ports', Status.FAIL, 'listened on: 16666', 'other HCCL job', machine(lambda node: node.files.__setitem__('/proc/net/tcp', TCP.format(16666)))),
    ('5', 'hccl-ports', Status.FAIL, 'HCCL_IF_BASE_PORT=99', '60000', variable('HCCL_IF_BASE_PORT', '99')),
    ('6', 'npu-link', Status.FAIL, 'device 3 not UP: link status: DOWN', 'check cable', machine(hccn_says('link', 3, 'link status: DOWN\n', a3=False), recipe='a2x4')),
    ('7', 'npu-net-health', Status.FAIL, 'device 5: Fault', 'gateway', machine(hccn_says('net_health', 5, 'net health status: Fault\n', a3=False), recipe='a2x4')),
    ('7', 'npu-net-health', Status.WARN, 'device 0: Receive timeout', 'probe address', machine(hccn_says('net_health', 0, 'net health status: Receive timeout\n'))),
    ('8', 'npu-tls', Status.FAIL, '[0, 0, 1,', '-tls -s enable 0', machine(hccn_says('tls', 2, 'dev_id:2, tls switch[1](0:disable, 1:enable)\n'))),
    ('9', 'npu-address', Status.FAIL, 'device 1 without IPv4', 'HCCL uses IPv4', machine(hccn_says('ip', 1, 'Get ipconf failed, because no ip was preset there!\n', a3=False), recipe='a2x4')),
    ('10', 'superpod', Status.WARN, 'does not tell a superpod', 'update npu-smi', machine(tool('npu-smi', lambda *words: Output('This device does not support it.\n' if 'spod-info' in words else npu_smi(True), 0)))),
    ('11', 'timeouts', Status.FAIL, 'not set: 600', 'VLLM_ENGINE_READY_TIMEOUT_S=3600', variable('VLLM_ENGINE_READY_TIMEOUT_S', '')),
    ('11', 'timeouts', Status.WARN, 'not set: 120', 'HCCL_CONNECT_TIMEOUT=1800', variable('HCCL_CONNECT_TIMEOUT', '')),
    ('11', 'timeouts', Status.FAIL, 'HCCL_CONNECT_TIMEOUT=9000', '1800', variable('HCCL_CONNECT_TIMEOUT', '9000')),
    ('11', 'timeouts', Status.FAIL, 'VLLM_ENGINE_READY_TIMEOUT_S=1h', '3600', variable('VLLM_ENGINE_READY_TIMEOUT_S', '1h')),
    ('12', 'devices', Status.FAIL, '8 of /dev/davinci0 to 15', '--device /dev/davinciN', lambda node: (without_devices(*range(8, 16))(node), launched(ASCEND_RT_VISIBLE_DEVICES=''))[1]),
    ('12', 'devices', Status.FAIL, 'one die of a card only: [0, 17]', 'both /dev/davinci', lambda node: (without_devices(1)(node), node.empty.add('/dev/davinci17'), launched(ASCEND_RT_VISIBLE_DEVICES=''))[2]),
    ('12', 'devices', Status.FAIL, '/dev/hisi_hdc missing', '--device', machine(lambda node: node.empty.discard('/dev/hisi_hdc'))),
    ('13', 'visible-devices', Status.FAIL, 'no /dev/davinci16', 'ASCEND_RT_VISIBLE_DEVICES=0,1', variable('ASCEND_RT_VISIBLE_DEVICES', ','.join(map(str, range(17))))),
    ('13', 'visible-devices', Status.FAIL, 'not ascending (EE1001)', '=0,1,2', variable('ASCEND_RT_VISIBLE_DEVICES', '1,0,' + ','.join(map(str, range(2, 16))))),
    ('13', 'visible-devices', Status.FAIL, '8 devices for 16 ranks', '=0,1,2', variable('ASCEND_RT_VISIBLE_DEVICES', '0,1,2,3,4,5,6,7')),
    ('13', 'visible-devices', Status.FAIL, 'all', '=0,1,2', variable('ASCEND_RT_VISIBLE_DEVICES', 'all')),
    ('14', 'npu-free', Status.FAIL, 'NPU 2 chip 1: 56363 MB; processes 4005', 'end the old server', machine(tool('npu-smi', lambda *words: Output('\tSuper Pod ID : 3\n' if 'spod-info' in words else npu_smi(True, {5: 56363}), 0)))),
    ('14', 'npu-health', Status.FAIL, 'NPU 3 chip 0: Alarm', 'until it is repaired', machine(tool('npu-smi', lambda *words: Output('\tSuper Pod ID : 3\n' if 'spod-info' in words else npu_smi(True, health={6: 'Alarm'}), 0)))),
    ('15', 'shm', Status.FAIL, '14.00 of 15.00 GiB free', '--shm-size=512g', machine(SHM_512_USED)),
    ('15', 'shm', Status.WARN, '64 GiB', '--shm-size=512g', machine(lambda node: node.rooms.__setitem__('/dev/shm', (64 * GIB, 64 * GIB)))),
    ('16', 'host-memory', Status.FAIL, '100 GiB (MemAvailable)', 'dp_shared_memory', machine(lambda node: node.files.__setitem__('/proc/meminfo', f'MemAvailable: {100 << 20} kB\n'), recipe='a3x1-offload')),
    ('16', 'host-memory', Status.FAIL, '120 GiB (control group', 'docker run --memory', machine(lambda node: node.files.__setitem__('/sys/fs/cgroup/docker/1234/memory.max', f'{120 * GIB + 1000000}\n'), recipe='a3x1-offload')),
    ('17', 'memory-plan', Status.FAIL, 'graphs and context need', 'dsv41 plan', option('gpu-memory-utilization', '0.99', recipe='a2x4')),
    ('17', 'memory-plan', Status.FAIL, 'GiB more than 0.90 of a device', 'dsv41 plan', option('max-num-batched-tokens', '32768', recipe='a2x4')),
    ('18', 'cpu-binding', Status.WARN, 'enable_cpu_binding with Engram tables in host memory', 'set enable_cpu_binding to false', option('additional-config', '{"enable_cpu_binding":true}', recipe='a3x1-offload')),
    ('19', 'concurrency', Status.WARN, '--max-num-seqs 32 on one server', 'begin with --max-num-seqs 4', of_recipe('a3x1-offload', lambda node: dataclasses.replace(launched('a3x1-offload', HCCL_BUFFSIZE='256'), options={**launched('a3x1-offload').options, 'max-num-seqs': '32'}))),
    ('20', 'engram', Status.FAIL, 'enable_engram, engram_storage', 'cpu_offload', option('additional-config', '{"enable_engram":true,"engram_storage":"int8"}')),
    ('20', 'engram', Status.FAIL, '--engram-config with offload', 'leave the others out', option('engram-config', '{"cpu_offload":false,"offload":true}')),
    ('20', 'engram', Status.WARN, 'no --engram-config', 'cpu_offload', lambda node: dataclasses.replace(launched(), options={k: v for k, v in launched().options.items() if k not in ('engram-config', 'additional-config')})),
    ('20', 'engram', Status.WARN, '2 copies of 206 GiB', 'dp_shared_memory', option('engram-config', '{"cpu_offload":true}', recipe='a3x1-offload')),
    ('21', 'driver', Status.WARN, 'driver 24.1.rc2', 'update driver', machine(lambda node: node.files.__setitem__('/usr/local/Ascend/driver/version.info', 'Version=24.1.rc2\n'))),
    ('21', 'driver', Status.FAIL, 'is missing or a folder', 'docker run -v', machine(lambda node: node.files.pop('/usr/local/Ascend/driver/version.info'))),
    ('21', 'driver', Status.WARN, 'firmware 6.4.0', 'firmware of the same HDK', machine(lambda node: node.files.__setitem__('/usr/local/Ascend/firmware/version.info', 'Version=6.4.0.1.220\nfirmware_version=1.0\n'))),
    ('21', 'cann', Status.FAIL, 'no ascend_toolkit_install.info', 'set_env.sh', machine(lambda node: node.files.pop('/usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info'))),
    ('21', 'cann', Status.WARN, 'CANN 8.3.RC2', 'image', machine(lambda node: node.files.__setitem__('/usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info', 'version=8.3.RC2\n'))),
    ('22', 'preload', Status.FAIL, 'names /usr/lib/libjemalloc.so', 'libjemalloc2', variable('LD_PRELOAD', '/usr/lib/libjemalloc.so')),
    ('23', 'proxy', Status.WARN, 'http_proxy set', 'unset http_proxy', variable('http_proxy', 'http://proxy:3128')),
    ('25', 'runner', Status.FAIL, 'VLLM_USE_V2_MODEL_RUNNER=1', 'VLLM_USE_V2_MODEL_RUNNER=0', variable('VLLM_USE_V2_MODEL_RUNNER', '1')),
    ('25', 'runner', Status.FAIL, '--pipeline-parallel-size 2', 'divide by tensor', option('pipeline-parallel-size', '2')),
    ('27', 'tuning', Status.WARN, '1 settings', 'transparent_hugepage', machine(lambda node: node.files.__setitem__('/sys/kernel/mm/transparent_hugepage/enabled', 'always [madvise] never\n'))),
    ('27', 'tuning', Status.WARN, '3 settings', 'numa_balancing=0', machine(lambda node: node.files.update({'/proc/sys/kernel/numa_balancing': '1\n', '/proc/sys/vm/swappiness': '60\n', '/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor': 'ondemand\n'}))),
    ('problems', 'host-registration', Status.FAIL, 'kernel 4.19.90', 'update the kernel', machine(lambda node: node.files.__setitem__('/proc/sys/kernel/osrelease', '4.19.90-vhulk2211\n'), recipe='a3x1-offload')),
    ('problems', 'host-registration', Status.WARN, 'host_mem_pool is 0 on dev7', 'cpu_offload false', machine(lambda node: node.files.__setitem__('/proc/svm/dev7/feature/host_mem_pool', '0\n'), recipe='a3x1-offload')),
    ('problems', 'host-registration', Status.WARN, 'limited to 65536', 'memlock=-1', machine(lambda node: node.files.update({'/proc/self/limits': node.files['/proc/self/limits'].replace('Max locked memory         unlimited', 'Max locked memory         65536'), '/proc/self/status': 'CapEff:\t00000000a80425fb\n'}), recipe='a3x1-offload')),
    ('problems', 'plugins', Status.FAIL, 'VLLM_PLUGINS=dsv41,ascend', 'unset VLLM_PLUGINS', variable('VLLM_PLUGINS', 'dsv41,ascend')),
    ('problems', 'plugins', Status.FAIL, 'VLLM_PLUGINS=ascend_kv_connector', 'add dsv41', variable('VLLM_PLUGINS', 'ascend_kv_connector')),
    ('problems', 'memory-plan', Status.FAIL, 'HCCL_BUFFSIZE 100', 'dsv41 plan', variable('HCCL_BUFFSIZE', '100')),
    ('issue 9', 'remote-code', Status.WARN, '--trust-remote-code', 'leave it out', option('trust-remote-code', True)),
    ('issue 9', 'remote-code', Status.FAIL, '--load-format pt', 'leave it out', option('load-format', 'pt')),
    ('issue 9', 'access', Status.WARN, '--host 0.0.0.0 without an API key', 'VLLM_API_KEY', option('host', '0.0.0.0')),
    ('issue 9', 'access', Status.WARN, 'process list', 'export VLLM_API_KEY', option('api-key', 'secret')),
    ('issue 9', 'access', Status.WARN, '8.8.8.8 is a public address', 'firewall', option('data-parallel-address', '8.8.8.8')),
    ('issue 9', 'access', Status.FAIL, 'VLLM_SERVER_DEV_MODE', 'unset', variable('VLLM_SERVER_DEV_MODE', '1')),
    ('issue 9', 'open-files', Status.WARN, '1024 open files', 'ulimit -n', machine(lambda node: node.files.__setitem__('/proc/self/limits', 'Max open files            1024                 4096                 files\n'))),
    ('26', 'recipe', Status.WARN, '--tensor-parallel-size 4', 'the same on all nodes', lambda node: launched(given=[*('dsv41', 'serve'), *command(launched().recipe, launched().node, '/data/weights').arguments, *('--tensor-parallel-size', '4')])),
]
# fmt: on
